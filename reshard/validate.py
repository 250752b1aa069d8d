"""Checks that a change of layout has a meaning: one shape, one type of device, reductions that the
dtype supports."""

from __future__ import annotations

import torch

from disttensor.core.spec import DistSpec

_INSTEAD = {"sum": "any", "avg": "any", "prod": "all"}


def check(src: DistSpec, dst: DistSpec) -> None:
    """Raises ValueError for specs that do not fit, TypeError for a meaningless reduction."""
    if src.shape != dst.shape:
        raise ValueError(f"reshard moves data, it cannot change the shape: {src!r} to {dst!r}")
    if src.mesh is not dst.mesh:
        _check_meshes(src, dst)
    same = set[tuple[int, str]]()
    if src.mesh.shape == dst.mesh.shape:  # these do not change
        same = set(src.layout.partial) & set(dst.layout.partial)
    for spec, making in ((src, False), (dst, True)):
        for axis, op in sorted(set(spec.layout.partial) - same):
            if spec.mesh.shape[axis] > 1:
                where = f"{src!r} to {dst!r}, axis {spec.mesh.dim_names[axis]!r}"
                _check_op(op, src.dtype, making, where)


def _check_meshes(src: DistSpec, dst: DistSpec) -> None:
    if src.dtype != dst.dtype:
        raise ValueError(f"reshard moves data, it cannot change the dtype: {src!r} to {dst!r}")
    if src.mesh.device_type != dst.mesh.device_type:
        raise ValueError(
            f"reshard {src!r} to {dst!r}: {src.mesh!r} is on {src.mesh.device_type} and "
            f"{dst.mesh!r} on {dst.mesh.device_type}. Move the data to one kind of device first, "
            "with .to(), and reshard it then"
        )


def _check_op(op: str, dtype: torch.dtype, making: bool, where: str) -> None:
    if dtype == torch.bool and op in _INSTEAD:
        raise TypeError(
            f"reshard {where}: {op} of bool is no bool. Use Partial({_INSTEAD[op]!r}), or "
            "cast to int before the values are partial"
        )
    floating = dtype.is_floating_point or dtype.is_complex
    if op == "avg" and not floating:
        raise TypeError(
            f"reshard {where}: the average of {dtype} values is not {dtype}. Use Partial('sum') "
            "and divide, or cast to a floating dtype first"
        )
    if dtype.is_complex and op not in ("sum", "avg"):
        raise TypeError(
            f"reshard {where}: {op} over ranks is not done for complex values; use sum or avg, "
            "or gather the pieces and reduce them locally"
        )
    if making and op in ("any", "all") and dtype != torch.bool:
        raise TypeError(
            f"reshard {where}: Partial({op!r}) keeps only whether a value is zero, which would "
            f"lose the {dtype} values; use {'max' if op == 'any' else 'min'}"
        )
