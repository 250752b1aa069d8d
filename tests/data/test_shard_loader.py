"""dt.shard_loader: the batches of one process, of which each rank loads its own samples."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from tests.support.layouts import everywhere, grid, same
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Pair = namedtuple("Pair", "tokens label")
KINDS: dict[str, Any] = {
    "tensor": lambda i: torch.arange(i, i + 3),
    "tuple": lambda i: (torch.full((3, 2), float(i)), i),
    "dict": lambda i: {"x": torch.full((5,), i), "more": [torch.tensor(i), float(i)]},
    "named": lambda i: Pair(torch.arange(i, i + 5), i),
}


class Samples(Dataset[Any]):
    def __init__(self, size: int, kind: str = "tensor") -> None:
        self.size, self.kind = size, kind
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        return KINDS[self.kind](i)


def loader_of(samples: Any, batch: int = 4, seed: int | None = 3, **options: Any) -> Any:
    if seed is not None:
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
    return DataLoader(samples, batch_size=batch, **options)


def flat(batches: Any) -> list[int]:
    return list(chain.from_iterable(batches))


def equal(got: Any, want: Any) -> None:
    """Of a batch and its structure; ranks outside the mesh compare the metadata."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        got, want = list(got.values()), list(want.values())
    if isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            equal(g, w)
    else:
        assert got.local.shape == got.spec.local_shape or not got.is_initialized
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if got.is_initialized:
            same(got, want)


@pytest.mark.feature("Data")
@everywhere
def test_batches_and_their_order_are_those_of_one_process():
    mesh = grid()
    for size, options in (
        (10, {}),  # over 2x2 the last batch leaves two ranks without a sample
        (11, {"drop_last": True, "batch": 6}),
        (7, {"batch": 3, "seed": None}),
    ):
        for kind, layout in (
            ("tensor", [S0, S0]),
            ("tuple", ([S0, R], [R, S0])),
            ("dict", [R, S0]),
            ("named", {0: [S0, S1], 1: [S0, R]}),
        ):
            plain = loader_of(Samples(size, kind), **options)
            mine = loader_of(Samples(size, kind), **options)
            sharded = dt.shard_loader(mine, mesh, layout)
            assert len(sharded) == len(plain)
            for _ in range(2):
                for got, want in zip(sharded, plain, strict=True):
                    equal(got, want)
            if kind == "tensor" and dist.get_world_size() > 1:
                asked: list[Any] = [None] * 4
                dist.all_gather_object(asked, mine.dataset.asked)
                everything = sorted(i for some in asked for i in some)
                assert everything == sorted(plain.dataset.asked)  # each sample once


@on_ranks(4)
def test_each_entry_has_its_mesh_and_a_rank_outside_loads_nothing():
    first, last = ProcessMesh([0, 1], ("dp",)), ProcessMesh([2, 3], ("dp",))
    plain, mine = loader_of(Samples(9, "tuple"), 5), loader_of(Samples(9, "tuple"), 5)
    for got, want in zip(dt.shard_loader(mine, (first, last), [S0]), plain, strict=True):
        equal(got, want)
        assert (got[0].process_mesh, got[1].process_mesh) == (first, last)
    assert len(mine.dataset.asked) == {0: 3 + 2, 1: 2 + 2}[dist.get_rank() % 2]
    mine = loader_of(Samples(9, "dict"), 5)
    assert len(list(dt.shard_loader(mine, first, [S0]))) == 2
    assert bool(mine.dataset.asked) == (dist.get_rank() < 2)


@on_ranks(2)
def test_workers_and_persistent_ones():
    mesh = ProcessMesh([0, 1], ("dp",))
    torch.manual_seed(5)
    plain = list(DataLoader(Samples(7, "tuple"), 4, shuffle=True))
    torch.manual_seed(5)
    loader = DataLoader(
        Samples(7, "tuple"), 4, shuffle=True, num_workers=1, persistent_workers=True
    )
    sharded = dt.shard_loader(loader, mesh, [S0])
    for got, want in zip(sharded, plain, strict=True):
        equal(got, want)
    assert len(list(sharded)) == 2


