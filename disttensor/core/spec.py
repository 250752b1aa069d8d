"""DistSpec: mesh + layout + global shape + dtype, interned: a spec is its own cache key."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from disttensor.checks import check_sequence, check_shape, check_type
from disttensor.core.layout import (
    Box,
    Layout,
    box_at,
    describe,
    layout_from_mapping,
    layout_of,
    replicated,
)
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Placement, check_reductions
from disttensor.torch_private import outside_modes, refuse_memory


@lru_cache(maxsize=256)
def _scalar(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the element that all wrappers of a dtype share: NaN, or the largest integer, so that
    a leak shows. Access to its memory raises an error."""
    number: Any = float("nan")
    if not dtype.is_floating_point and not dtype.is_complex:
        number = dtype == torch.bool or min(torch.iinfo(dtype).max, 2**63 - 1)
    one = torch.full((), number, dtype=dtype, device=device)
    refuse_memory(one)
    return one


class SpecShape:
    """Properties shared by specs that differ in sizes only: a layout, a dtype, and which dims have
    size 1. Interned by ``kind_of``, so that it is its own hash."""

    __slots__ = ("layout", "placements", "varies")

    def __init__(self, layout: Layout, mesh_ndim: int) -> None:
        self.layout = layout
        self.placements = layout.placements(mesh_ndim)
        self.varies = layout.varies()


@lru_cache(maxsize=4096)
def kind_of(
    layout: Layout, mesh_ndim: int, dtype: torch.dtype, ones: tuple[bool, ...]
) -> SpecShape:
    return SpecShape(layout, mesh_ndim)


class DistSpec:
    """Everything that all ranks know of a tensor. Compare with ``is``; make with ``DistSpec(...)``.

    >>> layout = ops.Layout(dims=((0,), ()), partial=((1, "sum"),))
    >>> ops.DistSpec(mesh, layout, (8, 16), torch.float32)
    f32[8@dp, 16] {tp: P(sum)}
    """

    __slots__ = (
        "__weakref__",
        "_derived",
        "dtype",
        "kind",
        "layout",
        "local_box",
        "local_shape",
        "mesh",
        "meta_tensor",
        "placements",
        "shape",
        "varies",
    )  # fmt: skip

    mesh: ProcessMesh
    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    kind: SpecShape
    placements: tuple[Placement, ...]
    local_shape: tuple[int, ...]  # of this rank; off the mesh (0,), as of a token
    local_box: Box
    varies: frozenset[int]  # mesh axes over which locals differ
    meta_tensor: torch.Tensor  # global shape, one element of storage: the source of wrappers
    _derived: dict[Any, DistSpec]

    def __new__(
        cls, mesh: ProcessMesh, layout: Layout, shape: Sequence[int], dtype: torch.dtype
    ) -> DistSpec:
        try:
            key = (layout, torch.Size(shape), dtype)
            known: DistSpec | None = mesh.specs.get(key)
        except (AttributeError, TypeError):
            _fits(mesh, layout, shape, dtype)
            raise
        if known is not None:
            return known
        _fits(mesh, layout, shape, dtype)
        self = super().__new__(cls)
        kind = self.kind = kind_of(layout, mesh.ndim, dtype, tuple([n == 1 for n in shape]))
        self.mesh, self.layout, self.shape, self.dtype = mesh, kind.layout, key[1], dtype
        self.placements, self.varies = kind.placements, kind.varies
        if mesh.coordinate is not None:
            self.local_box = self.box_at(mesh.coordinate)
        else:
            self.local_box = Box((0,) * len(shape), (0,))
        self.local_shape = self.local_box.shape
        with outside_modes():  # it must not belong to the caller's mode
            self.meta_tensor = _scalar(dtype, mesh.device).expand(self.shape)
        self._derived = {}
        mesh.specs[key] = self
        return self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def box_at(self, coordinate: tuple[int, ...]) -> Box:
        """Returns the box of the local at any coordinate, from the spec alone."""
        return box_at(self.shape, self.layout.dims, self.mesh.shape, coordinate)

    def is_even(self) -> bool:
        """Returns True if all ranks have locals of one size. The first rank has the largest, the
        last one the smallest."""
        first = self.box_at((0,) * self.mesh.ndim).shape
        return first == self.box_at(tuple(n - 1 for n in self.mesh.shape)).shape

    def with_dtype(self, dtype: torch.dtype) -> DistSpec:
        spec = self._derived.get(dtype)
        if spec is None:
            spec = self._derived[dtype] = DistSpec(self.mesh, self.layout, self.shape, dtype)
        return spec

    def with_layout(self, layout: Layout) -> DistSpec:
        spec = self._derived.get(layout)
        if spec is None:
            spec = self._derived[layout] = DistSpec(self.mesh, layout, self.shape, self.dtype)
        return spec

    def replicated(self) -> DistSpec:
        """Returns the spec of the same tensor, whole on every rank."""
        return self.with_layout(Layout(((),) * self.ndim))

    def on_root(self) -> DistSpec:
        """Returns the spec ``seen_from`` the root of its mesh."""
        return self if self.mesh.root is self.mesh else self.seen_from(self.mesh.root)

    def seen_from(self, mesh: ProcessMesh) -> DistSpec:
        """Returns the spec of the same tensor, with the same locals, on a mesh of the same root
        with more axes: replicated on those."""
        if mesh is self.mesh:
            return self
        if mesh not in self._derived:
            axes = [mesh.root_axes.index(a) for a in self.mesh.root_axes]
            layout = Layout(
                tuple(tuple(axes[a] for a in of_dim) for of_dim in self.layout.dims),
                tuple(sorted((axes[a], op) for a, op in self.layout.partial)),
                tuple(
                    sorted([(axes[a], p) for a, p in self.layout.custom], key=lambda pair: pair[0])
                ),
            )
            self._derived[mesh] = DistSpec(mesh, layout, self.shape, self.dtype)
        return self._derived[mesh]

    def with_placements(self, placements: Sequence[Placement]) -> DistSpec:
        return self.with_layout(layout_of(placements, self.ndim, self.mesh.ndim))

    def __repr__(self) -> str:
        return describe(self.shape, self.dtype, self.layout, self.mesh.dim_names)

    def __deepcopy__(self, memo: object) -> DistSpec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return DistSpec, (self.mesh, self.layout, tuple(self.shape), self.dtype)


