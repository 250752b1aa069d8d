"""Two activities in the background at a time, begun in one order on all ranks, and slow on each for
a while of its own: each gives what it gives alone."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from disttensor.comm import objects
from disttensor.comm.work import Work
from tests.support.part import part
from tests.support.pool import on_ranks

End = Callable[[], None]


class World:
    """What the activities share, and the ways to begin each: ``begin(n)`` gives its end, which
    checks what came. ``n`` differs between any two."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = dt.ProcessMesh(range(self.size), ("dp",))
        self.checkpoints = {name: dt.Checkpointer(folder / name) for name in ("last", "best")}
        self.folder, self.numbers = folder, torch.arange(7.0)
        for each in self.checkpoints.values():
            each.save(0, x=self.value(0), n=[0])

    def value(self, n: int) -> dt.DistTensor:
        return dt.shard_tensor(self.numbers + n, self.mesh, [Shard(0)])

    def loaded(self, name: str, n: int) -> None:
        x, notes = self.value(-1), [0]
        dt.Checkpointer(self.folder / name).load(n, x=x, n=notes)
        assert x.full_tensor().tolist() == (self.numbers + n).tolist()
        assert notes == [n] * (1 + n % 5)

    def saves(self, name: str, n: int, background: bool = True) -> End:
        self.checkpoints[name].save(n, background=background, x=self.value(n), n=[n] * (1 + n % 5))

        def end() -> None:
            self.checkpoints[name].wait()
            self.loaded(name, n)

        return end

    def save_last(self, n: int) -> End:
        return self.saves("last", n)

    def save_best(self, n: int) -> End:
        return self.saves("best", n)

    def save_now(self, n: int) -> End:
        return self.saves("best", n, background=False)

    def load_by_another(self, n: int) -> End:
        """Of a folder that may be written to."""
        x = self.value(-1)
        step = dt.Checkpointer(self.folder / "last").load(x=x)
        assert step is not None and torch.equal(x.full_tensor(), self.numbers + step)
        return lambda: None

    def gather(self, n: int) -> End:
        x = dt.reshard(self.value(n), self.mesh, [Replicate()])  # in the background
        return lambda: self.same(x.to_local(), self.numbers + n)

    def reduction(self, n: int) -> End:
        mine = dt.from_local(self.numbers * (self.rank + n), self.mesh, [Partial()])
        x = dt.reshard(mine, self.mesh, [Shard(0)])
        wanted = self.numbers * sum(r + n for r in range(self.size))
        return lambda: self.same(x.full_tensor(), wanted)

    def message(self, n: int) -> End:
        ends = [dt.ProcessMesh([r], ("x",)) for r in (0, self.size - 1)]
        x = dt.reshard(dt.shard_tensor(self.numbers + n, ends[0], [Replicate()]), ends[1])

        def end() -> None:
            if self.rank == self.size - 1:
                self.same(x.to_local(), self.numbers + n)

        return end

    def objects(self, n: int) -> End:
        everyone = objects.gather_objects([n] * (self.rank + n % 7), self.mesh.group((0,)))
        assert everyone == [[n] * (r + n % 7) for r in range(self.size)]
        return lambda: None

    def replicas(self, n: int) -> End:
        return self.step(n, shard_axis=None)

    def sharded(self, n: int) -> End:
        return self.step(n, shard_axis="dp", stage=3)

    def step(self, n: int, **how: Any) -> End:
        """The watcher compares the programs beside it."""
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
        dt.shard_data_parallel(model, self.mesh, **how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        data = torch.arange(5.0 * (self.size + 1)).view(-1, 5) + n
        model(dt.shard_tensor(data, self.mesh, [Shard(0)])).sum().backward()

        def end() -> None:
            optimizer.step()
            grad: Any = model[1].bias.grad  # type: ignore[union-attr]
            self.same(grad.full_tensor(), torch.full((7,), self.size + 1.0))

        return end

    def users(self, n: int) -> End:
        x = self.numbers * (self.rank + n)
        work: Any = dist.all_reduce(x, async_op=True)
        wanted = self.numbers * sum(r + n for r in range(self.size))
        return lambda: (work.wait(), self.same(x, wanted))[1]

    def users_thread(self, n: int) -> End:
        """As of torch's own asynchronous checkpoints."""
        got: list[Any] = []

        def run() -> None:
            for i in range(4):
                x = self.numbers * (self.rank + n + i)
                dist.all_reduce(x)
                got.append(x)

        thread = threading.Thread(target=run)
        thread.start()

        def end() -> None:
            thread.join()
            for i, x in enumerate(got):
                self.same(x, self.numbers * sum(r + n + i for r in range(self.size)))

        return end

    @staticmethod
    def same(mine: torch.Tensor, wanted: torch.Tensor) -> None:
        assert torch.equal(mine, wanted), (mine, wanted)


NAMES = ["save_last", "save_best", "save_now", "load_by_another", "gather", "reduction", "message",
         "objects", "replicas", "sharded", "users", "users_thread"]  # fmt: skip
PAIRS = list(itertools.product(NAMES, NAMES))


def run(folder: Path, names: list[tuple[str, ...]]) -> None:
    world, numbers = World(folder), itertools.count(1)
    slow = random.Random(world.rank)  # another one on each rank
    gather = objects.gather_objects

    def late(*args: Any) -> Any:
        time.sleep(0.004 * slow.random())
        return gather(*args)

    objects.gather_objects = late
    try:
        for begun in names:
            ends = []
            for name in begun:
                ends.append(getattr(world, name)(next(numbers)))
                time.sleep(slow.choice((0, 0, 0.003, 0.01)))
            for end in ends if next(numbers) % 2 else ends[::-1]:
                end()
    finally:
        objects.gather_objects = gather


# Saves into one folder wait for each other; a user's two threads have no order of their own.
def _make_sense(pair: tuple[str, ...]) -> bool:
    return pair.count("users_thread") + pair.count("users") < 2


@pytest.mark.limit(400)
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_activities_at_a_time_never_take_each_others_messages(
    ranks: int, tmp_path: Path
) -> None:
    pairs = [p for p in PAIRS if _make_sense(p)]
    random.Random(1).shuffle(pairs)
    on_ranks(ranks, timeout=400)(run)(tmp_path, part(pairs, 30, ranks))


def test_a_wait_that_was_interrupted_waits_again() -> None:
    interrupts = [KeyboardInterrupt()]

    def finish() -> int:
        if interrupts:
            raise interrupts.pop()
        return 5

    work = Work(finish)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert not work.done() and work.wait() == work.wait() == 5


def test_two_threads_that_wait_get_one_result() -> None:
    begun, go, calls = threading.Event(), threading.Event(), []

    def finish() -> object:
        calls.append(threading.get_ident())
        begun.set()
        assert go.wait(20)
        return object()

    work = Work(finish)
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(work.wait())) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(calls) == 1 and len(results) == 2 and results[0] is results[1]