@everywhere
def test_it_resumes_on_another_mesh_without_losing_or_repeating_a_sample():
    world = dist.get_world_size()
    whole = ProcessMesh(range(world), ("dp",))
    part = ProcessMesh(range((world + 1) // 2), ("dp",))
    for seed in (3, None):  # a generator of its own, and torch's
        torch.manual_seed(1)
        shuffle = {"shuffle": True} if seed is None else {}
        plain = loader_of(Samples(23), 5, seed, **shuffle)
        epochs = [[b[:, 0].tolist() for b in plain] for _ in range(3)]
        for stop in (0, 2, 5):
            torch.manual_seed(1)
            before = dt.shard_loader(loader_of(Samples(23), 5, seed, **shuffle), whole, [S0])
            assert len(list(before)) == 5
            batches = iter(before)
            given = [next(batches)[:, 0].tolist() for _ in range(stop)]
            state = before.state_dict()
            assert state["samples"] == min(5 * stop, 23)
            drawn = torch.get_rng_state()
            for batch in (5, 4):
                loader = loader_of(Samples(23), batch, seed and 99, **shuffle)
                after = dt.shard_loader(loader, part, [S0])
                after.load_state_dict(state)
                torch.set_rng_state(drawn)
                with dt.values_everywhere():
                    rest = [b[:, 0].tolist() for b in after]
                    later = [b[:, 0].tolist() for b in after]
                if stop:
                    assert flat(given + rest) == flat(epochs[1])
                    assert flat(later) == flat(epochs[2])
                else:  # saved between two epochs, or before the first batch
                    assert flat(rest) == flat(epochs[1])
                assert batch != 5 or given + rest == epochs[1]
    with pytest.raises(ValueError, match="a position among 23 samples"):
        dt.shard_loader(loader_of(Samples(22)), whole, [S0]).load_state_dict(state)


class Broken(Samples):
    def __getitem__(self, i: int) -> Any:
        if i == 3:
            raise KeyError("no sample 3")
        return super().__getitem__(i)


class Words(Samples):
    def __getitem__(self, i: int) -> Any:
        return {"x": torch.zeros(2), "word": f"word {i}"}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def longest(samples: Any) -> Any:
    return torch.stack([torch.zeros(max(int(s[0]) for s in samples)) for _ in samples])


@on_ranks(2)
def test_what_cannot_be_is_an_error_on_all_ranks():
    mesh, rank = ProcessMesh([0, 1], ("dp",)), dist.get_rank()

    def fails(loader: Any, words: str, placements: Any = (S0,)) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError, KeyError), match=words):
            list(dt.shard_loader(loader, mesh, placements))

    fails(loader_of(Broken(4), seed=None), "no sample 3")  # rank 1's, on both
    fails(loader_of(Words(4), seed=None), r"batch 0 is .*\[n, 2\].*word 0.* on rank 0 and .*word 2")
    fails(loader_of(Samples(4), seed=rank), "has other samples than on rank 0")
    own = torch.utils.data.DistributedSampler(Samples(8), 2, rank)
    fails(loader_of(Samples(8), seed=None, sampler=own), "no DistributedSampler")
    fails(loader_of(Samples(4), seed=None, collate_fn=longest), "pads must pad to a length")
    fails(DataLoader(Stream()), "batches by index")
    fails(DataLoader(Samples(4), batch_size=None), "batches by index")
    fails(loader_of(Samples(4)), r"Partial\('sum'\)", [dt.Partial()])
    fails(loader_of(Samples(4, "tuple")), r"batch\[1\] of shape \[4\]: .*out of range", [S1])
    fails(loader_of(Samples(4)), "names dim 0 from its end", [Shard(-2)])
    fails(loader_of(Samples(4, "tuple")), r"batch\[1\] has no mesh", {0: [S0]})

    def summed(samples: Any) -> Any:
        return default_collate(samples).sum(0)

    fails(loader_of(Samples(4), seed=None, collate_fn=summed), "dim 0 of each tensor counts")
    with pytest.raises(ValueError, match="meshes for the entries"):
        dt.shard_loader(loader_of(Samples(4)), (mesh, mesh), {0: [S0]})


def counted(samples: list[int]) -> dict[str, Any]:
    """A collate_fn of rows and of numbers about all of them."""
    rows = torch.tensor(samples)
    return {
        "x": rows,
        "tokens": (rows % 5 + 1).sum(),
        "longest": rows.max(),
        "least": rows.double().min(),
        "bins": torch.bincount(rows % 3, minlength=3),
    }


