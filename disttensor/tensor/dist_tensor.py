"""DistTensor: a global tensor of which this rank holds a piece.

The wrapper is never in an autograd graph: ``local`` is, and PyTorch's own autograd runs on it.
Metadata is answered from the spec, gradients from the locals (``disttensor.tensor.gradient``), and
every torch function goes through ``disttensor.dispatch.dispatch``, which completes this class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import reshard
from disttensor.autograd.grad_types import Typed, move, whole_grad
from disttensor.cache import cached
from disttensor.layout import Axes, dims_mapping_of
from disttensor.mesh import ProcessMesh
from disttensor.placement import Placement
from disttensor.spec import DistSpec
from disttensor.tensor import view_copies
from disttensor.torch_private import make_subclass, storage_id
from ops.shape.strides import spread

Tensor = torch.Tensor


@cached(4096)
def relabels(src: DistSpec, dst: DistSpec) -> bool:
    """Do the layouts differ on axes of one rank only, so that both are the same memory?"""
    ends = zip(src.placements, dst.placements, src.mesh.shape, strict=True)
    return all(n == 1 or p == q for p, q, n in ends)


def _gradless(spec: DistSpec) -> bool:
    """Does a reduction wait that has no gradient? On one rank too: ``dual`` says so."""
    return any(op not in ("sum", "avg") for _, op in spec.layout.partial)


class DistTensor(Tensor):
    """A tensor on a mesh. Made by ``shard_tensor``, ``from_local``, ``from_fn`` and by functions of
    DistTensors.

    ``process_mesh``, ``placements``, ``dims_mapping`` and ``partial_status`` say how it lies;
    everything else is answered as for the global tensor.

    >>> x = dt.shard_tensor(torch.arange(6.0), mesh, [dt.Shard(0), dt.Replicate()])
    >>> isinstance(x, torch.Tensor), x.shape, (x * 2).sum().item()
    (True, torch.Size([6]), 30.0)
    """

    __slots__ = ("local", "spec")

    local: Tensor
    spec: DistSpec
    _aliases: dict[Axes, tuple[Tensor, int]] | None = None  # see local_for
    _origin: Callable[[Axes], Tensor] | None = None  # how to make an alias from what this came from
    _hooked: bool = False  # a leaf whose hooks must see whole gradients
    _former: tuple[
        tuple[Axes, Tensor], ...
    ] = ()  # aliases from before there were hooks: see gradient.retire
    _copied: view_copies.Copied | None = (
        None  # the view function that had to copy: writing to this would be lost,
    )
    _back: Callable[[Any], Any] | None = (
        None  # unless this brings a write back to what it was taken from
    )
    # a pending value as an earlier call reduced it: see disttensor.dispatch.reduction_cache
    _reduced: Any = None
    _viewed: Any = None  # outside the mesh: the DistTensor whose memory this shares inside,
    _views: Any = None  # and weakly, those that share the memory of this one
    _grad: Any = None  # the DistTensor that .grad gave last
    _owner: Any = None  # weak: the leaf whose gradient this is
    _twin: Any = (
        None  # of a parameter cut into shards: what collects its gradients (disttensor.fsdp.param)
    )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing may come here but the question for one number (``torch.full(size, x)``): the
        wrapper holds no data, and is in no graph."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].item()
        raise RuntimeError(
            f"{func} reached a DistTensor below __torch_function__, where only plain tensors may "
            "be: something called it with torch functions disabled, or from C++. Give it "
            "x.full_tensor(), a plain tensor, or run that code on the locals: local_map(fn, "
            "in_placements, out_placements)"
        )

    # Layout ---------------------------------------------------------------------------------------

    @property
    def process_mesh(self) -> ProcessMesh:
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.spec.placements

    @property
    def dims_mapping(self) -> list[int | list[int]]:
        """For each dim -1, the mesh axis that splits it, or a list of axes (major first)."""
        return dims_mapping_of(self.spec.layout)

    @property
    def partial_status(self) -> dict[int, str]:
        """mesh axis -> reduction that is still to be done."""
        return dict(self.spec.layout.partial)

    @property
    def is_initialized(self) -> bool:
        """False on a rank outside the mesh, which knows the metadata only."""
        return self.spec.mesh.coordinate is not None

    # Metadata, as of the global tensor ------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.local.device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.spec.shape)

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.strided

    @property
    def itemsize(self) -> int:  # type: ignore[override]
        return self.spec.dtype.itemsize

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.spec.nbytes

    def size(self, dim: int | None = None) -> Any:
        return self.spec.shape if dim is None else self.spec.shape[dim]

    def dim(self) -> int:
        return len(self.spec.shape)

    ndimension = dim

    def numel(self) -> int:
        return self.spec.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if not self.spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.spec.shape[0]

    def element_size(self) -> int:
        return self.spec.dtype.itemsize

    def is_floating_point(self) -> bool:
        return self.spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.spec.dtype.is_complex

    def stride(self, dim: int | None = None) -> Any:
        """Strides of the global tensor, with the order of dims that the local has (0 where it
        repeats)."""
        if not self.is_initialized:
            return spread_of(self.spec, dim)
        strides = spread(self.local.stride(), self.spec.local_shape, self.spec.shape)
        return strides if dim is None else strides[dim]

    def is_contiguous(self, memory_format: Any = torch.contiguous_format) -> bool:
        if not self.is_initialized:
            return True
        here, spec = self.local.is_contiguous(memory_format=memory_format), self.spec
        if (
            here
            and memory_format is torch.contiguous_format
            and min(spec.local_shape, default=2) <= 1
            and spec.local_shape != spec.shape
        ):
            return torch.empty_strided(spec.shape, self.stride(), device="meta").is_contiguous()
        return here

    def storage_offset(self) -> int:
        return 0

    # The piece of this rank, and the whole --------------------------------------------------------

    def to_local(self, *, grad_axes: Any = ()) -> Tensor:
        """This rank's piece, a plain tensor in the local autograd graph; of size 0 on a rank
        outside the mesh.

        ``grad_axes``: mesh axes (names or numbers) on which the code that follows treats a
        replicated value differently on each rank, so that its gradient is a contribution to be
        summed.
        """
        axes = tuple(
            sorted(
                self.spec.mesh.axis(a)
                for a in ((grad_axes,) if isinstance(grad_axes, (str, int)) else grad_axes)
            )
        )
        if self._copied:
            view_copies.check(self)
        if not self.is_initialized:
            return (
                self.local
                if self.local.dtype is self.spec.dtype
                else self.local.to(self.spec.dtype)
            )
        return self.local_for(axes) if axes else self.local

    def local_for(self, axes: Axes) -> Tensor:
        """The local for a use that varies over ``axes`` (sorted; the value is replicated there).

        The value is ``local``'s; what differs is the meaning of its gradient: see
        ``disttensor.autograd.grad_types``.
        """
        local = self.local
        aliases = self._aliases
        if aliases is not None:
            hit = aliases.get(axes)
            if hit is not None and (hit[1] < 0 or hit[1] == local._version):
                return hit[0]
        if not axes or not local.requires_grad or not torch.is_grad_enabled():
            return local
        if aliases is None:
            aliases = self._aliases = {}
        version = local._version
        if self._origin is not None:
            alias = self._origin(axes)
        elif local.is_leaf and not self._hooked:
            alias, version = (
                whole_grad(local.detach().requires_grad_(), self.spec),
                -1,
            )  # a second leaf: shares memory, collects its own .grad
        else:
            alias = move(local, Typed(self.spec), Typed(self.spec, axes), None)
        aliases[axes] = (alias, version)
        return alias

    def moved_for(self, dst: DistSpec, axes: Axes) -> Tensor:
        """The local of this tensor resharded to ``dst``, for a use that varies over ``axes``."""
        src = self.spec
        if src is dst:
            return self.local_for(axes)
        local = self.local
        if relabels(src, dst) and not (local.requires_grad and _gradless(src)):
            return self.local_for(axes)
        if not local.requires_grad or not torch.is_grad_enabled():
            return reshard.run(local, src, dst)
        through = self.through(dst, axes)
        return move(self.local_for(through), Typed(src, through), Typed(dst, axes), None)

    def through(self, dst: DistSpec, axes: Axes) -> Axes:
        """The axes over which a move to ``dst`` (used varying over ``axes``) reads this replicated
        value varying.

        A leaf that is cut collects the cut pieces as contributions, which costs nothing now.
        """
        spec = self.spec
        leaf = self.local.is_leaf and not self._hooked and self._origin is None
        cut = dst.layout.sharded if leaf else ()
        if not axes and not cut:
            return ()
        return tuple(
            [
                a
                for a in range(len(spec.mesh.shape))
                if a not in spec.varies and (a in axes or a in cut)
            ]
        )

    def forget_uses(self) -> None:
        """On an in-place change of a value that is not a leaf: aliases made before are of the old
        value."""
        if self._aliases is not None and not self.local.is_leaf:
            self._aliases = None
        if self._origin is not None:
            self._origin = None
        self._reduced = None
        if view_copies.LIVE:
            view_copies.outdate(self.local)


def spread_of(spec: DistSpec, dim: int | None) -> Any:
    """Strides of a contiguous tensor: what a rank outside the mesh takes for granted."""
    strides = torch.empty(spec.shape, device="meta").stride()
    return strides if dim is None else strides[dim]


def wrap(local: Tensor, spec: DistSpec) -> DistTensor:
    """A DistTensor of what this rank computed."""
    out = make_subclass(DistTensor, spec.meta_tensor)
    out.local = local
    out.spec = spec
    return out


def resharded(x: DistTensor, dst: DistSpec, fresh: bool = False) -> DistTensor:
    """``x`` in the layout ``dst`` of the same mesh, differentiable; x itself where nothing changes.

    ``fresh``: else it shares no memory with x (a piece of a replicated tensor would be a view of
    it).
    """
    if x.spec is dst:
        return x
    if not x.is_initialized:
        return wrap(x.local if torch.is_grad_enabled() else x.local.detach(), dst)
    moved = x.moved_for(dst, ())
    if fresh and storage_id(moved.untyped_storage()) == storage_id(x.local.untyped_storage()):
        moved = moved.clone()
    out = wrap(moved, dst)
    if out.local.requires_grad:
        local, held, version = out.local, out.local.detach(), out.local._version

        def alias(axes: Axes) -> Tensor:
            if (
                local._version != version
            ):  # written to since, perhaps through a view: what it came from is history
                return move(local, Typed(dst), Typed(dst, axes), None)
            through = x.through(dst, axes)
            return move(x.local_for(through), Typed(x.spec, through), Typed(dst, axes), [held])

        out._origin = alias
    return out
