"""Checks that a change of layout has a meaning: one shape, one dtype, one type of device, and
reductions that the dtype has."""

from __future__ import annotations

from disttensor.core.spec import DistSpec, check_spec


def check(src: DistSpec, dst: DistSpec) -> None:
    """Raises ValueError for specs that do not fit."""
    for spec in (src, dst):
        check_spec(spec)
    if src.shape != dst.shape:
        raise ValueError(f"reshard moves data, it cannot change the shape: {src!r} to {dst!r}")
    if src.mesh is dst.mesh:
        return
    if src.dtype != dst.dtype:
        raise ValueError(f"reshard moves data, it cannot change the dtype: {src!r} to {dst!r}")
    if src.mesh.device_type != dst.mesh.device_type:
        raise ValueError(
            f"reshard {src!r} to {dst!r}: {src.mesh!r} is on {src.mesh.device_type} and "
            f"{dst.mesh!r} on {dst.mesh.device_type}. Move the data to one kind of device first, "
            "with .to(), and reshard it then"
        )
