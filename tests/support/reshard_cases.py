"""For the reshard tests: locals made for any spec, and a world of threads instead of processes.

Values are small whole numbers, so that every reduction is exact in every dtype and results compare
bit for bit. ``locals_of`` is the meaning of a spec written a second time, independently of reshard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reshard
from disttensor import ProcessMesh
from disttensor.comm import collectives
from disttensor.comm.work import finished
from disttensor.core.layout import Box, layout_of
from disttensor.core.placement import Partial, Placement, Replicate, Shard
from disttensor.core.spec import DistSpec
from tests.support.layouts import summands
from tests.support.thread_ranks import World

R, S, P = Replicate(), Shard, Partial
Tensor = torch.Tensor


def spec(
    mesh: Any, placements: Sequence[Placement], shape: Sequence[int], dtype=torch.float32
) -> DistSpec:
    return DistSpec(mesh, layout_of(placements, len(shape), mesh.ndim), shape, dtype)


def value(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The global tensor: powers of two, so that what is done to its pieces is exact."""
    g = torch.Generator().manual_seed(seed)
    x = 2 ** torch.randint(0, 3, tuple(shape), generator=g)
    return x % 4 == 0 if dtype == torch.bool else x.to(dtype)


def reduce(op: str, parts: Sequence[Tensor]) -> Tensor:
    exact = parts[0].dtype in (torch.int64, torch.float64)
    stack = torch.stack([p if exact and op != "avg" else p.to(torch.float64) for p in parts])
    out = {
        "sum": lambda: stack.sum(0), "avg": lambda: stack.mean(0), "prod": lambda: stack.prod(0),
        "max": lambda: stack.amax(0), "min": lambda: stack.amin(0),
        "any": lambda: stack.amax(0), "all": lambda: stack.amin(0),
    }[op]()  # fmt: skip
    return out.to(parts[0].dtype)


def locals_of(s: DistSpec, whole: Tensor, seed: int = 1) -> dict[tuple[int, ...], Tensor]:
    """The local of every coordinate, where ``whole`` is the value: outer axes are split first."""
    g = torch.Generator().manual_seed(seed)
    values: dict[tuple[int, ...], Tensor] = {(): whole}
    for axis, n in enumerate(s.mesh.shape):
        op = dict(s.layout.partial).get(axis)
        values = {
            (*place, i): part
            for place, v in values.items()
            for i, part in enumerate(summands(v, op, n, g) if op else [v] * n)
        }
    return {place: window(v, s.box_at(place)) for place, v in values.items()}


def window(x: Tensor, box: Box) -> Tensor:
    return x[box.slices].clone()


def value_of(s: DistSpec, parts: dict[tuple[int, ...], Tensor]) -> dict[tuple[int, ...], Tensor]:
    """At every coordinate the piece with all reductions done, inner axes first."""
    for axis, op in sorted(s.layout.partial, reverse=True):
        n = s.mesh.shape[axis]
        sides = {p: [(*p[:axis], i, *p[axis + 1 :]) for i in range(n)] for p in parts}
        parts = {p: reduce(op, [parts[side] for side in sides[p]]) for p in parts}
    return parts


def layouts(ndim: int, axes: int, ops: Sequence[str]) -> list[tuple[Placement, ...]]:
    one = [R, *map(S, range(ndim)), *map(P, ops)]
    return list(itertools.product(one, repeat=axes))


class Threads(World):
    """A mesh whose ranks are threads of this process; ``comm`` is replaced meanwhile."""

    def __init__(self, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(shape)
        names = "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "all_to_all_rows"
        for name in names:
            monkeypatch.setattr(collectives, name, getattr(self, name))
        self.meshes = [self.mesh(place) for place in self.all]

    def mesh(self, place: tuple[int, ...]) -> Any:
        shape = self.mesh_shape
        mesh = SimpleNamespace(shape=shape, ndim=len(shape), coordinate=place, device="cpu")
        mesh.dim_names = tuple("abcd"[: len(shape)])
        mesh.specs = {}
        mesh.members, mesh.axis = self.members, int
        mesh.group = lambda axes: self.group(place, tuple(axes))
        return _Hashed(mesh)

    def group(self, me: tuple[int, ...], axes: tuple[int, ...]) -> Any:
        members = self.members(axes, me)
        return SimpleNamespace(
            size=len(members), index=members.index(me), swap=lambda x: self.swap(axes, me, x)
        )

    def run_on(self, body: Callable[[Any], Any]) -> dict[tuple[int, ...], Any]:
        """``body(mesh)`` on every rank at once: the results by coordinate."""
        meshes = dict(zip(self.all, self.meshes, strict=True))
        return self.run(lambda place: body(meshes[place]))

    def all_gather(self, x: Tensor, group: Any, shape: Any = None) -> Tensor:
        out = torch.stack(group.swap(x))
        return out if shape is None else out.view(shape)

    def all_reduce(self, x: Tensor, op: str, group: Any) -> Tensor:
        return reduce(op, group.swap(x))

    def reduce_scatter(self, x: Tensor, op: str, group: Any, shape: Any = None) -> Tensor:
        x = x.reshape(group.size, *(x.shape[1:] if shape is None else shape))
        return reduce(op, [part[group.index] for part in group.swap(x)])

    def all_to_all_rows(self, x: Tensor, sent: Any, received: Any, group: Any) -> Tensor:
        assert not sent and not received  # equal numbers
        return torch.stack([part[group.index] for part in group.swap(x)])

    def all_to_all(
        self, parts: Sequence[Tensor], numels: Sequence[int], group: Any, async_op: bool = False
    ) -> Any:
        got = [row[group.index].reshape(-1) for row in group.swap(list(parts))]
        assert [t.numel() for t in got] == list(numels)
        return finished(got) if async_op else got


class _Hashed:
    """A SimpleNamespace that can be part of a key: equal to itself only, as a ProcessMesh is."""

    __class__ = ProcessMesh  # for isinstance

    def __init__(self, mesh: Any) -> None:
        self.__dict__ = mesh.__dict__


def check_pair(
    s: DistSpec, d: DistSpec, whole: Tensor, out: dict[Any, Tensor], note: str = ""
) -> None:
    """The locals ``out`` mean ``whole`` under ``d``, at every coordinate, bit for bit."""
    for place, got in value_of(d, out).items():
        want = window(whole, d.box_at(place))
        assert got.shape == want.shape and torch.equal(got, want), (
            f"{s!r} -> {d!r} at {place}: {[str(x) for x in reshard.choose(s, d)]} {note}"
        )
