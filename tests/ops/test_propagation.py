"""assign against all that it could have chosen: on an axis nothing that the rule allows moves fewer
bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.layout import Layout
from disttensor.placement import Partial, Replicate, Shard
from ops.factors import Arg, Factors
from ops.infer import decide
from ops.propagation import splittable

CALLS: dict[str, tuple[Any, list[tuple[int, ...]], tuple[Any, ...]]] = {
    "matmul": (torch.matmul, [(12, 8), (8, 20)], ()),
    "batched": (torch.matmul, [(4, 12, 8), (8, 4)], ()),
    "linear": (F.linear, [(4, 12, 8), (16, 8), (16,)], ()),
    "einsum": (torch.einsum, [(4, 12, 8), (4, 8, 6)], ("bik,bkj->bij",)),
    "bmm": (torch.bmm, [(4, 12, 8), (4, 8, 20)], ()),
    "baddbmm": (torch.baddbmm, [(4, 12, 20), (4, 12, 8), (4, 8, 20)], ()),
    "add": (torch.add, [(12, 8), (8,)], ()),
    "mul": (torch.mul, [(12, 8), (12, 1)], ()),
    "where": (torch.where, [(12, 8), (12, 8), (12, 8)], ()),
    "sum": (torch.sum, [(12, 8)], ()),
    "softmax": (torch.softmax, [(12, 8)], ()),
    "layer_norm": (F.layer_norm, [(12, 8)], ()),
    "cat": (torch.cat, [(12, 8), (4, 8)], ()),
    "take_along_dim": (torch.take_along_dim, [(12, 8), (4, 8)], ()),
    "scatter_add": (torch.scatter_add, [(12, 8), (4, 8), (4, 8)], ()),
    "embedding": (F.embedding, [(4, 12), (20, 8)], ()),
}


def asked(name: str, args: list[Arg]) -> tuple[Any, tuple[Any, ...]]:
    """(function, its arguments)"""
    func, _, before = CALLS[name]
    x = args[0]
    more: dict[str, tuple[Any, ...]] = {
        "sum": (x, 0), "softmax": (x, 1), "layer_norm": (x, (8,)), "cat": (args, 0),
        "take_along_dim": (*args, 0), "scatter_add": (x, 0, *args[1:]),
    }  # fmt: skip
    return func, (*before, *more.get(name, tuple(args)))


def moved(arg: Arg, want: Layout, n: int) -> float:
    """The bytes that a rank receives so that the argument lies as wanted, on one axis of n."""
    have = arg.layout
    if have == want or not (have.partial or have.sharded):
        return 0.0
    if have.partial:
        factor = 1.0 if want.sharded else 2.0
    else:
        factor = 1.0 / n if want.sharded else 1.0
    return arg.nbytes * factor * (n - 1) / n


def choices(f: Factors, args: list[Arg]) -> Iterator[list[Layout]]:
    """All that the rule allows on one axis: the layouts of the arguments."""
    majors = [[d[0] if isinstance(d, tuple) else d for d in dims] for dims in f.inputs]
    bare = [Layout(((),) * a.ndim) for a in args]
    yield bare
    split = {
        majors[t][d] for t, a in enumerate(args) for d, axes in enumerate(a.layout.dims) if axes
    }
    for letter in split & splittable(f):
        yield [
            Layout(tuple((0,) if letter == own else () for own in dims)) for dims in majors
        ]  # fmt: skip
    linear = frozenset(range(len(args))) if f.moves else frozenset().union(*f.terms)
    pending = [t for t, a in enumerate(args) if a.layout.partial and t in linear]
    for k in range(1, len(pending) + 1):
        for keep in itertools.combinations(pending, k):
            each = f.terms and all(len(term & set(keep)) == 1 for term in f.terms)
            if each or (f.moves and len(keep) == len(args)):
                yield [args[t].layout if t in keep else bare[t] for t in range(len(args))]


@pytest.mark.parametrize("name", CALLS)
def test_nothing_that_a_rule_allows_moves_fewer_bytes(name: str) -> None:
    rng, seen = random.Random(name), 0
    shapes = CALLS[name][1]
    for n in (2, 4):
        placements = [[Replicate(), *(Shard(d) for d in range(len(s))), Partial()] for s in shapes]
        every = list(itertools.product(*placements))
        for case in rng.sample(every, min(len(every), 60)):
            ints = name == "embedding", name == "take_along_dim", name == "scatter_add"
            dtypes = [
                torch.int64 if (ints[0] and i == 0) or (any(ints[1:]) and i == 1) else torch.float32
                for i in range(len(shapes))
            ]
            args = [
                Arg(s, [p], dtype).placed(1, i)
                for i, (s, p, dtype) in enumerate(zip(shapes, case, dtypes, strict=True))
            ]
            func, call = asked(name, args)
            _, factors, decision = decide(func, call, {}, args, (n,))
            assert decision is not None
            costs = [
                sum(moved(a, w, n) for a, w in zip(args, want, strict=True))
                for want in choices(factors, args)
            ]
            mine = sum(moved(a, w, n) for a, w in zip(args, decision.input_layouts, strict=True))
            # it may add an input to a pending sum, which moves nothing
            assert mine <= min(costs) + 1e-9, (case, decision.input_layouts, costs)
            seen += len(costs) > 1
    assert seen
