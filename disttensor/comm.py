"""The one door to torch.distributed: every collective of the project is called here.

All functions take and give plain tensors and a ``Group``. Members are numbered in *mesh order*
(the order of ``Group.ranks``), whatever order the backend keeps. Groups of one rank return at once.
Every call can be recorded (``record_comms``) and, in debug mode, is compared between ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from disttensor import comm_debug, comm_log

Tensor = torch.Tensor


class CommError(RuntimeError):
    """A collective failed or could not start; the message names the group and its ranks."""


@dataclass(eq=False, slots=True)
class Group:
    """Ranks that communicate: ``ranks`` in mesh order, ``index`` of this rank among them."""

    ranks: tuple[int, ...]
    index: int
    axes: tuple[str, ...]
    pg: Any
    order: tuple[int, ...] = ()  # order[i]: the backend's number of member i
    straight: bool = True  # mesh order is the backend's order
    calls: list[int] = field(default_factory=lambda: [0])

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group({'+'.join(self.axes)}: ranks {list(self.ranks)})"


_groups: dict[tuple[Any, ...], Any] = {}


def world() -> tuple[int, int]:
    """(rank, size) of this process; (0, 1) where no process group was started."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def new_group(ranks: Sequence[int], axes: Sequence[str]) -> Group:
    """The group of ``ranks`` (this rank is one of them). Collective for its members only, and cached.

    Raises CommError that names the ranks when they do not all arrive.
    """
    ranks = tuple(ranks)
    rank, size = world()
    if len(ranks) == 1:
        return Group(ranks, 0, tuple(axes), None, (0,))
    members = tuple(sorted(ranks))
    default = dist.distributed_c10d._get_default_group()
    key = (default, members)
    if key not in _groups:
        for stale in [k for k in _groups if k[0] is not default]:
            del _groups[stale]
        try:
            whole = members == tuple(range(size))
            _groups[key] = default if whole else dist.new_group(members, use_local_synchronization=True)
        except Exception as error:
            raise CommError(
                f"creating the process group of mesh axes {'+'.join(axes)} failed on rank {rank}: it needs "
                f"ranks {list(members)} to arrive here together. Backend's words: {error}"
            ) from error
    order = tuple(members.index(r) for r in ranks)
    return Group(ranks, ranks.index(rank), tuple(axes), _groups[key], order, order == tuple(range(len(order))))


# Each collective: what it is for people, what it costs, and the wire format -----------------------

_BYTES_ONLY = {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64}
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
        "prod": dist.ReduceOp.PRODUCT, "any": dist.ReduceOp.MAX, "all": dist.ReduceOp.MIN}  # fmt: skip


