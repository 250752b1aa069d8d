"""Which changes have a meaning: one mesh, one shape, and reductions that fit the dtype."""

from __future__ import annotations

import torch

from disttensor.spec import DistSpec

_INSTEAD = {"sum": "any", "avg": "any", "prod": "all"}


def check(src: DistSpec, dst: DistSpec) -> None:
    """Raises ValueError for specs that do not fit, TypeError for a meaningless reduction."""
    if src.mesh is not dst.mesh:
        raise ValueError(
            f"reshard.choose plans within one mesh, but {src!r} is on {src.mesh!r} and {dst!r} on "
            f"{dst.mesh!r}"
        )
    if src.shape != dst.shape:
        raise ValueError(f"reshard moves data, it cannot change the shape: {src!r} to {dst!r}")
    sizes = src.mesh.shape
    for axis, op in sorted(set(src.layout.partial) ^ set(dst.layout.partial)):
        if sizes[axis] > 1:
            making = (axis, op) in dst.layout.partial
            _check_op(
                op, src.dtype, making, f"{src!r} to {dst!r}, axis {src.mesh.dim_names[axis]!r}"
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
