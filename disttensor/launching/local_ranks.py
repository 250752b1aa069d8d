"""local_ranks: many ranks without a launcher, of which one is this process.

Entering the block forks this process: the forks run the same body as the other ranks, on real
processes with gloo, and end where the block ends. So one rank is visible, and a debugger steps
through it. Threads as ranks would share the caches, counters and random state of this library and
of torch, of which each process has one.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pdb
import sys
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch

from disttensor.checks import argument_error, check_int
from disttensor.comm import failure_watch
from disttensor.comm.groups import Group
from disttensor.comm.process_group import environment_set, join_world
from disttensor.errors import CommError, DistTensorError
from disttensor.launching.children import GRACE, Children, Forked, check_alone
from disttensor.launching.rank import LinePrefixer, become_rank, end_rank, environment, leave_world
from disttensor.observe import Observer
from disttensor.runtime import current_runtime
from disttensor.torch_private import default_group, default_store, set_timeout

MEETING = 120.0  # seconds for all ranks to start
FOREVER = 365 * 24 * 3600.0  # seconds that a rank waits for one that a debugger has stopped


class local_ranks:
    """``with dt.local_ranks(8):`` runs the block as 8 ranks without a launcher: for learning, for
    debugging, and in notebooks.

    This process is rank 0. The other ranks are forks of it, which run the same block, print
    nothing, and end with it. After the block this process is a world of one again. A debugger stops
    rank 0 alone, and the others wait for it without a time limit. Each rank computes with one
    thread.

    Args:
        nprocs: the number of ranks, at least 1.
        output: "first" (rank 0 prints), or "all" (each rank prints; lines of the other ranks begin
            with their number).

    Returns:
        To the block, its rank, as in ``with dt.local_ranks(8) as rank``.

    Raises:
        RankError: the first error of another rank, at the end of the block.
        RuntimeError: this process is a rank already (also in another ``local_ranks``), has used
            CUDA, or runs on a system without ``fork``.

    >>> with dt.local_ranks(2):  # doctest: +SKIP
    ...     x = dt.arange(5, mesh=dt.init_mesh((2,)), placements=[dt.Shard(0)])
    ...     print(dt.debugging.pieces(x), x.sum().item())
    [tensor([0, 1, 2]), tensor([3, 4])] 10
    """

    def __init__(self, nprocs: int, *, output: Literal["first", "all"] = "first") -> None:
        self._size = check_int("local_ranks: nprocs", nprocs, 1)
        if output not in ("first", "all"):
            raise argument_error("local_ranks: output", output, '"first" or "all"', ValueError)
        self._output, self._rank = output, 0
        self._connection: Any = None  # to the parent
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> int:
        check_alone("local_ranks")
        if not hasattr(os, "fork"):
            raise RuntimeError("local_ranks: this system cannot fork. Use dt.launch(fn, nprocs)")
        if torch.cuda.is_initialized():
            raise RuntimeError(
                "local_ranks: this process has used CUDA, which its forks could not use. Enter the "
                "block before the first use of CUDA, or use dt.launch(fn, nprocs)"
            )
        self._children, parent = Children("local_ranks", self._size), os.getpid()
        try:
            for rank in range(1, self._size):
                self._connection = self._children.start(rank, lambda there: Forked())
                if self._connection is not None:
                    self._join(rank, parent)
                    return rank
            self._lead()
        except BaseException:
            self._end()
            raise
        return 0

    def _join(self, rank: int, parent: int) -> None:
        """Makes this fork a rank. It ends in ``__exit__``."""
        self._rank = rank
        try:
            become_rank(rank, self._size, parent, self._connection)
            _silence(f"[rank {rank}] " if self._output == "all" else None)
            sys.settrace(None)
            sys.breakpointhook = lambda *args, **kwargs: None
            pdb.Pdb.interaction = _go_on  # type: ignore[method-assign]
            _join_world()
        except BaseException as error:
            end_rank(self._connection, error)

    def _lead(self) -> None:
        """Makes this process rank 0."""
        threads, prompt = torch.get_num_threads(), pdb.Pdb.interaction
        variables = environment(0, self._size, self._children.start_store())
        self._undo.enter_context(environment_set(variables))
        self._undo.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # as in the forks: the same numbers on all ranks
        _join_world()
        current_runtime().posts_errors = False  # an error at a prompt ends no waits

        def at_prompt(*args: Any, **kwargs: Any) -> None:
            with _Prompt():
                prompt(*args, **kwargs)

        self._undo.callback(setattr, pdb.Pdb, "interaction", prompt)
        pdb.Pdb.interaction = at_prompt  # type: ignore[method-assign]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rank:
            end_rank(self._connection, error, trace=trace)
        try:
            if error is None or isinstance(error, SystemExit):
                if self._children.receive(GRACE) and not self._children.failures:
                    leave_world()
                    _close_groups()
                    self._children.receive(math.inf)
                self._children.check()
            elif isinstance(error, CommError):  # its cause may be an error of another rank
                self._children.receive(GRACE)
                self._children.check()
        finally:
            self._end()

    def _end(self) -> None:
        self._children.kill()
        try:
            leave_world()
        finally:
            _close_groups()
            self._undo.close()
            self._children.store = None


def _close_groups() -> None:
    """Closes the connections of this rank, also those that tensors of the block refer to. Ranks
    that wait for this one get an error, and later forks do not inherit groups without threads."""
    for found in gc.get_objects():
        if type(found) is Group:
            found.pg = None


def _join_world() -> None:
    """Joins the other ranks, which arrive soon. Later waits for them have no time limit."""
    join_world(timeout=MEETING)
    limit = timedelta(seconds=FOREVER)
    set_timeout(limit, default_group())
    default_store().set_timeout(limit)
    failure_watch.watch()  # other ranks notice a rank that ends before it makes a mesh


def _go_on(self: pdb.Pdb, *args: object, **kwargs: object) -> None:
    """Replaces the prompt of a debugger in a fork: continues."""
    self.set_continue()


class _Prompt(Observer):
    """Forbids communication at the prompt of a debugger, where the other ranks take no part."""

    def compare_read(self) -> None:
        self._refuse("a read of a value that is split or pending")

    def communicate(self, record: Any) -> None:
        self._refuse(record.kind)

    def _refuse(self, kind: str) -> None:
        raise DistTensorError(
            f"{kind} at the debugger's prompt: only rank 0 is here, and the other ranks "
            "wait elsewhere. Look at x or x.to_local(), which send nothing, or step over a line of "
            "the program that communicates (n)"
        )


def _silence(prefix: str | None) -> None:
    """Detaches this fork from the terminal; with ``prefix`` it prints lines that begin with it."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    if prefix is not None:
        sys.stdout, sys.stderr = (LinePrefixer(s, prefix) for s in (sys.stdout, sys.stderr))
        return
    for number in (1, 2):
        os.dup2(null, number)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
