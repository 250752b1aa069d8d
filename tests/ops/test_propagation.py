"""assign against all that it could have chosen: nothing that the rule allows moves fewer bytes,
there and back, by the planner's own prices."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.layout import Axes, Layout
from disttensor.core.placement import Partial, Placement, Replicate, Shard
from ops.factors import Arg, Factors
from ops.infer import decide, infer
from ops.propagation import splittable
from ops.registry import RULES, Rule
from reshard import graph

CALLS: dict[str, tuple[Any, list[tuple[int, ...]], tuple[Any, ...]]] = {
    "matmul": (torch.matmul, [(12, 8), (8, 20)], ()),
    "matmul of a narrow one": (torch.matmul, [(4, 8), (8, 400)], ()),
    "batched": (torch.matmul, [(4, 12, 8), (8, 4)], ()),
    "linear": (F.linear, [(4, 12, 8), (16, 8), (16,)], ()),
    "einsum": (torch.einsum, [(4, 12, 8), (4, 8, 16)], ("bik,bkj->bij",)),
    "einsum of three": (torch.einsum, [(8, 12), (12, 8), (8, 4)], ("ab,bc,cd->ad",)),
    "bmm": (torch.bmm, [(4, 12, 8), (4, 8, 20)], ()),
    "baddbmm": (torch.baddbmm, [(4, 12, 20), (4, 12, 8), (4, 8, 20)], ()),
    "add": (torch.add, [(12, 8), (8,)], ()),
    "mul": (torch.mul, [(12, 8), (12, 1)], ()),
    "where": (torch.where, [(12, 8), (12, 8), (12, 8)], ()),
    "sum": (torch.sum, [(12, 8)], ()),
    "softmax": (torch.softmax, [(12, 8)], ()),
    "layer_norm": (F.layer_norm, [(12, 8)], ()),
    "cat": (torch.cat, [(12, 8), (4, 8)], ()),
    "stack": (torch.stack, [(12, 8), (12, 8)], ()),
    "flatten": (torch.flatten, [(12, 8, 4)], ()),
    "take_along_dim": (torch.take_along_dim, [(12, 8), (4, 8)], ()),
    "scatter_add": (torch.scatter_add, [(12, 8), (4, 8), (4, 8)], ()),
    "index_copy": (torch.index_copy, [(12, 8), (4,), (4, 8)], ()),
    "embedding": (F.embedding, [(4, 12), (20, 8)], ()),
}
# arguments that are no floats
DTYPES = {
    ("take_along_dim", 1): torch.int64, ("scatter_add", 1): torch.int64,
    ("index_copy", 1): torch.int64, ("embedding", 0): torch.int64, ("where", 0): torch.bool,
}  # fmt: skip


def asked(name: str, args: list[Arg]) -> tuple[Any, tuple[Any, ...]]:
    """(function, its arguments)"""
    func, _, before = CALLS[name]
    x = args[0]
    more: dict[str, tuple[Any, ...]] = {
        "sum": (x, 0), "softmax": (x, 1), "layer_norm": (x, (8,)), "cat": (args, 0),
        "stack": (args, 0), "flatten": (x, 0, 1), "take_along_dim": (*args, 0),
        "scatter_add": (x, 0, *args[1:]), "index_copy": (x, 0, *args[1:]),
    }  # fmt: skip
    return func, (*before, *more.get(name, tuple(args)))


@functools.cache
def price(have: Layout, want: Layout, mesh: Axes, shape: Axes, itemsize: int) -> float:
    """The bytes of the planner's path, which here minds nothing else."""
    return sum(edge.bytes for edge in graph.cheapest(have, want, mesh, shape, itemsize))


def there_and_back(arg: Arg, want: Layout, varying: Axes, mesh: Axes) -> float:
    """Bytes of the move, and of the gradient's: of a pending sum it is whole, of a whole that is
    used as varying a pending sum. Over axes on which the argument came whole nothing is done."""
    have, dtype = arg.layout, arg.dtype
    cost = price(have, want, mesh, arg.shape, dtype.itemsize)
    if not dtype.is_floating_point:
        return cost
    sums = tuple((a, "sum") for a in sorted(varying))
    came = have.varies()
    goal = []
    for now, then in zip(have.dims, want.dims, strict=True):
        kept = tuple(a for a in then if a in now or a not in came)
        in_order = tuple(a for a in kept if a in now) == now
        goal.append(kept if in_order else (*now, *(a for a in kept if a not in now)))
    left = tuple((a, op) for a, op in sums if a not in came)
    back = price(
        Layout(want.dims, sums), Layout(tuple(goal), left), mesh, arg.shape, dtype.itemsize
    )
    return cost + back


