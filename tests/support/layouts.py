"""Layouts to try, tensors cut into the pieces that a layout gives each rank and put together again,
and what a body on four ranks, or in a world of one, compares."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from disttensor.core.layout import Layout, box_at
from tests.support.pool import on_ranks
from tests.support.thread_ranks import Coordinate, reduce_all

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LAYOUTS = [
    (R, R), (S0, R), (R, S1), (S0, S1), (S1, S0), (S0, S0), (Shard(0, order=1), Shard(0, order=0)),
    (P, R), (S0, P), (P, P), (Partial("max"), S1), (Partial("avg"), R),
]  # fmt: skip
FEW = [(R, R), (S0, S1), (P, S0)]


def grid(device_type: str | None = None) -> ProcessMesh:
    """2x2 on four ranks, 1x1 in a world of one."""
    n = 2 if dist.get_world_size() == 4 else 1
    return ProcessMesh(torch.arange(n * n).reshape(n, n), ("dp", "tp"), device_type)


def everywhere(body: Callable[..., None]) -> Callable[..., None]:
    """Decorator: run the body on four ranks and in a world of one."""
    runs = {n: on_ranks(n)(body) for n in (1, 4)}

    @functools.wraps(body)
    def test(world: int, **kwargs: Any) -> None:
        runs[world](**kwargs)

    first = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = inspect.signature(body).parameters.values()
    del test.__wrapped__  # type: ignore[attr-defined]
    test.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
    test.on_ranks_timeout = 60.0  # type: ignore[attr-defined]
    return pytest.mark.parametrize("world", [1, 4])(test)


def counted(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """1, 2, 3, ... in ``shape``."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def same(a: Any, b: Any) -> None:
    """``a``, said of a DistTensor, is ``b``, said of the plain tensor."""
    if isinstance(a, dt.DistTensor):
        assert isinstance(b, torch.Tensor), (a, b)
        assert a.shape == b.shape and a.dtype == b.dtype, (a, b)
        a, b = a.detach().full_tensor(), b.detach()
    if isinstance(b, torch.Tensor):
        torch.testing.assert_close(a, b)
    elif isinstance(b, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif isinstance(b, (list, tuple)) and not isinstance(b, torch.Size):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert type(a) is type(b) and a == b, (a, b)


def compare_expressions(expressions: list[str], x: Any, plain: torch.Tensor, **names: Any) -> None:
    """Each expression of ``x`` is the same for both; all that differ are named."""
    failed = []
    for text in expressions:
        try:
            want = eval(text, {"torch": torch, "np": np, **names}, {"x": plain})
            same(eval(text, {"torch": torch, "np": np, **names}, {"x": x}), want)
        except Exception as error:
            failed.append(f"{text}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


# Pieces -------------------------------------------------------------------------------------------


def cut(
    x: Tensor, layout: Layout, mesh_shape: Coordinate, seed: int = 0, joins: Sequence[int] = ()
) -> dict[Coordinate, Tensor]:
    """The pieces of x at every coordinate; for a Partial random ones whose reduction is x; over
    the axes ``joins`` the first rank has the value, the others zeros."""
    pieces: list[tuple[dict[int, int], Tensor]] = [({}, x.detach())]
    generator = torch.Generator().manual_seed(seed)
    for axis, op in layout.partial:
        pieces = [
            ({**at, axis: i}, part)
            for at, value in pieces
            for i, part in enumerate(
                [value, *[torch.zeros_like(value)] * (mesh_shape[axis] - 1)]
                if axis in joins
                else summands(value, op, mesh_shape[axis], generator)
            )
        ]
    out = {}
    for c in itertools.product(*(range(n) for n in mesh_shape)):
        value = next(v for at, v in pieces if all(c[a] == i for a, i in at.items()))
        out[c] = value[box_at(x.shape, layout.dims, mesh_shape, c).slices].clone()
    return out


def summands(x: Tensor, op: str, n: int, generator: torch.Generator) -> list[Tensor]:
    """n different tensors whose reduction by ``op`` is x: exact where x has small whole numbers."""
    if x.dtype == torch.bool and op in ("sum", "avg", "prod"):
        raise ValueError(f"the {op} of bools is no bool")
    draw = functools.partial(torch.randint, size=x.shape, generator=generator)
    noise = [draw(3).to(x.device) for _ in range(n)]
    if op == "sum" and not (x.dtype.is_floating_point or x.dtype.is_complex):
        info = torch.iinfo(x.dtype)  # sums of integers wrap around
        noise = [draw(high=info.max, low=info.min).to(x.dtype).to(x.device) for _ in range(n)]
    lucky = draw(n).to(x.device)  # the rank that has the value
    if op in ("sum", "avg"):
        others = [t.to(x.dtype) for t in noise[:-1]]
        total = x * n if op == "avg" else x
        return [*others, total - sum(others, torch.zeros_like(x))]
    if op == "prod":
        signs = [(1 - 2 * (t % 2)).to(x.dtype) for t in noise]
        value = torch.stack(signs).prod(0).to(x.dtype) * x
        return [torch.where(lucky == i, s * value, s) for i, s in enumerate(signs)]
    if x.dtype == torch.bool:
        lower = op in ("max", "any")
        others = [x & (t > 0) if lower else x | (t > 0) for t in noise]
    elif op in ("any", "all"):
        others = [torch.full_like(x, op == "all")] * n
    else:
        wide = x.to(torch.int64) if x.dtype == torch.uint8 else x
        others = [wide - 1 - t if op == "max" else wide + 1 + t for t in noise]
        others = [(t.clamp(min=0) if x.dtype == torch.uint8 else t).to(x.dtype) for t in others]
    return [torch.where(lucky == i, x, t) for i, t in enumerate(others)]


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
    dtypes = {piece.dtype for piece in pieces.values()}
    assert len(dtypes) == 1, f"{what}: the ranks' dtypes differ: {dtypes}"
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
