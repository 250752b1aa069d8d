"""Real processes for tests: a function runs on every rank of a world of gloo processes.

    @on_ranks(4)
    def test_sum_of_ranks(): ...                 # the body runs on ranks 0..3

    ranks = run_on_ranks(2, dist.get_rank)       # results by rank: [0, 1]

The workers of a world (tests/support/pool_worker.py) start at first use and are kept: most tests
pay for the call only. They are forked from processes that have imported PyTorch and disttensor.
After anything but success they are ended, and the next test gets new ones, because ranks that
failed may be out of step. Every call ends: ranks that do not answer within ``timeout`` seconds are
named, with the Python stack that they hang in.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from disttensor.comm import compare_programs, send_queue
from tests.support import fork_server, pickling

START_LIMIT = 120.0  # seconds for the workers of a world to start
GRACE = 3.0  # seconds for the other ranks to fail too, once one has failed
ROOT = fork_server.ROOT

warning_filters: list[str] = ["error"]  # as in pyproject.toml; tests/conftest.py sets them
_pools: dict[int, Pool] = {}


class RanksFailed(AssertionError):
    """Some ranks raised, died or hung; the message names each, with its traceback."""


def reset() -> None:
    """Put a worker's state back to the start; called before each body."""
    if "RAN_STATEMENTS" in os.environ:  # each body decides again
        importlib.import_module("tests.mutants.statements").forget()
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for each device
    compare_programs.CALLS.clear()  # what ranks did apart in an earlier body
    if send_queue.QUEUE.open:  # runs of an earlier body that failed have left messages
        send_queue.QUEUE = send_queue.SendQueue()


def on_ranks(world: int, timeout: float = 60.0) -> Callable[..., Callable[..., None]]:
    """Decorator: run this test function on each of ``world`` ranks, with the same arguments.

    Arguments (parameters, fixtures) are pickled. The test fails with what the ranks raised.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            # Results of a test say nothing, and need not be picklable: only None comes back.
            failure = ""
            try:
                run_on_ranks(world, _silent, body, args, kwargs, timeout=timeout)
            except RanksFailed as error:
                failure = str(error)
            if failure:  # the tracebacks of the ranks are in the text; this process has none to add
                pytest.fail(failure, pytrace=False)

        test.on_ranks_timeout = timeout  # type: ignore[attr-defined]
        return test

    return decorate


def run_on_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """``fn(*args)`` on each of ``world`` ranks: the results by rank. Raises RanksFailed."""
    __tracebackhide__ = True
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = Pool(world)
    try:
        answers = pool.call(fn, args, timeout)
    except BaseException:  # an interrupt too: whoever stays behind is out of step
        stop(world)
        raise
    if all(kind == "skip" for kind, _ in answers):
        pytest.skip(str(answers[0][1]))
    if any(kind != "ok" for kind, _ in answers):
        stop(world)
        raise RanksFailed(_report(answers))
    return [pickle.loads(value) for _, value in answers]


def stop(world: int | None = None) -> None:
    """End the workers of ``world``, or all workers of this process."""
    for size in list(_pools) if world is None else [world]:
        pool = _pools.pop(size, None)
        if pool is not None:
            pool.stop()


atexit.register(stop)


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """PyTorch's fake process group in this process: ``size`` ranks, collectives that do nothing.

    For what depends on a large mesh but not on data: shapes, plans, what would be communicated.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"fake_world({size}): this process already has a process group of "
            f"{dist.get_world_size()} ranks; leave that one first (destroy_process_group)"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _silent(body: Callable[..., object], args: Any, kwargs: Any) -> None:
    try:
        body(*args, **kwargs)
    finally:  # the next body runs in the same process
        for fixture in (*args, *kwargs.values()):
            if isinstance(fixture, pytest.MonkeyPatch):
                fixture.undo()


class Pool:
    """The worker processes of one world. A pool that failed is stopped, never mended."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.stacks = tempfile.TemporaryDirectory(prefix="ranks-")
        # This process holds the store, on a port that the system chose: nothing to race for.
        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self.connections: list[Connection] = []
        self.processes: list[fork_server.Worker] = []
        try:
            for rank, server in enumerate(fork_server.servers(world)):
                self._start(rank, server)
            started = self._collect(START_LIMIT)
            if any(kind != "ok" for kind, _ in started):
                raise RanksFailed(f"{world} workers do not start\n{_report(started)}")
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int, server: fork_server.ForkServer) -> None:
        here, there = multiprocessing.Pipe()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if Path("/sys/class/net/lo").exists():  # gloo: do not look the host's name up
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        config = (rank, self.world, self.store.port, str(self._stack_file(rank)))
        self.processes.append(server.start(env, there.fileno(), *config))
        self.connections.append(here)
        there.close()  # only the worker has it now: when the worker ends, ``here`` is at its end

    def call(self, fn: Callable[..., Any], args: Any, timeout: float) -> list[tuple[str, Any]]:
        """One (kind, value) for each rank; kind is ok, skip, error, died or hung."""
        message = pickling.dumps((fn, args, warning_filters))
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a dead worker: found when its answer is missing
                connection.send_bytes(message)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        end = time.monotonic() + timeout
        while len(answers) < self.world:
            waiting = {self.connections[r]: r for r in range(self.world) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[rank] = ("died", self._exit_code(rank))
                if answers[rank][0] not in ("ok", "skip"):
                    end = min(end, time.monotonic() + GRACE)
        hung = [rank for rank in range(self.world) if rank not in answers]
        failed = any(kind in ("error", "died") for kind, _ in answers.values())
        why = f"{GRACE:g} s after another rank failed" if failed else f"after {timeout:g} s"
        for rank, stack in zip(hung, self._stacks_of(hung), strict=True):
            answers[rank] = ("hung", f"still running {why}, in\n{stack}")
        return [answers[rank] for rank in range(self.world)]

    def _exit_code(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.processes[rank].wait(timeout=5)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return f"the process ended ({how})"
        return "the process closed its connection"

    def _stacks_of(self, ranks: list[int]) -> list[str]:
        """What each of these ranks is doing: faulthandler writes it, even if the rank is in C."""
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        files = [self._stack_file(rank) for rank in ranks]
        return [file.read_text() if file.exists() else "(no stack)" for file in files]

    def _stack_file(self, rank: int) -> Path:
        return Path(self.stacks.name, f"rank{rank}")

    def stop(self) -> None:
        for connection in self.connections:
            connection.close()  # an idle worker ends by itself
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.stacks.cleanup()


def _report(answers: list[tuple[str, Any]]) -> str:
    """Failures of all ranks as one text; ranks that say the same stand together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (kind, value) in enumerate(answers):
        if kind != "ok":  # addresses differ between processes and say nothing
            text = re.sub(r"0x[0-9a-f]{6,}", "0x..", str(value))
            groups.setdefault((kind, text), []).append(rank)
    verbs = {"error": "raised", "died": "died", "hung": "hung", "skip": "skipped"}
    order = list(verbs)
    parts = []
    for (kind, text), ranks in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        parts.append(f"{who} of {len(answers)} {verbs[kind]}:\n{text}")
    return "\n".join(parts)
