"""Factories of DistTensors, as ``zeros`` and ``randn``: each rank makes its piece only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch

from disttensor.api.shard import shard_tensor
from disttensor.checks import (
    argument_error,
    check_callable,
    check_dense,
    check_differentiable,
    check_dtype,
    check_int,
    check_shape,
)
from disttensor.comm import compare_programs
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Placement
from disttensor.core.spec import spec_of
from disttensor.off_mesh import execute
from disttensor.random import draws
from disttensor.random.factories import dtype_of, make_local
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded
from ops.answer import answer


def from_fn(
    fn: Callable[..., torch.Tensor], mesh: ProcessMesh, placements: Sequence[Placement] | None,
    shape: Any, *args: Any, dims_mapping: Any = None, dtype: torch.dtype | None = None,
    requires_grad: bool = False, **kwargs: Any,
) -> DistTensor:  # fmt: skip
    """Returns ``fn(shape, *args)`` as a DistTensor; each rank makes its piece only. ``fn`` is a
    factory of torch (zeros, ones, empty, full, rand, randn). Random factories draw the same numbers
    as one process would.

    >>> split = [dt.Shard(0), dt.Replicate()]
    >>> dt.api.create.from_fn(torch.full, mesh, split, (4, 6), 1.5).sum().item()
    36.0
    """
    who = getattr(fn, "__name__", "from_fn")  # a partial has no name
    check_callable("from_fn: fn", fn, "a factory, as torch.zeros,")
    mesh = as_mesh(f"{who}: mesh", mesh)
    check_dtype(f"{who}: dtype", dtype)
    size = check_shape(f"{who}: size", shape if isinstance(shape, Sequence) else (shape,))
    if fn is torch.randperm and len(size) != 1:
        raise ValueError(f"randperm: size={size}: one whole number is expected")
    for key, only in (("device", mesh.device), ("layout", torch.strided)):
        if str(kwargs.pop(key, only)) != str(only):
            raise ValueError(f"{who}: {key}: a tensor on {mesh!r} is {only}; leave it out")
    if kwargs.pop("out", None) is not None:
        raise TypeError(f"{who}: out=: a factory makes a new tensor; fill an old one by copy_")
    spec = spec_of(mesh, size, dtype_of(fn, mesh, args, dtype), placements, dims_mapping)
    if spec.layout.partial:
        raise ValueError(
            "from_fn: a factory's value is not a pending reduction; use Shard and Replicate"
        )
    if requires_grad is not False:
        check_differentiable(who, requires_grad, spec.dtype)
    if spec.layout.custom:  # only the reshard to such a placement can cut its pieces
        bare = spec.with_layout(spec.layout.without_custom()).placements
        whole = from_fn(fn, mesh, bare, shape, *args, dtype=dtype, **kwargs)
        out = resharded(whole, spec.with_dtype(whole.spec.dtype))
        return out.requires_grad_(requires_grad)
    if mesh.coordinate is None:
        extent: Any = size[0] if fn is torch.randperm else size
        given = (*args, extent) if fn is torch.randint else (extent, *args)
        made = answer(fn, given, {**kwargs, "dtype": dtype, "device": mesh.device})
        if made.draws:
            draws.draw(mesh, "invariant", kwargs.get("generator"))
        return execute.off_mesh_leaf(spec.with_dtype(made.outs[0].dtype), requires_grad)
    compare_programs.record_entry(who, spec, bool(requires_grad))
    local = make_local(fn, spec, args, kwargs)
    if local is None:
        local = fn(spec.local_shape, *args, dtype=dtype, device=mesh.device, **kwargs)
    check_dense("from_fn: what fn gave", local)
    if tuple(local.shape) != spec.local_shape:
        raise ValueError(
            f"from_fn: fn gave {list(local.shape)}, asked for {list(spec.local_shape)}, this "
            f"rank's piece of {spec!r}"
        )
    return wrap(local.requires_grad_(requires_grad), spec.with_dtype(local.dtype))


def _factory(fn: Any) -> Callable[..., DistTensor]:
    def make(
        *size: Any, mesh: ProcessMesh, placements: Sequence[Placement] | None = None,
        dtype: torch.dtype | None = None, requires_grad: bool = False, **kwargs: Any,
    ) -> DistTensor:  # fmt: skip
        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        return from_fn(
            fn, mesh, placements, shape, dtype=dtype, requires_grad=requires_grad, **kwargs
        )

    make.__name__ = fn.__name__
    make.__doc__ = f"""torch.{fn.__name__} on a mesh, born sharded: each rank makes its piece.

    >>> dt.{fn.__name__}(8, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).shape
    torch.Size([8])
    """
    return make


zeros, ones, empty, rand, randn, randperm = map(
    _factory, (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.randperm)
)


def arange(
    start: Any, end: Any = None, step: Any = 1, *, mesh: ProcessMesh,
    placements: Sequence[Placement] | None = None, dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DistTensor:  # fmt: skip
    """Runs torch.arange on a mesh. Each rank makes all values and keeps its piece.

    >>> dt.arange(2, 8, 2, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).tolist()
    [2, 4, 6]
    """
    check_dtype("arange: dtype", dtype)
    for name, value in (("start", start), ("end", end), ("step", step)):
        if not isinstance(value, Number) and (name, value) != ("end", None):
            raise argument_error(f"arange: {name}", value, "a number")
    start, end = (0, start) if end is None else (start, end)
    values = torch.arange(start, end, step, dtype=dtype)
    check_differentiable("arange", requires_grad, values.dtype)
    return shard_tensor(values, mesh, placements, requires_grad=requires_grad)


def randint(
    low: int, high: Any, size: Any = None, *, mesh: ProcessMesh,
    placements: Sequence[Placement] | None = None, dtype: torch.dtype = torch.int64,
) -> DistTensor:  # fmt: skip
    """Runs torch.randint on a mesh: ``randint(high, size)`` or ``randint(low, high, size)``. The
    numbers follow from the global position, so they do not depend on the placements.

    >>> x = dt.randint(3, 9, (4, 2), mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    >>> x.shape, bool((x >= 3).all()), bool((x < 9).all())
    (torch.Size([4, 2]), True, True)
    """
    low, high, size = (0, low, high) if size is None else (low, high, size)
    check_int("randint: low", low)
    check_int("randint: high", high)
    if low >= high:
        raise ValueError(
            f"randint: low={low}, high={high}: numbers from low up to high - 1 are drawn"
        )
    return empty(size, mesh=mesh, placements=placements, dtype=dtype).random_(low, high)  # type: ignore[return-value]


def full(
    size: Sequence[int], fill_value: Any, *, mesh: ProcessMesh,
    placements: Sequence[Placement] | None = None, dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DistTensor:  # fmt: skip
    """Runs torch.full on a mesh.

    >>> dt.full((2, 2), 3, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).tolist()
    [[3, 3], [3, 3]]
    """
    if not isinstance(fill_value, (Number, torch.Tensor)) or isinstance(fill_value, DistTensor):
        raise argument_error("full: fill_value", fill_value, "a number")
    number: Any = fill_value  # of NumPy, or a 0-d tensor: torch looks at its value alone
    fill_value = number.item() if hasattr(number, "item") else number
    return from_fn(
        torch.full, mesh, placements, size, fill_value, dtype=dtype, requires_grad=requires_grad
    )