def _fits(mesh: Any, layout: Any, shape: Any, dtype: Any) -> None:
    """Raises TypeError or ValueError for values that make no spec."""
    mesh = as_mesh("mesh", mesh)
    check_type("dtype", dtype, torch.dtype, "a dtype of torch, as torch.float32,")
    check_type("layout", layout, Layout, "a Layout")
    check_shape("shape", shape)
    check_reductions(dtype, ())
    if len(layout.dims) != len(shape):
        raise ValueError(
            f"shape={tuple(shape)}: {len(layout.dims)} dims are expected, as many as the layout has"
        )
    for axis in layout.varies():
        mesh.axis(axis)


def layout_from(
    mesh: ProcessMesh,
    ndim: int,
    placements: Sequence[Placement] | None,
    dims_mapping: Any,
    partial_status: Any,
) -> Layout:
    """Returns a layout from either of the two notations; without any, a replicated one."""
    mesh = as_mesh("mesh", mesh)
    if placements is not None and (dims_mapping is not None or partial_status is not None):
        raise ValueError("give placements, or dims_mapping and partial_status, not both")
    if placements is not None:
        return layout_of(placements, ndim, mesh.ndim)
    if dims_mapping is None and partial_status is None:
        return replicated(ndim)
    mapping: Sequence[Any] = [-1] * ndim
    if dims_mapping is not None:
        mapping = check_sequence(
            "dims_mapping", dims_mapping, "a list of -1, an axis or a list of axes for each dim"
        )
    if len(mapping) != ndim:
        raise ValueError(
            f"dims_mapping {list(mapping)} has {len(mapping)} entries for a tensor of {ndim} dims: "
            "one per dim"
        )
    return layout_from_mapping(mapping, partial_status, mesh.ndim)


def check_spec(spec: DistSpec) -> DistSpec:
    """Returns ``spec``. Raises ValueError if its pending reduction is invalid for its dtype."""
    names = spec.mesh.dim_names
    check_reductions(spec.dtype, [(names[axis], op) for axis, op in spec.layout.partial])
    return spec


def spec_of(
    mesh: ProcessMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    placements: Sequence[Placement] | None = None,
    dims_mapping: Any = None,
    partial_status: Any = None,
) -> DistSpec:
    """Returns a spec from either of the two notations of a layout. Raises ValueError for a pending
    reduction that is invalid for the dtype."""
    layout = layout_from(mesh, len(shape), placements, dims_mapping, partial_status)
    return check_spec(DistSpec(mesh, layout, shape, dtype))
