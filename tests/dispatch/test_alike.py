"""Calls that differ in sizes only: what one of them decided holds for the others, or is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor import cache
from disttensor.core.spec import DistSpec
from disttensor.dispatch import resolve
from disttensor.dispatch.key import key_of, of_no_mesh
from disttensor.dispatch.plan_call import result_specs, wanted_specs
from ops.factors import Factors
from tests.support.pool import fake_world

R, SIZES = dt.Replicate(), (0, 1, 3, 8, 9)  # nothing, one, uneven, even, and uneven over 2 x 4


@pytest.fixture(scope="module")
def mesh() -> Iterator[dt.ProcessMesh]:
    with fake_world(8):
        yield dt.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ("dp", "tp"))


def tensors(mesh: dt.ProcessMesh, shapes: Any, placements: Any, dtype: Any) -> list[Any]:
    return [
        dt.shard_tensor(torch.zeros(s, dtype=dtype), mesh, p)
        for s, p in zip(shapes, placements, strict=True)
    ]


def decided(func: Any, args: Any, key: Any) -> Any:
    """What ``resolve`` says of a call: specs, or the error."""
    try:
        call = resolve.resolve(func, args, {}, key).call
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error), str(error)
    if call is None:
        return None
    made = wanted_specs(call), result_specs(call), call.shapes
    return *made, call.decision.varying_axes, call.decision.split


def pairs(a: str, b: str) -> list[tuple[Any, ...]]:
    """Shapes of two tensors whose dims have these letters, or a size of their own ("?")."""
    names = sorted({*a, *b} - {"?"})
    found = []
    for sizes in itertools.product(SIZES, repeat=len(names)):
        of = dict(zip(names, sizes, strict=True)) | {"?": 8}
        found.append(tuple(tuple(of[x] for x in word) for word in (a, b)))
    return found


S0, S1, S01 = [dt.Shard(0), R], [R, dt.Shard(1)], [dt.Shard(0), dt.Shard(1)]
WHOLE, BOTH, ROWS = [R, R], [dt.Shard(0), dt.Shard(0)], [R, dt.Shard(0)]
CALLS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "add, one shape": (torch.add, pairs("ab", "ab"), [S01, S01]),
    "add, two shapes": (torch.add, pairs("ab", "cd"), [S0, WHOLE]),
    "add, a vector": (torch.add, pairs("ab", "c"), [S0, WHOLE]),
    "add, a number": (torch.add, pairs("ab", ""), [BOTH, WHOLE]),
    "mul_": (torch.Tensor.mul_, pairs("ab", "b"), [S0, WHOLE]),
    "mul_, moved": (torch.Tensor.mul_, pairs("ab", "ab"), [S0, S1]),
    "matmul": (torch.matmul, pairs("ab", "bc"), [S0, S1]),
    "matmul, pending": (torch.matmul, pairs("ab", "b?"), [S1, ROWS]),
    "mm, that do not fit": (torch.mm, pairs("ab", "c?"), [S0, WHOLE]),
    "linear": (F.linear, pairs("ab", "cb"), [S0, ROWS]),
    "cross_entropy": (F.cross_entropy, pairs("ab", "ab"), [S0, S0]),
    "cross_entropy, others": (F.cross_entropy, pairs("ab", "cb"), [S0, S0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_decision_for_other_sizes_is_that_for_its_own(mesh: dt.ProcessMesh, name: str) -> None:
    func, every, placements = CALLS[name]
    calls = [tensors(mesh, shapes, placements, torch.float32) for shapes in every]
    own = [decided(func, args, None) for args in calls]
    for first in range(0, len(calls), 7):  # each is the one that decides, once
        resolve.DECISIONS.clear()
        for args, want in zip(
            calls[first:] + calls[:first], own[first:] + own[:first], strict=True
        ):
            assert decided(func, args, (func, *map(key_of, args))) == want


def test_constants_dtypes_and_placements_are_told_apart(mesh: dt.ProcessMesh) -> None:
    made = [
        (func, [x, *rest])
        for (func, *rest), dtype, p, n in itertools.product(
            ((torch.softmax, 0), (torch.softmax, 1), (torch.transpose, 0, 1), (torch.sqrt,),
             (torch.transpose, 0, 0), (torch.zeros_like,), (torch.mul, 2), (torch.mul, 2.0)),
            (torch.float32, torch.int64), (S0, S1, S01, BOTH, WHOLE), (5, 8),
        )
        for x in tensors(mesh, [(n, 6)], [p], dtype)
    ]  # fmt: skip
    resolve.DECISIONS.clear()
    for func, args in made:
        want = decided(func, args, None)
        assert decided(func, args, (func, *map(key_of, args))) == want


def test_a_call_of_other_sizes_asks_no_rule(
    mesh: dt.ProcessMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    of_rule = resolve.decide
    monkeypatch.setattr(resolve, "decide", lambda *a: (asked.append(a[0]), of_rule(*a))[1])
    cache.clear_caches()
    resolve.DECISIONS.clear()
    for n in (4, 6, 7, 1, 1, 0):
        x, y = (dt.ones(n, 8, mesh=mesh, placements=S0) for _ in range(2))
        assert (x + y).softmax(1).t().shape == (8, n)
    assert asked == [torch.Tensor.add, torch.Tensor.softmax, torch.Tensor.t] * 2  # n is 1: others


STAGED: list[tuple[Any, Any, list[tuple[int, ...]], list[Any]]] = [
    (lambda x: x.view(4, -1, 3), torch.Tensor.view, [(8, 6)], [S0[:1]]),
    (lambda x: x.view(8, 2, 3), torch.Tensor.view, [(8, 6)], [S0[:1]]),
    (lambda x: x[1:, None], torch.Tensor.__getitem__, [(8, 6)], [S0[:1]]),
    (F.linear, F.linear, [(2, 64), (512, 64)], [[dt.Shard(1)], [dt.Shard(0)]]),
    (F.linear, F.linear, [(512, 64), (2, 64)], [[dt.Shard(1)], [dt.Shard(0)]]),
]


@pytest.mark.parametrize("staged", STAGED, ids=range(len(STAGED)))
def test_what_one_stage_has_decided_holds_on_the_others(
    mesh: dt.ProcessMesh, staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another mesh of the shape, also in another world; not on one of another shape."""
    call, func, shapes, placements = staged
    asked: list[Any] = []
    of_rule = resolve.decide
    monkeypatch.setattr(resolve, "decide", lambda *a: (asked.append(a[0]), of_rule(*a))[1])

    def laid(ranks: list[int]) -> tuple[Any, ...]:
        cache.clear_caches()
        stage = dt.ProcessMesh(ranks, ("tp",))
        out = call(*tensors(stage, shapes, placements, torch.float32))
        assert out.spec.mesh is stage
        return out.shape, out.placements, out.to_local().shape

    def decisions(ranks: list[int]) -> tuple[Any, int]:
        before = asked.count(func)
        return laid(ranks), asked.count(func) - before

    resolve.DECISIONS.clear()
    first, one = decisions([0, 1])
    assert one == 1 and decisions([0, 3]) == (first, 0)
    other = decisions([0, 1, 2, 3])
    assert other[1] == 1
    resolve.DECISIONS.clear()
    assert decisions([0, 1, 2, 3]) == other


