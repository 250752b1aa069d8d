"""Tensors cut into the pieces that a layout gives each rank, and put together again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from disttensor.layout import Layout, box_at
from tests.support.thread_ranks import Coordinate, reduce_all


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [v for item in value for v in flat(item)]
    return [value]


def replace_tensors(value: Any, new: Callable[[Tensor], Any]) -> Any:
    """The same structure with every tensor replaced, in order of appearance."""
    if isinstance(value, Tensor):
        return new(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([replace_tensors(v, new) for v in value])
    if isinstance(value, dict):
        return {k: replace_tensors(v, new) for k, v in value.items()}
    return value


def cut(
    x: Tensor, layout: Layout, mesh_shape: Coordinate, seed: int = 0
) -> dict[Coordinate, Tensor]:
    """The pieces of x at every coordinate; for a Partial random ones whose reduction is x."""
    pieces: list[tuple[dict[int, int], Tensor]] = [({}, x.detach())]
    generator = torch.Generator().manual_seed(seed)
    for axis, op in layout.partial:
        pieces = [
            ({**at, axis: i}, part)
            for at, value in pieces
            for i, part in enumerate(unreduce(value, op, mesh_shape[axis], generator))
        ]
    out = {}
    for c in itertools.product(*(range(n) for n in mesh_shape)):
        value = next(v for at, v in pieces if all(c[a] == i for a, i in at.items()))
        out[c] = value[box_at(x.shape, layout.dims, mesh_shape, c).slices].clone()
    return out


def unreduce(x: Tensor, op: str, n: int, generator: torch.Generator) -> list[Tensor]:
    """n tensors whose reduction is x."""
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        parts = [
            x + sign * torch.rand(x.shape, generator=generator).round().to(x.dtype)
            for _ in range(n)
        ]
        parts[int(torch.randint(n, (), generator=generator))] = x.clone()
        return parts
    if op == "prod":
        return [x.clone(), *(torch.ones_like(x) for _ in range(n - 1))]
    if op in ("any", "all"):
        return [x.clone() for _ in range(n)]
    if x.dtype == torch.bool:
        raise ValueError("a bool is no sum")
    drawn = torch.rand((n - 1, *x.shape), generator=generator, dtype=torch.float64) * 4 - 2
    others = list((drawn if x.is_floating_point() else drawn.round()).to(x.dtype))
    total = x * n if op == "avg" else x
    return [total - sum(others, torch.zeros_like(x)), *others]


def assemble(
    pieces: dict[Coordinate, Tensor],
    shape: Sequence[int],
    layout: Layout,
    mesh_shape: Coordinate,
    what: str,
    summed: Sequence[int] = (),
) -> Tensor:
    """The global tensor from its pieces. Over axes in ``summed`` pieces add up; over axes that
    neither split nor are pending they must be equal."""
    for axis in summed:
        pieces = _reduce_axis(pieces, axis, mesh_shape[axis], "sum")
    for axis, op in layout.partial:
        pieces = _reduce_axis(pieces, axis, mesh_shape[axis], op)
    first = next(iter(pieces.values()))
    out = torch.empty(tuple(shape), dtype=first.dtype)
    done: dict[tuple[int, ...], Tensor] = {}
    for c, piece in pieces.items():
        key = tuple(c[a] for a in sorted(layout.sharded))
        if key in done:
            torch.testing.assert_close(
                piece,
                done[key],
                rtol=1e-12,
                atol=1e-12,
                equal_nan=True,
                msg=lambda m: f"{what}: replicas differ: {m}",
            )
            continue
        done[key] = piece
        out[box_at(shape, layout.dims, mesh_shape, c).slices] = piece
    return out


def _reduce_axis(
    pieces: dict[Coordinate, Tensor], axis: int, n: int, op: str
) -> dict[Coordinate, Tensor]:
    line = {c: [pieces[(*c[:axis], i, *c[axis + 1 :])] for i in range(n)] for c in pieces}
    return {c: reduce_all(parts, op) for c, parts in line.items()}