def _call(kind: str, group: Group, x: Tensor, nbytes: float, what: Callable[[], Any], op: str = "") -> None:
    """Record, check in debug mode, run, and give errors a name."""
    if comm_log.active:
        comm_log.record(kind, group.axes, int(nbytes), x.shape, x.dtype)
    if comm_debug.enabled:
        comm_debug.compare(group, f"{kind}({op}) of {tuple(x.shape)} {x.dtype}")
    try:
        what()
    except RuntimeError as error:
        raise CommError(
            f"{kind} over mesh axes {'+'.join(group.axes)} (ranks {list(group.ranks)}) failed on rank "
            f"{group.ranks[group.index]}: a rank of the group is gone, or called something else. "
            f"Backend's words: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def _wire(x: Tensor, op: str) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """The tensor in a form every backend reduces, and the way back (None: nothing to undo)."""
    dtype = x.dtype
    if dtype.is_complex:
        if op not in ("sum", "avg"):
            raise CommError(f"reducing complex numbers with {op!r} has no meaning on the wire")
        return torch.view_as_real(x.contiguous()), torch.view_as_complex
    if dtype == torch.bool:
        small = x.to(torch.int32 if op in ("sum", "avg") else torch.uint8)
        return small, lambda t: t.to(torch.bool)
    if dtype in (torch.int16, torch.uint16):
        return x.to(torch.int32), lambda t: t.to(dtype)
    if op in ("any", "all"):
        return (x != 0).to(torch.uint8), lambda t: t.to(dtype)
    return x, None


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """A new tensor of x's shape: the elementwise ``op`` over all members. ``avg`` divides by the size."""
    if group.size == 1:
        return x
    n = group.size
    buffer, back = _wire(x.detach(), op)
    if buffer.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() or not buffer.is_contiguous():
        buffer = buffer.clone(memory_format=torch.contiguous_format)
    red = _OPS["sum" if op == "avg" else op]
    nbytes = 2 * (n - 1) / n * buffer.nbytes
    _call("all_reduce", group, x, nbytes, lambda: dist.all_reduce(buffer, red, group=group.pg), op)
    if op == "avg":
        buffer = buffer.div_(n) if buffer.is_floating_point() else buffer / n
    return buffer if back is None else back(buffer)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """[n, *x.shape]: the x of every member in mesh order; all x have one shape."""
    if group.size == 1:
        return x.detach().unsqueeze(0)
    x = x.detach().contiguous()
    flat = x.reshape(-1).view(torch.uint8) if x.dtype in _BYTES_ONLY else x
    out = torch.empty((group.size * flat.shape[0], *flat.shape[1:]) if flat.ndim else (group.size,), dtype=flat.dtype, device=x.device)
    nbytes = (group.size - 1) * flat.nbytes
    _call("all_gather", group, x, nbytes, lambda: dist.all_gather_into_tensor(out, flat if flat.ndim else flat.view(1), group=group.pg))
    out = out.view(x.dtype) if flat.dtype != x.dtype else out
    out = out.view(group.size, *x.shape)
    return out if group.straight else out[list(group.order)]


def reduce_scatter(x: Tensor, op: str, group: Group) -> Tensor:
    """[n, *s] to [*s]: member i gets the ``op`` over all members of their x[i]."""
    if group.size == 1:
        return x.detach().squeeze(0)
    n = group.size
    buffer, back = _wire(x.detach(), op)
    if not group.straight:
        inverse = [group.order.index(i) for i in range(n)]
        buffer = buffer[inverse]
    buffer = buffer.contiguous()
    out = buffer.new_empty(buffer.shape[1:])
    red = _OPS["sum" if op == "avg" else op]
    nbytes = (n - 1) / n * buffer.nbytes
    flat_out, flat_in = (out, buffer.flatten(0, 1)) if out.ndim else (out.view(1), buffer)
    _call("reduce_scatter", group, x, nbytes, lambda: dist.reduce_scatter_tensor(flat_out, flat_in, red, group=group.pg), op)
    if op == "avg":
        out = out.div_(n) if out.is_floating_point() else out / n
    return out if back is None else back(out)


def all_to_all(pieces: Sequence[Tensor], numels: Sequence[int], group: Group) -> list[Tensor]:
    """Sends the flat ``pieces[i]`` to member i; gives what came from each, flat, of ``numels[i]`` elements."""
    if group.size == 1:
        return [pieces[0].detach().reshape(-1)]
    dtype, device = pieces[0].dtype, pieces[0].device
    slots = range(group.size) if group.straight else [group.order.index(i) for i in range(group.size)]
    send = torch.cat([pieces[i].detach().reshape(-1) for i in slots])
    scale = 1
    if dtype in _BYTES_ONLY:
        send, scale = send.view(torch.uint8), send.element_size()
    elif dtype.is_complex:
        send, scale = torch.view_as_real(send).reshape(-1), 2
    sizes_in = [pieces[i].numel() * scale for i in slots]
    sizes_out = [numels[i] * scale for i in slots]
    out = torch.empty(sum(sizes_out), dtype=send.dtype, device=device)
    nbytes = send.nbytes - sizes_in[list(slots).index(group.index)] * send.element_size()
    _call("all_to_all", group, send, nbytes, lambda: dist.all_to_all_single(out, send, sizes_out, sizes_in, group=group.pg))
    if dtype in _BYTES_ONLY:
        out = out.view(dtype)
    elif dtype.is_complex:
        out = torch.view_as_complex(out.view(-1, 2))
    got: list[Any] = [None] * group.size
    for i, piece in zip(slots, out.split([n // scale if dtype not in _BYTES_ONLY else n // scale for n in sizes_out]), strict=True):
        got[i] = piece
    return got


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """x of member ``src`` on every member; on the others x gives the shape and dtype."""
    if group.size == 1:
        return x.detach()
    buffer = x.detach().contiguous()
    buffer = buffer.clone() if group.index == src else torch.empty_like(buffer)
    wire = buffer.view(-1).view(torch.uint8) if buffer.dtype in _BYTES_ONLY else buffer
    nbytes = buffer.nbytes if group.index == src else 0
    _call("broadcast", group, x, nbytes, lambda: dist.broadcast(wire, group.ranks[src], group=group.pg))
    return buffer


def scatter(pieces: Sequence[Tensor] | None, like: Tensor, src: int, group: Group) -> Tensor:
    """Piece i of member ``src`` on member i; ``like`` (all of one shape) gives the shape and dtype."""
    if group.size == 1:
        assert pieces is not None
        return pieces[0]
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    wire = out.view(-1).view(torch.uint8) if out.dtype in _BYTES_ONLY else out
    chunks = None
    if group.index == src and pieces is not None:
        inverse = [group.order.index(i) for i in range(group.size)]
        chunks = [pieces[i].detach().contiguous() for i in inverse]
        if wire.dtype != out.dtype:
            chunks = [c.view(-1).view(torch.uint8) for c in chunks]
    nbytes = (group.size - 1) * out.nbytes if group.index == src else 0
    _call("scatter", group, like, nbytes, lambda: dist.scatter(wire, chunks, group.ranks[src], group=group.pg))
    return out


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every member's picklable ``value``, in mesh order: for set-up and checks, not for data."""
    if group.size == 1:
        return [value]
    out: list[Any] = [None] * group.size
    size = torch.zeros(math.prod((0,)))  # nothing of the value is known to the others
    _call("all_gather", group, size, 0, lambda: dist.all_gather_object(out, value, group=group.pg))
    return [out[i] for i in group.order]
