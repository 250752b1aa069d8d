"""Lists, tuples and dicts of other classes as arguments of torch's functions: named tuples, torch's
return types, subclasses."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import disttensor as dt
from disttensor.dispatch import dispatch, native
from disttensor.pytree import substitute
from tests.support.pool import on_ranks


class Pair(NamedTuple):
    first: Any
    second: Any


class Items(list):
    """Made of other arguments than its items."""

    def __init__(self, *items: Any, name: str) -> None:
        super().__init__(items)
        self.name = name


class Sizes(tuple):
    pass


class Other(Sizes):
    def __new__(cls, first: Any, *rest: Any) -> Other:
        return tuple.__new__(cls, (first, *rest))


def extremes(x: Any, y: Any) -> Any:
    """A torch.return_types of the two: what ``aminmax`` gives."""
    return torch.return_types.aminmax((x, y))


MAKE: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda x, y: [x, y],
    "named tuple": Pair,
    "list subclass": lambda x, y: Items(x, y, name="n"),
    "tuple subclass": lambda x, y: Other(x, y),
    "return type": extremes,
}
R, S0, S1, P = dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()
PROGRAMS: dict[str, Callable[..., Any]] = {
    "stack": lambda of, x, y, i, j: torch.stack(of(x, y)),
    "cat by name": lambda of, x, y, i, j: torch.cat(tensors=of(x, y), dim=1),
    "cat with a plain tensor": lambda of, x, y, i, j: (
        torch.cat(of(x, torch.ones(5, 6)), 1) * y.sum()
    ),
    "hstack": lambda of, x, y, i, j: torch.hstack(of(x, y)),
    "extremes": lambda of, x, y, i, j: torch.stack(of(*x.aminmax(dim=1))) * y.sum(),
    "foreach": lambda of, x, y, i, j: torch.stack(torch._foreach_mul(of(x, y), of(2.0, 3.0))),
    "foreach in place": lambda of, x, y, i, j: in_place(of(x * 2, y * 3)),
    "einsum": lambda of, x, y, i, j: torch.einsum("ij,ij->i", of(x, y)),
    "multi_dot": lambda of, x, y, i, j: torch.linalg.multi_dot(of(x, y.T)),
    "no rule": lambda of, x, y, i, j: torch.block_diag(*torch.atleast_2d(of(x, y))),
    "permuted": lambda of, x, y, i, j: x.permute(of(1, 0)) + y.sum(of(0, 1)),
}
INDEXING: dict[str, Callable[..., Any]] = {
    "get": lambda of, x, y, i, j: x[of(i, j)] * y[of(slice(1, None), 2)].sum(),
    "set": lambda of, x, y, i, j: put(x * 2, of(i, j), y[0, 0]),
    "index_put": lambda of, x, y, i, j: x.index_put(of(i, j), y[0, 0]),
}


def in_place(pair: Any) -> Any:
    torch._foreach_mul_(pair, 2.0)
    return torch.cat(list(pair))


def put(x: Any, index: Any, value: Any) -> Any:
    x[index] = value
    return x


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@pytest.mark.parametrize("name", [*PROGRAMS, *INDEXING])
@on_ranks(2)
def test_containers_of_any_class_give_what_lists_give_on_plain_tensors(name: str) -> None:
    mesh = dt.init_mesh((2,), ("a",))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(5, 6, generator=generator) for _ in "xy"]
    indices = torch.tensor([0, 2]), torch.tensor([1, 3])
    program = PROGRAMS[name] if name in PROGRAMS else INDEXING[name]
    # a list as an index is deprecated
    kinds = [k for k in MAKE if name in PROGRAMS or "list" not in k]
    for kind in kinds:
        plain = [t.clone().requires_grad_() for t in whole]
        want = program(MAKE[kind], *plain, *indices)
        want.square().sum().backward()
        for in_c, placement in itertools.product((True, False), (R, S0, S1, P)):
            for _ in range(2 if placement is S0 else 1):  # the second call is warm
                x, y = (dt.shard_tensor(t, mesh, [placement]) for t in whole)
                x, y = x.requires_grad_(), y.requires_grad_()
                i, j = (dt.shard_tensor(t, mesh) for t in indices)
                with native.using(in_c):
                    out = program(MAKE[kind], x, y, i, j)
                    out.square().sum().backward()
                where = f"{name} of a {kind}, {placement}, in_c={in_c}"
                for t, p in ((out, want), (x.grad, plain[0].grad), (y.grad, plain[1].grad)):
                    torch.testing.assert_close(
                        t.full_tensor().detach(), p.detach(), msg=lambda m, w=where: f"{w}: {m}"
                    )


@on_ranks(2)
def test_ranks_outside_the_mesh_take_containers_of_any_class() -> None:
    mesh = dt.ProcessMesh([1])
    for make in MAKE.values():
        for _ in range(2):
            x = dt.ones(3, 4, mesh=mesh, requires_grad=True)
            out = torch.cat(make(x, x * 2), 1)
            out.sum().backward()
            assert out.shape == (3, 8)
            assert mesh.coordinate is None or x.grad.full_tensor().eq(3).all()


@on_ranks(2)
def test_calls_with_a_named_tuple_share_one_plan_and_hold_no_tensor() -> None:
    mesh = dt.init_mesh((2,), ("a",))
    x = dt.ones(4, 6, mesh=mesh, placements=[S0])
    torch.cat(Pair(x, x * 2), 1)
    known = len(dispatch.PLANS)
    for _ in range(3):
        torch.cat(Pair(x * 2, x * 2), 1)
    assert len(dispatch.PLANS) == known


def test_substitute_keeps_the_class_of_a_container_and_what_it_holds_besides() -> None:
    x = torch.ones(1)
    items = substitute(Items(x, 3, name="n"), lambda t: t + 1)
    assert type(items) is Items and items == [2, 3] and items.name == "n"
    assert substitute(Pair(x, [x]), lambda t: t + 1) == Pair(2, [2])
    assert type(substitute(extremes(x, x), lambda t: t + 1)) is torch.return_types.aminmax
    assert type(substitute(OrderedDict(a=x), lambda t: t)) is OrderedDict
    assert substitute(torch.Size((2, 3)), lambda t: t) == torch.Size((2, 3))
