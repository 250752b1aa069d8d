"""Processes that are killed while they save: the newest complete checkpoint loads, and is whole.

    python -m tests.checkpoint.killed       one rank and all, at each event of a save (make square)

An event is a call of the operating system that changes the folder: open, write, fsync, mkdir,
rename, remove. A process is a fork of this one, which is quicker than to start one.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

import disttensor as dt
from disttensor.checkpoint import synced_file
from disttensor.checkpoint.folder import LocalFolder

RANKS, SECONDS = 2, 60.0


def state(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after so many steps: their values say which."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if dist.is_initialized():
        mesh = dt.init_mesh((dist.get_world_size(),), ("dp",))
        dt.shard_data_parallel(dt.shard_module(model, mesh, {}), mesh, shard_axis="dp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(step):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


class Events:
    """Kills this process at event number ``last``; counts them all."""

    def __init__(self, last: int | None) -> None:
        self.last, self.count = last, 0

    def __call__(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def event(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return event

    def install(self) -> None:
        for name in ("fsync", "mkdir", "rename", "rmdir", "unlink"):
            setattr(os, name, self(getattr(os, name)))
        synced_file.SyncedFile.write = self(synced_file.SyncedFile.write)  # type: ignore[method-assign]
        synced_file.open = self(open)  # type: ignore[attr-defined]


def save(
    folder: Path, store: str, rank: int, ranks: int, last: int | None, background: bool
) -> int:
    """Save step 1, and be killed in the midst of step 2: how many events there are."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    checkpoints = dt.Checkpointer(folder, keep=1)
    model, optimizer = state(1)
    checkpoints.save(1, model=model, optimizer=optimizer)
    model, optimizer = state(2)
    events = Events(last)
    events.install()
    checkpoints.save(2, background=background, model=model, optimizer=optimizer)
    checkpoints.wait()
    return events.count


def forked(body: Callable[[], int]) -> int:
    """Run ``body`` in a fork: its process id. The exit status is what ``body`` gives."""
    pid = os.fork()
    if pid:
        return pid
    try:
        status = body()
    except BaseException:  # of a rank whose neighbour was killed
        if "-v" in sys.argv:
            traceback.print_exc()
        status = 255
    os._exit(status)


def ended(pids: Iterable[int], at_once: bool) -> list[int]:
    """The exit statuses. Once one was killed, the others are: after a moment or ``at_once``."""
    statuses: dict[int, int] = {}
    pids, limit = list(pids), time.monotonic() + SECONDS
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = status
        if any(os.WIFSIGNALED(status) for status in statuses.values()):
            limit = min(limit, time.monotonic() + (0 if at_once else 0.3))
        if time.monotonic() >= limit:
            for pid in set(pids) - statuses.keys():
                os.kill(pid, signal.SIGKILL)
            limit += SECONDS
        time.sleep(0.002)
    return [os.waitstatus_to_exitcode(statuses[pid]) for pid in pids]


def whole(folder: Path, known: dict[int, Any]) -> int:
    """The step of the newest complete checkpoint, which has the values of that step."""
    model, optimizer = state(0)
    checkpoints = dt.Checkpointer(folder)
    step = checkpoints.load(model=model, optimizer=optimizer)
    assert step in known, step
    found = [*model.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values())]
    for x, y in zip(found, known[step], strict=True):
        assert torch.equal(x, y), step
    assert len(LocalFolder(folder).complete()) in (1, 2)
    checkpoints.save(3, model=model, optimizer=optimizer)  # removes what is left of the other
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return step


def values(step: int) -> list[Any]:
    model, optimizer = state(step)
    return [*model.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values())]


def check(points: int | None, background: bool) -> int:
    """One process alone, one of two and both are killed at ``points`` events (None: at each), and
    each time the newest checkpoint is whole. Gives the number of kills."""
    known = {step: values(step) for step in (1, 2)}
    kills = 0
    for ranks, victims in ((1, [0]), (RANKS, [0]), (RANKS, [1]), (RANKS, [0, 1])):
        steps = []
        total = kill(ranks, victims, None, background)[0]
        every = range(1, total + 1)
        for last in every if points is None else list(every)[:: max(1, total // points)]:
            with tempfile.TemporaryDirectory() as name:
                kill(ranks, victims, last, background, name)
                steps.append(whole(Path(name, "run"), known))
            kills += 1
        assert steps[0] == 1 and steps == sorted(steps), steps
    return kills


def kill(
    ranks: int, victims: list[int], last: int | None, background: bool, name: str | None = None
) -> list[int]:
    """Run a save that is killed at event ``last``; with None, how many events the first victim
    has."""
    with tempfile.TemporaryDirectory() as own:
        place = Path(name or own)
        pids = [
            forked(
                lambda: save(
                    place / "run", str(place / "store"), rank, ranks,
                    last if rank in victims else None, background,
                )
            )
            for rank in range(ranks)
        ]  # fmt: skip
        statuses = ended(pids, at_once=len(victims) == ranks)
    assert last is None or -signal.SIGKILL in statuses, statuses
    return [statuses[victim] for victim in victims]


def main() -> None:
    points = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else None
    torch.set_num_threads(1)
    for background in (False, True):
        kills = check(points, background)
        where = "in the background" if background else "in the foreground"
        print(
            f"killed {kills} times {where}: the newest checkpoint was whole each time", flush=True
        )


if __name__ == "__main__":
    main()
