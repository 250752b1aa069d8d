"""Samples that several ranks of a shard_loader hold: they compare the values, or one rank loads
them and sends them to the others."""

from __future__ import annotations

import random
import threading
import time
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from disttensor.data.batch import fast_digest
from tests.support.layouts import grid, same
from tests.support.pool import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), dt.Partial()


class Augmented(Dataset[Any]):
    """``differs``: draws from Python's generator, which has a seed of its own in each process."""

    def __init__(self, size: int, differs: bool) -> None:
        self.size, self.differs = size, differs
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        first = random.Random() if self.differs else random.Random(i)
        return {"x": torch.arange(i, i + 6.0) + first.random(), "label": torch.tensor(i)}


def collated(samples: Any) -> Any:
    x = torch.stack([s["x"] for s in samples])
    label = torch.stack([s["label"] for s in samples])
    return {"x": x, "label": label, "total": x.sum(dtype=torch.float64)}


LAYOUTS: list[dict[str, Any]] = [
    {"x": [S0, R], "label": [S0, R], "total": [P, R]},
    {"x": [S1, S0], "label": [R, S0], "total": [R, P]},
]


def loaded(layout: Any, differs: bool, **options: Any) -> tuple[Any, list[Any]]:
    samples = Augmented(5, differs)
    loader = DataLoader(samples, 3, collate_fn=collated)
    return samples, list(dt.shard_loader(loader, grid(), layout, **options))


@on_ranks(4)
def test_replicas_with_other_values_are_an_error_on_all_ranks():
    for layout in LAYOUTS:
        want = list(DataLoader(Augmented(5, differs=False), 3, collate_fn=collated))
        _, got = loaded(layout, differs=False)
        for batch, expected in zip(got, want, strict=True):
            same(list(batch.values()), list(expected.values()))
        with pytest.raises(ValueError, match=r"batch\['x'\] of the samples 0 to 1 has"):
            loaded(layout, differs=True)


@on_ranks(4)
def test_one_of_the_replicas_loads_and_sends():
    for layout in LAYOUTS:
        for differs in (False, True):
            samples, got = loaded(layout, differs, load_once=True)
            asked: list[Any] = [None] * 4
            dist.all_gather_object(asked, samples.asked)
            assert sorted(chain(*asked)) == [*range(5)]
            for batch in got:
                whole = {name: x.full_tensor() for name, x in batch.items()}
                others: list[Any] = [None] * 4
                dist.all_gather_object(others, {k: x.tolist() for k, x in whole.items()})
                assert others == others[:1] * 4  # equal on all ranks, also the replicas
                local = batch["x"].to_local()
                alike = dt.from_local(local, batch["x"].process_mesh, batch["x"].placements)
                assert alike.full_tensor().equal(whole["x"])
                assert whole["total"].item() == pytest.approx(whole["x"].double().sum().item())
            if not differs:
                want = list(DataLoader(Augmented(5, differs=False), 3, collate_fn=collated))
                for batch, expected in zip(got, want, strict=True):
                    same(list(batch.values()), list(expected.values()))


@on_ranks(2)
@pytest.mark.parametrize("load_once", [False, True])
def test_a_thread_may_load_while_the_program_reduces(load_once):
    mesh = ProcessMesh(range(2), ("x",))
    loader = DataLoader(torch.arange(6), 3)
    batches = iter(dt.shard_loader(loader, mesh, [Replicate()], load_once=load_once))
    summed, got = dt.ones(2, mesh=mesh, placements=[Shard(0)]).sum(), []
    thread = threading.Thread(target=lambda: got.extend(batches))
    if dist.get_rank() == 0:
        thread.start()
        time.sleep(0.5)
    total = summed.redistribute(placements=[Replicate()])  # rank 1 waits here, and loads then
    if dist.get_rank() == 1:
        thread.start()
    thread.join()
    assert total.to_local().item() == 2
    assert [x.to_local().tolist() for x in got] == [[0, 1, 2], [3, 4, 5]]


