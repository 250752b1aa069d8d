"""What reshard.choose picks: the steps and their price, without taking them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import reshard
from disttensor.comm import collectives
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Partial, Replicate, Shard
from reshard.all_to_all import concerned
from reshard.registry import moves
from tests.support.pool import fake_world
from tests.support.reshard_cases import P, R, S, Threads, layouts, spec, value


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(16):
        yield


def mesh(*shape):
    n = torch.Size(shape).numel()
    names = ("dp",) if len(shape) == 1 else ("dp", "tp", "pp", "cp")[: len(shape)]
    return ProcessMesh(torch.arange(n).reshape(shape), names)


def steps(m, src, dst, shape=(64, 32), dtype=torch.float32):
    return reshard.choose(spec(m, src, shape, dtype), spec(m, dst, shape, dtype))


def kinds(*args, **kwargs):
    return [(step.kind, step.axis) for step in steps(*args, **kwargs)]


N = 64 * 32 * 4  # bytes of the tensor below

ONE = [
    (S(0), R, "all_gather", 3 * N / 4),
    (S(1), R, "all_gather", 3 * N / 4),
    (R, S(1), "slice", 0),
    (P("sum"), R, "all_reduce", 6 * N / 4),
    (P("max"), R, "all_reduce", 6 * N / 4),
    (P("avg"), S(0), "reduce_scatter", 3 * N / 4),
    (P("sum"), S(1), "reduce_scatter", 3 * N / 4),
    (P("min"), S(1), "reduce_scatter", 3 * N / 4),
    (S(0), S(1), "all_to_all", 3 * N / 16),
    (S(1), S(0), "all_to_all", 3 * N / 16),
    (R, P("sum"), "to_partial", 0),
    (R, P("max"), "to_partial", 0),
    (S(0), P("sum"), "to_partial", 0),
]


@pytest.mark.parametrize(("src", "dst", "kind", "price"), ONE, ids=str)
def test_one_axis_takes_one_step(src, dst, kind, price):
    (step,) = steps(mesh(4), [src], [dst])
    assert (step.kind, step.axis, step.axes, step.bytes) == (kind, "dp", (0,), price)


@pytest.mark.parametrize(("src", "dst", "kind", "price"), ONE, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (3, 64)], ids=str)
def test_uneven_sizes_do_not_change_the_choice(src, dst, kind, price, shape):
    assert kinds(mesh(4), [src], [dst], shape) == [(kind, "dp")]


TWO = [
    ([P(), P()], [R, R], [("all_reduce", "dp+tp")]),
    ([S(0), S(0)], [R, R], [("all_gather", "dp+tp")]),
    ([S(0), S(1)], [R, R], [("all_gather", "dp+tp")]),
    ([P(), P()], [S(0), S(1)], [("reduce_scatter", "dp+tp")]),
    ([P(), P()], [S(0), S(0)], [("reduce_scatter", "dp+tp")]),
    ([S(0), S(0)], [S(1), S(1)], [("all_to_all", "dp+tp")]),
    ([S(0), S(1)], [S(1), S(0)], [("all_to_all", "dp+tp")]),
    ([S(0), S(0)], [S(0, 1), S(0, 0)], [("all_to_all", "dp+tp")]),
    ([R, R], [S(0), S(1)], [("slice", "dp+tp")]),
    ([R, R], [P(), P()], [("to_partial", "dp+tp")]),
    # fewer bytes: cut first what will be cut, then communicate
    ([S(0), R], [R, S(1)], [("slice", "tp"), ("all_gather", "dp")]),
    ([P(), R], [R, S(1)], [("slice", "tp"), ("all_reduce", "dp")]),
    ([P(), S(1)], [R, R], [("all_reduce", "dp"), ("all_gather", "tp")]),
    ([P(), P()], [R, S(0)], [("reduce_scatter", "tp"), ("all_reduce", "dp")]),
    ([P(), P("max")], [R, R], [("all_reduce", "tp"), ("all_reduce", "dp")]),
    ([P(), S(0)], [S(0), S(0)], [("reduce_scatter", "dp"), ("all_to_all", "dp+tp")]),
]


@pytest.mark.parametrize(("src", "dst", "want"), TWO, ids=str)
def test_two_axes(src, dst, want):
    assert kinds(mesh(2, 2), src, dst, (1024, 512)) == want


def test_no_shard_to_shard_gathers():
    m = mesh(4, 2)
    places = [S(0), S(1)]
    for src, dst in itertools.product(itertools.product(places, repeat=2), repeat=2):
        for shape in [(64, 32), (2, 2), (5, 3)]:
            chosen = {kind for kind, _ in kinds(m, src, dst, shape)}
            assert chosen <= {"all_to_all"}, (src, dst, shape)


def test_never_dearer_than_axis_by_axis():
    """Against the plainest of plans: reduce and gather every axis that changes, then cut."""
    m, n = mesh(4, 2), N
    ring = {"S": lambda k, b: (k - 1) * b, "P": lambda k, b: 2 * (k - 1) / k * b}
    for src, dst in itertools.product(layouts(2, 2, ("sum",)), repeat=2):
        s, d = spec(m, src, (64, 32)), spec(m, dst, (64, 32))
        plain, size = 0.0, n
        for a, k in zip(src, m.shape, strict=True):
            size //= k if isinstance(a, Shard) else 1
        for a, k in reversed(list(zip(src, m.shape, strict=True))):
            plain += 0 if a == R else ring[str(a)[0]](k, size)
            size *= k if isinstance(a, Shard) else 1
        assert reshard.cost(s, d) <= plain, (src, dst)


def test_axes_of_size_one_are_free():
    m = mesh(1, 4)
    assert kinds(m, [S(0), R], [P(), R]) == [("local", "dp")]
    assert kinds(m, [S(1), S(0)], [R, R]) == [("all_gather", "tp")]
    assert kinds(mesh(1, 1), [P(), S(1)], [S(0), R]) == [("local", "dp+tp")]
    assert reshard.cost(spec(m, [P(), R], (4,)), spec(m, [S(0), S(0)], (4,))) == 0
    assert reshard.cost(spec(m, [P(), R], (4,)), spec(m, [R, R], (4,))) == 0


def test_nothing_to_do():
    s = spec(mesh(4), [S(0)], (5, 3))
    x = torch.ones(s.local_shape)
    assert reshard.choose(s, s) == () and reshard.run(x, s, s) is x
    assert kinds(mesh(4), [S(0)], [R], (0, 3)) == [("local", "dp")]


def test_steps_follow_each_other_and_all_ranks_agree():
    rnd, m = random.Random(0), mesh(2, 2, 2, 2)
    choices = [R, S(0), S(1), S(2), P(), P("max")]
    for _ in range(100):
        a, b = ([rnd.choice(choices) for _ in range(4)] for _ in range(2))
        src, dst = spec(m, a, (9, 6, 4)), spec(m, b, (9, 6, 4))
        if src is dst:
            continue
        chosen = reshard.choose(src, dst)
        assert chosen[0].src is src and chosen[-1].dst is dst
        for before, after in itertools.pairwise(chosen):
            assert before.dst is after.src
        assert sum(s.bytes for s in chosen) == reshard.cost(src, dst)


def test_a_step_prints_what_it_does():
    (step,) = steps(mesh(4), [P()], [R], (8, 16))
    assert str(step) == ("all_reduce over dp: f32[8, 16] {dp: P(sum)} -> f32[8, 16] (768 bytes)")
    with pytest.raises(AttributeError):
        step.kind = "slice"


# What is refused ---------------------------------------------------------------------------------


def test_a_shape_is_not_changed():
    a = spec(mesh(4), [S(0)], (8,))
    with pytest.raises(ValueError, match="cannot change the shape"):
        reshard.choose(a, spec(mesh(4), [R], (9,)))


def test_a_local_of_another_shape_is_refused():
    m = mesh(4, 4)
    src, dst = (spec(m, [p, R], (8, 6)) for p in (S(0), R))
    with pytest.raises(ValueError, match=r"has shape \(3, 6\).*nothing was moved"):
        reshard.run(torch.ones(3, 6), src, dst)


# The registry ------------------------------------------------------------------------------------


def test_the_table_of_pairs_is_the_one_in_the_docstring():
    types = {Replicate: "R", Shard: "S", Partial: "P"}
    ours = {
        (types[a], types[b]): m.kind for (a, b), m in moves.items() if a in types and b in types
    }
    assert ours == {
        ("R", "S"): "slice", ("R", "P"): "to_partial", ("S", "R"): "all_gather",
        ("S", "S"): "all_to_all", ("S", "P"): "to_partial", ("P", "R"): "all_reduce",
        ("P", "S"): "reduce_scatter",
    }  # fmt: skip
    rows = [line.split() for line in reshard.__doc__.splitlines()]
    assert ["Shard", "all_gather", "all_to_all", "to_partial"] in rows
    assert ["Replicate", "-", "slice", "to_partial"] in rows
    assert ["Partial(op)", "all_reduce", "reduce_scatter", "(none)"] in rows


def test_a_pair_has_one_function():
    def mine(x, src, dst, axes):
        return x

    with pytest.raises(ValueError, match=r"all_gather\.all_gather.*mine again"):
        reshard.register(Shard, Replicate)(mine)
    with pytest.raises(TypeError, match="no placement type"):
        reshard.register(int, Replicate)


@dataclass(frozen=True)
class Cyclic(Shard):
    """Rank i holds the rows i, i + n, i + 2n, ... of ``dim`` (n divides the dim)."""

    def __repr__(self):
        return f"Cyclic({self.dim})"


def cyclic_to_replicate(x, src, dst, axes):
    dim = src.placements[axes[0]].dim
    pieces = collectives.all_gather(x, src.mesh.group(axes))
    return torch.stack(list(pieces), dim + 1).flatten(dim, dim + 1)


def replicate_to_cyclic(x, src, dst, axes):
    axis = axes[0]
    dim, i, n = dst.placements[axis].dim, src.mesh.coordinate[axis], src.mesh.shape[axis]
    return x.unflatten(dim, (-1, n)).select(dim + 1, i)


@pytest.fixture
def cyclic():
    kept = dict(moves)
    reshard.register(Cyclic, Replicate, cost=lambda a, b, n: (n - 1) * a)(cyclic_to_replicate)
    reshard.register(Replicate, Cyclic)(replicate_to_cyclic)
    yield
    moves.clear()
    moves.update(kept)


def test_placements_of_users_go_through_their_functions(cyclic, monkeypatch):
    threads = Threads((2, 2), monkeypatch)
    whole = value((8, 6))
    others = [(R, R), (S(0), R), (R, S(0)), (S(0), S(1)), (P(), S(1)), (R, P("max"))]
    mine = [(Cyclic(0), R), (R, Cyclic(1)), (S(1), Cyclic(0)), (Cyclic(0), S(0)), (P(), Cyclic(0))]

    def there_and_back(m):
        full, out = spec(m, (R, R), (8, 6)), []
        for a, b in itertools.product(mine, mine + others):
            s, d = spec(m, a, (8, 6)), spec(m, b, (8, 6))
            x = reshard.run(whole, full, s)
            assert x.shape == s.local_shape
            y = reshard.run(x, s, d)
            direct = reshard.run(whole, full, d)
            back = reshard.run(y, d, full)
            out.append(torch.equal(back, whole) and y.shape == direct.shape)
        return out

    for place, flags in threads.run_on(there_and_back).items():
        assert all(flags), place
    s = spec(mesh(2, 2), (Cyclic(0), R), (8, 6))
    assert repr(s) == "f32[8@dp, 6] {dp: Cyclic(0)}" and s.placements == (Cyclic(0), R)
    x = torch.arange(48.0).reshape(8, 6)
    assert torch.equal(reshard.run(x, spec(mesh(2, 2), (R, R), (8, 6)), s), x[::2])


def test_axes_come_in_order():
    assert concerned(((8, 1),), ((),)) == (1, 8)  # of a set that has the 8 first
    assert concerned(((0, 3), (2,)), ((0,), (2, 1))) == (1, 3)


def test_a_placement_without_functions_is_an_error(cyclic):
    @dataclass(frozen=True)
    class Odd(Shard):
        pass

    with pytest.raises(LookupError, match=r"Odd.*register"):
        steps(mesh(2, 2), (Odd(0), R), (R, R))


def test_a_file_of_the_package_needs_no_other_to_be_found():
    files = Path(reshard.__file__).parent.glob("*.py")
    registering = {f"reshard.{f.stem}" for f in files if "\n@register(" in f.read_text()}
    assert registering == {move.fn.__module__ for move in moves.values()}
    assert len(registering) == 5