@everywhere
def test_numbers_that_a_collate_fn_makes_of_its_samples_are_put_together():
    mesh, P = grid(), dt.Partial
    for axis in (0, 1):  # the other one holds the same rows

        def on(p: Any, axis: int = axis) -> list[Any]:
            return [p if a == axis else R for a in range(2)]

        ops = {"tokens": "sum", "longest": "max", "least": "min", "bins": "sum"}
        places = {"x": on(S0), **{key: on(P(op)) for key, op in ops.items()}}
        plain = loader_of(list(range(9)), collate_fn=counted)
        ours = dt.shard_loader(loader_of(list(range(9)), collate_fn=counted), mesh, places)
        seen = 0
        for got, want in zip(ours, plain, strict=True):  # the last batch has one sample
            assert got["tokens"].placements == tuple(on(P()))
            same(list(got.values()), list(want.values()))
            same(got["x"].sum() / got["tokens"], want["x"].sum() / want["tokens"])
            seen += 1
        assert seen == 3
    with pytest.raises(ValueError, match=r"all entries are split over the same mesh axes"):
        dt.shard_loader(plain, mesh, {"x": [S0, S0], "tokens": [P(), R]})
    for bad in ([P("avg"), R], [P("sum"), S0]):
        with pytest.raises(ValueError, match=r"in placements of its own|is split, or a part"):
            dt.shard_loader(plain, mesh, {"x": [S0, R], "tokens": bad})
    with pytest.raises(ValueError, match="in placements of its own"):
        dt.shard_loader(plain, mesh, [P(), R])


class Rows(Samples):
    """Loads all samples of a piece at once, and not an empty piece."""

    def __getitems__(self, many: list[int]) -> Any:
        return list(torch.stack([torch.arange(i, i + 3) for i in many]))


class Key:
    def __init__(self, number: int) -> None:
        self.number = number


class ByKey(Samples):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key.number)


def with_nan(samples: Any) -> Any:
    return {"x": torch.stack(samples), "scale": float("nan"), "word": "a"}


def with_bool(samples: Any) -> Any:
    x = torch.stack(samples)
    return {"x": x, "any": (x > 2).any(), "all": (x < 9).all(), "few": x.to(torch.uint8).max()}


@on_ranks(2)
def test_ranks_without_a_sample_and_values_that_equal_no_other():
    mesh = ProcessMesh([0, 1], ("dp",))
    for workers in (0, 1):
        plain = DataLoader(Rows(3), 2, num_workers=workers)
        for got, want in zip(dt.shard_loader(plain, mesh, [S0]), plain, strict=True):
            equal(got, want)
    plain = DataLoader(Samples(4), 4, collate_fn=with_nan)
    (batch,) = dt.shard_loader(plain, mesh, {"x": [S0]})
    assert batch["scale"] != batch["scale"] and batch["word"] == "a"
    keys = [Key(i) for i in range(4)]
    loader = dt.shard_loader(DataLoader(ByKey(4), 2, sampler=keys), mesh, [S0])
    for got, want in zip(loader, DataLoader(Samples(4), 2), strict=True):
        equal(got, want)
    other = DataLoader(ByKey(4), 2, sampler=keys[:: 1 - 2 * dist.get_rank()])
    with pytest.raises(ValueError, match="has other samples than on rank 0"):
        list(dt.shard_loader(other, mesh, [S0]))
    plain = DataLoader(Samples(3), 2, collate_fn=with_bool)  # rank 1 has no sample of the last
    highest, least = [dt.Partial("max")], [dt.Partial("min")]
    places = {"x": [S0], "any": highest, "all": least, "few": highest}
    for got, want in zip(dt.shard_loader(plain, mesh, places), plain, strict=True):
        same(list(got.values()), list(want.values()))


@on_ranks(2)
def test_batches_keep_the_classes_of_dicts():
    mesh = ProcessMesh([0, 1], ("dp",))
    makers: list[Any] = [
        (OrderedDict, OrderedDict), (lambda x: defaultdict(int, x), defaultdict),
        (lambda x: defaultdict(lambda: 0, x), dict),  # other ranks cannot have this function
    ]  # fmt: skip
    for make, kind in makers:
        plain = DataLoader([0, 1, 2], 2, collate_fn=lambda s, f=make: f({"x": torch.tensor(s)}))
        for got, want in zip(dt.shard_loader(plain, mesh, [S0]), plain, strict=True):
            assert type(got) is kind  # rank 1 has no sample of the last batch
            equal(got["x"], want["x"])
            assert kind is not defaultdict or got["other"] == 0


@on_ranks(2)
def test_attributes_of_the_loader_are_those_of_the_DataLoader():
    plain = loader_of(Samples(5), drop_last=True)
    loader = dt.shard_loader(plain, ProcessMesh([0, 1], ("dp",)), [S0])
    for name in ("dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn"):
        assert getattr(loader, name) is getattr(plain, name)
    with pytest.raises(AttributeError):
        _ = loader.nonsense
