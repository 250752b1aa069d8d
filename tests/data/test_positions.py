"""The positions of a shard_loader: a run that continues from any of them uses the same samples as
the run that was not interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, Sampler

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from tests.support.pool import on_ranks, run_on_ranks

EPOCHS, R = 3, Replicate()
SIZE = 6


class Shuffled(Sampler[int]):
    """Has a generator of its own, which is not torch's."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(0)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw.permutation(SIZE).tolist())


class Unseeded(Shuffled):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SIZE), SIZE))


class Steps(Shuffled):
    """The order of each epoch follows from ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(SIZE).tolist())


class Batches(Shuffled):
    """Draws the order when it is called, and not when the first batch is read."""

    def __iter__(self) -> Any:
        order = self.draw.permutation(SIZE).tolist()
        return iter([order[:4], order[4:]])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def with_replacement() -> Any:
    """Draws 32 indices at a time, while the epoch runs."""
    return RandomSampler(range(SIZE), replacement=True, num_samples=70, generator=seeded())


LOADERS: dict[str, Callable[[], Any]] = {
    "torch's generator": lambda: DataLoader(range(SIZE), 2, shuffle=True),
    "a generator": lambda: DataLoader(range(SIZE), 4, shuffle=True, generator=seeded()),
    "persistent workers": lambda: DataLoader(
        range(SIZE), 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "eager": lambda: DataLoader(range(SIZE), batch_sampler=Batches(), num_workers=1),
    "no shuffling": lambda: DataLoader(range(SIZE), 4, drop_last=True),
    "with replacement": lambda: DataLoader(range(SIZE), 25, sampler=with_replacement()),
    "a sampler's own numbers": lambda: DataLoader(range(SIZE), 2, sampler=Shuffled()),
    "set_epoch": lambda: DataLoader(range(SIZE), 2, sampler=Steps()),
    "workers": lambda: DataLoader(range(SIZE), 4, shuffle=True, generator=seeded(), num_workers=1),
}


def made(kind: str, seed: int = 1) -> Any:
    mesh = ProcessMesh(range(dist.get_world_size()), ("dp",))
    torch.manual_seed(seed)
    return dt.shard_loader(LOADERS[kind](), mesh, [Shard(0)])


def begin(loader: Any, epoch: int) -> Any:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    return iter(loader)


def given(batches: Any) -> list[list[int]]:
    return [batch.full_tensor().tolist() for batch in batches]


def run(loader: Any, first: int = 0) -> list[Any]:
    return [given(begin(loader, epoch)) for epoch in range(first, EPOCHS)]


@on_ranks(2, timeout=120)
def test_a_run_continues_from_each_position_of_three_epochs():
    for kind in LOADERS:
        expected = run(made(kind))
        assert kind == "no shuffling" or expected[0] != expected[1]
        count = len(expected[0])
        points = [(e, k) for e in range(EPOCHS) for k in (None, *range(count + 1))]
        if kind in ("workers", "persistent workers", "eager"):
            points = [(0, 1), (1, None), (1, 1)]
        for epoch, batches in points:
            loader = made(kind)
            for e in range(epoch):
                given(begin(loader, e))
            head = []
            if batches is not None:
                running = begin(loader, epoch)
                head = [next(running).full_tensor().tolist() for _ in range(batches)]
            state, drawn = loader.state_dict(), torch.get_rng_state()
            for other in (1, 7):  # the seed that the new run starts with
                again = made(kind, other)
                again.load_state_dict(state)
                torch.set_rng_state(drawn)
                got = [head + given(begin(again, epoch)), *run(again, epoch + 1)]
                assert got == expected[epoch:], (kind, epoch, batches)
            if batches is None:  # the state alone is enough
                again = made(kind, 7)
                again.load_state_dict(state)
                assert run(again, epoch) == expected[epoch:], (kind, epoch)


@on_ranks(2)
def test_a_rank_that_loads_nothing_has_the_order_of_one_process():
    mesh = ProcessMesh(range(2), ("tp",))
    for kind in ("workers", "persistent workers", "eager"):
        plain, loader = LOADERS[kind](), dt.shard_loader(LOADERS[kind](), mesh, [R], load_once=True)
        for _ in range(EPOCHS):
            assert given(loader) == [batch.tolist() for batch in plain], kind


def test_a_checkpoint_between_two_epochs_continues_with_the_next_order(tmp_path: Path) -> None:
    run_on_ranks(2, continue_from_checkpoint, str(tmp_path))


def continue_from_checkpoint(folder: str) -> None:
    loader = made("torch's generator")
    given(loader)
    dt.Checkpointer(folder).save(1, loader=loader)
    torch.rand(3)  # as a sample of the model's text
    expected = run(loader)
    loader = made("torch's generator")
    dt.Checkpointer(folder).load(loader=loader)
    torch.rand(3)
    assert run(loader) == expected


@on_ranks(2)
def test_another_order_than_that_of_the_saved_run_is_an_error_on_all_ranks():
    mesh = ProcessMesh(range(2), ("dp",))
    random.seed(0)
    loader = dt.shard_loader(DataLoader(range(SIZE), 2, sampler=Unseeded()), mesh, [Shard(0)])
    given(loader)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    loader = dt.shard_loader(DataLoader(range(SIZE), 2, sampler=Unseeded()), mesh, [Shard(0)])
    loader.load_state_dict(state)
    random.seed(dist.get_rank() and 5)
    with pytest.raises((ValueError, RuntimeError), match="the sampler gives another order"):
        next(iter(loader))
    loader = dt.shard_loader(DataLoader(range(SIZE), 2), mesh, [Shard(0)])
    assert [*chain(*given(loader))] == [*range(SIZE)]


@on_ranks(2)
def test_two_iterators_of_one_loader_have_a_position_each():
    for kind in ("a generator", "with replacement", "torch's generator"):
        plain = made(kind).loader
        torch.manual_seed(1)

        def nested(loader: Any, take: Callable[[Any], Any]) -> list[Any]:
            out = []
            for i, batch in enumerate(loader):
                out.append(take(batch))
                if i == 0:
                    out += [take(other) for other in loader]
                if i == 1:
                    out.append(take(next(iter(loader))))  # a loop that is left
            return out

        expected = [nested(plain, torch.Tensor.tolist) for _ in range(2)]
        loader = made(kind)
        assert [nested(loader, lambda b: b.full_tensor().tolist()) for _ in range(2)] == expected
        loader = made(kind)
        outer = iter(loader)
        head = [next(outer).full_tensor().tolist()]
        inner = given(loader)
        state, drawn = loader.state_dict(), torch.get_rng_state()
        assert state["samples"] == len(head[0]) and inner
        rest = given(outer), given(loader)
        for seed in (1, 7):
            again = made(kind, seed)
            again.load_state_dict(state)
            torch.set_rng_state(drawn)
            assert (given(again), given(again)) == rest, kind


@on_ranks(2)
def test_a_position_is_that_of_the_iterator_that_has_not_ended():
    loader = made("a generator")
    assert loader.state_dict()["samples"] == 0 and not loader.state_dict()["inside"]
    for _ in loader:
        break
    assert loader.state_dict()["samples"] == 4  # a loop that was left continues
    outer, inner = iter(loader), iter(loader)
    next(outer), next(outer), next(inner)
    with pytest.raises(RuntimeError, match=r"2 iterators of this loader .* after 6, 4 samples"):
        loader.state_dict()
    given(inner)
    assert loader.state_dict()["samples"] == 6
    given(outer)
    assert loader.state_dict()["samples"] == 0 and loader.state_dict()["epochs"] == 3


@on_ranks(2)
def test_a_loop_that_was_left_inside_of_another_changes_no_position():
    loader, seen, saved = made("torch's generator"), [], []
    for batch in loader:
        seen.append(batch.full_tensor().tolist())
        if len(seen) == 2:
            for _ in loader:
                break
            saved = [loader.state_dict(), torch.get_rng_state()]
    later = given(loader)
    again = made("torch's generator", 7)
    again.load_state_dict(saved[0])
    torch.set_rng_state(saved[1])
    assert given(again) == seen[2:] and given(again) == later
    for _ in range(2):  # loops that are left, one after another
        for _ in again:
            break
    assert again.state_dict()["epochs"] == 3