def test_a_key_with_a_mesh_in_it_is_told(mesh: dt.ProcessMesh) -> None:
    x = dt.ones(4, 4, mesh=mesh, placements=S0)
    plain = [x.spec, 2, 2.0, True, None, "a", slice(1, 2), [1, (x, 3)], {"dim": ...}, torch.float32]
    assert of_no_mesh(torch.add, (torch.add, *map(key_of, plain)))
    for held in (mesh, [mesh], (1, [dt.Shard(0)]), {"to": mesh}):
        assert not of_no_mesh(torch.add, (torch.add, key_of(x), key_of(held)))


def test_what_was_weighed_by_bytes_is_weighed_again(mesh: dt.ProcessMesh) -> None:
    """Of two tensors split by different letters the smaller one is moved."""
    resolve.DECISIONS.clear()

    def moved(n: int, m: int) -> list[bool]:
        x = dt.ones(n, 64, mesh=mesh, placements=[dt.Shard(1), R])
        w = dt.ones(m, 64, mesh=mesh, placements=[dt.Shard(0), R])
        found = resolve.resolve(F.linear, (x, w), {}, (F.linear, x.spec, w.spec)).call
        assert found is not None
        return [isinstance(s, DistSpec) for s in wanted_specs(found)]

    assert moved(2, 512) != moved(512, 2)


def test_a_letter_of_two_sizes_is_no_letter() -> None:
    from ops.propagation import sizes_of

    f = Factors((("a", None), ("a",)), ((),))
    assert sizes_of(f, [(3, 1), (3,)]) == {"a": 3}
    assert sizes_of(f, [(3, 1), (4,)]) is None