@on_ranks(4)
def test_meshes_of_stages_load_once_each():
    first, last = ProcessMesh([[0, 1]], ("dp", "tp")), ProcessMesh([[2], [3]], ("dp", "tp"))
    samples = Augmented(5, differs=False)
    loader = DataLoader(samples, 5, collate_fn=lambda s: (collated(s)["x"], collated(s)["label"]))
    ((x, label),) = dt.shard_loader(loader, (first, last), [S0, R], load_once=True)
    assert x.process_mesh == first and label.process_mesh == last
    assert len(samples.asked) == {0: 5, 1: 0, 2: 3, 3: 2}[dist.get_rank()]
    want = collated([Augmented(5, differs=False)[i] for i in range(5)])
    for got, name in ((x, "x"), (label, "label")):
        assert not got.is_initialized or got.full_tensor().equal(want[name])


@on_ranks(2)
def test_a_number_of_samples_that_two_ranks_load_is_refused():
    mesh = ProcessMesh([[0, 1]], ("dp", "cp"))
    loader = DataLoader(Augmented(4, differs=False), 4, collate_fn=collated)
    layout: Any = {"x": [S0, S1], "label": [S0, R], "total": [P, P]}
    with pytest.raises(ValueError, match="would count them twice"):
        dt.shard_loader(loader, mesh, layout)
    layout["total"] = [P, R]
    (batch,) = dt.shard_loader(loader, mesh, layout)
    assert batch["total"].item() == pytest.approx(batch["x"].double().sum().item())


def test_the_digest_finds_changed_moved_and_cut_values() -> None:
    for size in (0, 1, 3, 511, 512, 513, 5000):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        assert fast_digest(x) == fast_digest(x.clone()) == fast_digest(torch.stack([x, x])[1])
        strided = torch.stack([x, x], 1)[:, 0]
        assert fast_digest(strided) == fast_digest(x)
        for at in range(0, size, max(1, size // 7)):
            other = x.clone()
            other[at] = -other[at]
            assert fast_digest(other) != fast_digest(x)
        if size > 2:
            assert fast_digest(x.flip(0)) != fast_digest(x) != fast_digest(x[:-1])
            assert fast_digest(x.roll(1)) != fast_digest(x)
    assert fast_digest(torch.tensor(True)) != fast_digest(torch.tensor(False))


class Drawn(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        return torch.rand(2)


def drawn(batches: Any) -> list[float]:
    return [value for batch in batches for value in batch.full_tensor().flatten().tolist()]


@on_ranks(4)
def test_pieces_draw_other_numbers_and_replicas_the_same():
    for workers, options in ((0, {}), (1, {}), (0, {"load_once": True})):
        torch.manual_seed(7)
        plain = DataLoader(Drawn(), 4, num_workers=workers)
        loader = dt.shard_loader(plain, grid(), [S0, R], **options)
        numbers = drawn(loader) + drawn(loader)  # the last batch has one sample
        assert len(set(numbers)) == 20
        after: list[Any] = [None] * 4
        dist.all_gather_object(after, (numbers, torch.rand(2).tolist()))
        assert after == after[:1] * 4, (workers, options)


@on_ranks(2)
def test_random_numbers_of_samples_after_a_resume_and_in_whole_batches():
    mesh = ProcessMesh(range(2), ("x",))
    torch.manual_seed(7)
    loader = dt.shard_loader(DataLoader(Drawn(), 2), mesh, [S0])
    batches = iter(loader)
    next(batches)
    state, at = loader.state_dict(), torch.get_rng_state()
    torch.rand(3)  # as the model may
    rest = drawn(batches)
    loader = dt.shard_loader(DataLoader(Drawn(), 2), mesh, [S0])
    loader.load_state_dict(state)
    torch.set_rng_state(at)
    assert drawn(loader) == rest
    for workers in (0, 1):
        plain = DataLoader(Drawn(), 2, num_workers=workers)
        torch.manual_seed(7)
        want = [x for batch in plain for x in batch.flatten().tolist()], torch.rand(1)
        torch.manual_seed(7)
        assert (drawn(dt.shard_loader(plain, mesh, [R])), torch.rand(1)) == want