def choices(f: Factors, args: Sequence[Arg], a: int) -> Iterator[list[Any]]:
    """All that the rule allows on axis ``a``: for each argument a dim, "P" or None."""
    majors = [[d[0] if isinstance(d, tuple) else d for d in dims] for dims in f.inputs]
    here = [arg.layout.dim_of(a) for arg in args]
    pending = {t for t, arg in enumerate(args) if a in arg.layout.partial_axes}
    split = {t: majors[t][d] for t, d in enumerate(here) if d is not None}
    fit = splittable(f)

    def by(letter: Any) -> list[Any]:
        dims: list[Any] = [own.index(letter) if letter in own else None for own in majors]
        if letter in f.reduced:
            for term in f.linear_terms:
                if not any(dims[t] is not None for t in term):
                    dims[min(term)] = "P"
        return dims

    letters = set(split.values())
    if not pending and len(letters) < 2 and letters <= fit - f.divisible_only:
        yield by(letters.pop()) if letters else [None] * len(args)
        return
    yield [None] * len(args)
    others = {letter for t in split for letter in majors[t]} - f.reduced.keys()
    for letter in (letters | others) & fit:
        yield by(letter)
    linear = frozenset(range(len(args))) if f.moves else frozenset().union(*f.linear_terms)
    for k in range(1, len(pending) + 1):
        for keep in itertools.combinations(sorted(pending & linear), k):
            each = f.linear_terms and all(len(term & set(keep)) == 1 for term in f.linear_terms)
            if each or (f.moves and len(keep) == len(args)):
                yield ["P" if t in keep else None for t in range(len(args))]


def decisions(
    f: Factors, args: Sequence[Arg], mesh: Axes
) -> Iterator[tuple[list[Layout], list[Axes]]]:
    """All combinations of the axes' choices, with the axes of one dim in either order: the layouts
    wanted of the arguments, and over which axes each is whole while the call varies."""
    for each in itertools.product(*(list(choices(f, args, a)) for a in range(len(mesh)))):
        for order in itertools.permutations(range(len(mesh))):
            wants = [
                Layout(
                    tuple(tuple(a for a in order if each[a][t] == d) for d in range(arg.ndim)),
                    tuple((a, "sum") for a in range(len(mesh)) if each[a][t] == "P"),
                )
                for t, arg in enumerate(args)
            ]
            active = [a for a in range(len(mesh)) if any(x is not None for x in each[a])]
            yield wants, [tuple(a for a in active if a not in w.varies()) for w in wants]


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_that_a_rule_allows_moves_fewer_bytes(
    name: str, mesh: Axes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("LATENCY", "STEP", "EXCHANGE"):
        monkeypatch.setattr(graph, other, 0)
    price.cache_clear()
    rng, seen = random.Random(name), 0
    shapes = CALLS[name][1]
    one: list[list[Placement]] = [
        [Replicate(), *(Shard(d) for d, n in enumerate(s) if n > 1), Partial()] for s in shapes
    ]
    placements = [list(itertools.product(p, repeat=len(mesh))) for p in one]
    every = list(itertools.product(*placements))
    for case in rng.sample(every, min(len(every), 128)):
        args = [
            Arg(s, p, DTYPES.get((name, i), torch.float32)).placed(len(mesh), i)
            for i, (s, p) in enumerate(zip(shapes, case, strict=True))
        ]
        func, call = asked(name, args)
        f, decision = decide(func, call, {}, args, mesh)
        assert decision is not None
        costs = [
            sum(map(there_and_back, args, wants, varying, itertools.repeat(mesh)))
            for wants, varying in decisions(f, args, mesh)
        ]
        mine = sum(
            map(
                there_and_back, args, decision.input_layouts, decision.varying_axes,
                itertools.repeat(mesh),
            )
        )  # fmt: skip
        assert mine <= min(costs) + 1e-6, (case, decision.input_layouts, mine, min(costs))
        seen += len(costs) > 1
    assert seen or len(shapes) == 1


def test_a_rule_need_not_give_the_sizes_that_inputs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that returns the same factors for calls of all sizes; given sizes stay."""
    same = Factors((("a", "b"),), (("b", "new"),), {"new": 3}, {"a": "sum"})
    monkeypatch.setitem(RULES, ord, Rule("ord", lambda x: same))
    for rows, columns in ((4, 6), (2, 8)):
        got = infer(ord, Arg((rows, columns), [Shard(0)]), mesh_shape=(2,))
        assert got.shapes == ((columns, 3),) and got.outputs == ((Partial(),),)
    assert same.sizes == {"new": 3}
