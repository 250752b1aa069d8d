"""Functions that make DistTensors, and reshard them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from disttensor.autograd.grad_types import scale_average_grad
from disttensor.checks import (
    argument_error,
    check_bool,
    check_callable,
    check_dense,
    check_differentiable,
    check_dtype,
    check_int,
    check_shape,
)
from disttensor.comm import collectives, compare_programs, objects
from disttensor.core.mesh import ProcessMesh, as_mesh, mesh_of_all
from disttensor.core.placement import Placement
from disttensor.core.spec import spec_of
from disttensor.meta import execute, infer
from disttensor.random import state
from disttensor.random.factories import make_local
from disttensor.tensor.awaited import start_reshard
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.reshard import resharded, target
from reshard import cross_mesh

Tensor = torch.Tensor


def shard_tensor(
    data: Any, mesh: ProcessMesh, placements: Sequence[Placement] | None = None, *,
    dims_mapping: Any = None,
    partial_status: Mapping[int, str] | None = None, dtype: torch.dtype | None = None,
    requires_grad: bool | None = None,
    src_rank: int | None = None, check: bool = False,
) -> DistTensor:  # fmt: skip
    """Returns ``data``, the global value on every rank, as a DistTensor: each rank keeps its piece.

    ``src_rank``: only the data of this global rank count and are sent to the others, so that ranks
    cannot differ (the others give a tensor of the same shape and dtype). ``check=True`` compares
    the data of all ranks and names the ranks that differ. A leaf gives a leaf; data in a graph
    stays in it. Without placements and dims_mapping it is replicated. A rank off the mesh gives
    data of the same shape and dtype, and keeps nothing of it. A tensor on the meta device gives
    pieces there (``module.to_empty(device=...)`` then makes memory). A DistTensor is resharded.

    >>> x = dt.shard_tensor(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Shard(1)])
    >>> x.process_mesh, x.dims_mapping
    (ProcessMesh(dp=1, tp=1), [0, 1])
    """
    mesh = as_mesh("shard_tensor: mesh", mesh)
    check_dtype("shard_tensor: dtype", dtype)
    check_bool("shard_tensor: check", check)
    if src_rank is not None:
        check_int("shard_tensor: src_rank", src_rank)
    how = placements, dims_mapping, partial_status
    if isinstance(data, DistTensor):
        return _sharded_again(data, mesh, how, dtype, requires_grad, src_rank)
    value = _values(data, meta=src_rank is None and not check)
    check_differentiable("shard_tensor", requires_grad or False, dtype or value.dtype)
    spec = spec_of(mesh, value.shape, dtype or value.dtype, *how)
    if mesh.coordinate is not None:
        value = value.to(device="meta" if value.is_meta else mesh.device, dtype=spec.dtype)
    compare_programs.record_entry("shard_tensor", spec)
    full = spec.replicated()
    whole = mesh.root
    if src_rank is not None and src_rank not in whole.ranks:
        raise ValueError(
            f"src_rank={src_rank} is not in {whole!r}; its ranks are {list(whole.ranks)}"
        )
    if requires_grad is None:
        requires_grad = isinstance(data, Tensor) and data.requires_grad
    in_graph = value.requires_grad and not value.is_leaf and torch.is_grad_enabled()
    if in_graph and requires_grad and src_rank is not None:
        raise ValueError(
            f"shard_tensor: src_rank={src_rank} of data in a graph: the other ranks' data have no "
            "part in the result, and so no gradient. Give data.detach(), or leave src_rank out"
        )
    if mesh.coordinate is None:
        return _as_parameter(execute.off_mesh_leaf(spec, requires_grad), data)
    if check and src_rank is None:
        _compare(value, whole)
    if src_rank is not None:
        group = whole.group(tuple(range(whole.ndim)))
        value = collectives.broadcast(value.detach(), group.ranks.index(src_rank), group)
    elif in_graph and requires_grad:
        return resharded(wrap(value, full), spec)
    local = cross_mesh.run(value.detach(), full, spec)
    if not value.is_meta and (
        local.untyped_storage().nbytes() > local.nbytes
        or local.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    ):
        local = local.clone(memory_format=torch.contiguous_format)
    local = scale_average_grad(local.requires_grad_(requires_grad), spec)
    return _as_parameter(wrap(local, spec), data)


def _values(data: Any, meta: bool) -> Tensor:
    """Returns ``data`` as a regular tensor; a tensor on the meta device is allowed if ``meta``."""
    if not isinstance(data, Tensor):
        try:
            return torch.as_tensor(data)
        except (TypeError, ValueError, RuntimeError) as error:
            expected = "a tensor, an array, or numbers in lists of one length"
            raise argument_error("shard_tensor: data", data, expected, type(error)) from None
    check_dense("shard_tensor: data", data, meta)
    return data


def _sharded_again(
    x: DistTensor, mesh: ProcessMesh, how: Any, dtype: torch.dtype | None,
    requires_grad: bool | None, src_rank: int | None,
) -> DistTensor:  # fmt: skip
    """Runs ``shard_tensor`` on a DistTensor. Without a layout it keeps its placements."""
    if src_rank is not None:
        raise ValueError(
            f"shard_tensor: src_rank={src_rank} of a DistTensor: no rank has another value of it"
        )
    if all(part is None for part in how):
        how = x.placements, None, None
    out: Any = reshard(x, mesh, how[0], dims_mapping=how[1], partial_status=how[2])
    out = out if dtype is None else out.to(dtype)
    if requires_grad is None or requires_grad == out.requires_grad:
        return out
    check_differentiable("shard_tensor", requires_grad, out.dtype)
    return out.detach().requires_grad_(requires_grad)


def _as_parameter(x: DistTensor, data: Any) -> Any:
    """Returns ``x``, as a Parameter if ``data`` is one."""
    is_param = isinstance(data, torch.nn.Parameter)
    return torch.nn.Parameter(x, x.requires_grad) if is_param else x


def _compare(value: Tensor, mesh: ProcessMesh) -> None:
    group = mesh.group(tuple(range(mesh.ndim)))
    mine = (tuple(value.shape), str(value.dtype), objects.digest(value))
    everyone = objects.gather_objects(mine, group)
    different = [
        r for r, theirs in zip(group.ranks, everyone, strict=True) if theirs != everyone[0]
    ]
    if different:
        kind = "shape or dtype" if any(e[:2] != everyone[0][:2] for e in everyone) else "values"
        raise ValueError(
            f"shard_tensor(check=True): the {kind} of rank {', '.join(map(str, different))} differ "
            f"from those of rank {group.ranks[0]}; seed all ranks alike, or pass "
            f"src_rank={group.ranks[0]} to take one rank's data"
        )


def reshard(
    x: Any,
    mesh: ProcessMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dims_mapping: Any = None,
    partial_status: Any = None,
) -> DistTensor:
    """Returns ``x`` in another layout, on its mesh or another one; differentiable. A regular tensor
    counts as replicated.

    To another mesh: every rank of the world makes the call, also ranks in neither mesh. Elements
    that a receiver does not hold come from ranks that do; gradients go back the same way.

    >>> x = dt.shard_tensor(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Replicate()])
    >>> dt.reshard(x, mesh, [dt.Replicate(), dt.Shard(1)]).dims_mapping
    [-1, 1]
    """
    if mesh is not None and not isinstance(mesh, ProcessMesh):
        mesh = as_mesh("reshard: mesh", mesh)
    if not isinstance(x, DistTensor):
        if mesh is None:
            raise ValueError("reshard of a regular tensor needs a mesh")
        return shard_tensor(
            x, mesh, placements, dims_mapping=dims_mapping, partial_status=partial_status
        )
    dst = target(x.spec, mesh or x.spec.mesh, placements, dims_mapping, partial_status)
    return start_reshard(x, dst)


def from_fn(
    fn: Callable[..., Tensor],
    mesh: ProcessMesh,
    placements: Sequence[Placement] | None,
    shape: Any,
    *args: Any,
    dims_mapping: Any = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    **kwargs: Any,
) -> DistTensor:
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
    spec = spec_of(mesh, size, dtype or torch.get_default_dtype(), placements, dims_mapping)
    if spec.layout.partial:
        raise ValueError(
            "from_fn: a factory's value is not a pending reduction; use Shard and Replicate"
        )
    if requires_grad is not False:
        kind = dtype or (torch.int64 if fn is torch.randperm else spec.dtype)
        check_differentiable(who, requires_grad, kind)
    if spec.layout.custom:  # only the reshard to such a placement can cut its pieces
        bare = spec.with_layout(spec.layout.without_custom()).placements
        whole = from_fn(fn, mesh, bare, shape, *args, dtype=dtype, **kwargs)
        out = resharded(whole, spec.with_dtype(whole.spec.dtype))
        return out.requires_grad_(requires_grad)
    if mesh.coordinate is None:
        extent: Any = size[0] if fn is torch.randperm else size
        given = (*args, extent) if fn is torch.randint else (extent, *args)
        made = infer.infer_metadata(fn, given, {**kwargs, "dtype": dtype, "device": mesh.device})
        if made.draws:
            state.draw(mesh, "invariant", kwargs.get("generator"))
        return execute.off_mesh_leaf(spec.with_dtype(made.outs[0].dtype), requires_grad)
    compare_programs.record_entry(who, spec)
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
        *size: Any,
        mesh: ProcessMesh,
        placements: Sequence[Placement] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> DistTensor:
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


zeros, ones, empty, rand, randn = map(
    _factory, (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
)
randperm = _factory(torch.randperm)


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


def distribute_tensor(
    tensor: Any, device_mesh: Any = None, placements: Sequence[Placement] | None = None, *,
    src_data_rank: int | None = 0,
) -> DistTensor:  # fmt: skip
    """Runs ``shard_tensor`` on the data of one rank, as torch's ``distribute_tensor`` does.

    Args:
        tensor: the global tensor; only its shape and dtype matter on ranks that do not send it.
        device_mesh: a ProcessMesh or torch's DeviceMesh; None: a mesh of all ranks with one axis.
        placements: one for each mesh axis; None: replicated.
        src_data_rank: the place of the rank that sends its data, the same on every mesh axis.
            None: each rank uses its own data, which must be alike, and nothing is sent.

    Raises TypeError or ValueError for arguments that do not fit.

    >>> dt.distribute_tensor(torch.zeros(4, 6), mesh, [dt.Shard(0), dt.Shard(1)]).placements
    (Shard(0), Shard(1))
    """
    if device_mesh is None:
        device_mesh = mesh_of_all("d0")
    mesh, source = as_mesh("distribute_tensor: device_mesh", device_mesh), None
    if src_data_rank is not None and not isinstance(tensor, DistTensor):
        check_int("distribute_tensor: src_data_rank", src_data_rank, 0)
        if src_data_rank >= min(mesh.root.shape):
            raise ValueError(
                f"distribute_tensor: src_data_rank={src_data_rank}: {mesh.root!r} has an axis of "
                f"{min(mesh.root.shape)} rank(s)"
            )
        source = int(mesh.root.mesh[(src_data_rank,) * mesh.root.ndim])
    return shard_tensor(tensor, mesh, placements, src_rank=source)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    mesh: ProcessMesh,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DistTensor:
    """Runs torch.full on a mesh.

    >>> dt.full((2, 2), 3, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).tolist()
    [[3, 3], [3, 3]]
    """
    if not isinstance(fill_value, (Number, torch.Tensor)) or isinstance(fill_value, DistTensor):
        raise argument_error("full: fill_value", fill_value, "a number")
    return from_fn(
        torch.full,
        mesh,
        placements,
        size,
        fill_value,
        dtype=dtype or torch.as_tensor(fill_value).dtype,
        requires_grad=requires_grad,
    )
