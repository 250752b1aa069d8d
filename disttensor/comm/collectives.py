"""The one door to torch.distributed: every collective of the project is called here.

All functions take and give plain tensors and a ``Group``. Members are numbered in *mesh order*
(the order of ``Group.ranks``), whatever order the backend keeps. Groups of one rank return at once.
Every call can be recorded (``record_comms``) and, in debug mode, is compared between ranks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from disttensor.comm import desync, failures, log
from disttensor.comm.groups import Group as Group
from disttensor.comm.groups import create_groups as create_groups
from disttensor.comm.groups import new_group as new_group
from disttensor.comm.groups import process_group as process_group
from disttensor.comm.groups import the_world as the_world
from disttensor.comm.groups import world as world
from disttensor.errors import CommError as CommError
from disttensor.torch_private import (
    all_gather_single,
    all_to_all_single,
    backend_of,
    reduce_scatter_single,
)  # fmt: skip

Tensor = torch.Tensor


# Each collective: what it is for people, what it costs, and the wire format -----------------------

# What every backend sends as it is; all else travels as bytes, and is reduced in a wider dtype.
_NATIVE = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
           torch.uint8, torch.int8}  # fmt: skip
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT, "any": dist.ReduceOp.MAX,
        "all": dist.ReduceOp.MIN}  # fmt: skip

# The methods of a process group that torch.distributed's functions end in: a third of the time of a
# small collective is spent on the way there.
_PG = dist.ProcessGroup
_gather, _scatter_sum = all_gather_single, reduce_scatter_single
_exchange = all_to_all_single


def _options(options: Any, op: str = "", background: bool = False) -> Any:
    options.asyncOp = background
    if op:
        options.reduceOp = _OPS[op]
    return options


_GATHER, _EXCHANGE = _options(c10d.AllgatherOptions()), _options(c10d.AllToAllOptions())
_REDUCE = {op: _options(c10d.AllreduceOptions(), op) for op in _OPS}
_REDUCE_SCATTER = {op: _options(c10d.ReduceScatterOptions(), op) for op in _OPS}
# The same in the background: on NCCL, on a stream of their own.
_START_GATHER = _options(c10d.AllgatherOptions(), background=True)
_START_EXCHANGE = _options(c10d.AllToAllOptions(), background=True)
_START_REDUCE = {op: _options(c10d.AllreduceOptions(), op, True) for op in _OPS}
_START_REDUCE_SCATTER = {op: _options(c10d.ReduceScatterOptions(), op, True) for op in _OPS}


def _announce(kind: str, group: Group, wire: Tensor, share: float, op: str) -> None:
    """Record that ``share`` of wire's bytes is sent; compare between ranks in debug mode."""
    if log.active:
        log.record(kind, group.axes, round(share * wire.nbytes), wire.shape, wire.dtype)
    if desync.enabled:
        shape = "pieces" if kind == "all_to_all" else tuple(wire.shape)  # these may differ in size
        desync.compare(group, f"{kind}({op}) of {shape} {wire.dtype}")


def _failed(kind: str, group: Group, error: RuntimeError) -> CommError:
    return CommError(
        f"{kind} over mesh axes {'+'.join(group.axes)} (ranks {list(group.ranks)}) failed on rank "
        f"{group.ranks[group.index]}: a rank of the group is gone, or called something "
        f"else.{failures.first()} Backend's words: "
        f"{str(error).splitlines()[0] if str(error) else error!r}"
    )


def _call(
    kind: str, group: Group, wire: Tensor, share: float, fn: Any, *args: Any, op: str = ""
) -> None:
    """Announce, run to the end, name errors."""
    if log.active or desync.enabled:
        _announce(kind, group, wire, share, op)
    try:
        work = fn(*args)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise _failed(kind, group, error) from error


def _dense(x: Tensor) -> Tensor:
    """x as the memory says: detached, contiguous, no conjugation or sign left to be applied."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    return x if x.is_contiguous() else x.contiguous()


def _bytes(x: Tensor) -> Tensor:
    """The same memory in a dtype that every backend sends."""
    return x if x.dtype in _NATIVE else _raw(x)


def _raw(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes. One element may have any stride, which a view
    would not take."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _matching(one: Tensor, all_: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory in shapes that gloo takes: ``all_`` joins pieces like ``one`` along dim 0."""
    if one.ndim and one.ndim == all_.ndim and one.shape[1:] == all_.shape[1:]:
        return one, all_
    return one.view(-1), all_.view(-1)


def _wire(x: Tensor, op: str) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """A dense tensor that every backend reduces, and the way back (None: nothing to undo)."""
    x, dtype = _dense(x), x.dtype
    if dtype.is_complex:
        if op not in ("sum", "avg"):
            raise CommError(f"reducing complex numbers with {op!r} has no meaning on the wire")
        return torch.view_as_real(x), torch.view_as_complex
    if op == "avg" and not dtype.is_floating_point:
        raise CommError(
            f"the average of {dtype} values is not {dtype}: reduce with 'sum' and divide"
        )
    if op in ("any", "all"):
        return (x if dtype == torch.bool else x != 0).to(torch.uint8), lambda t: t.to(dtype)
    if dtype == torch.bool:
        return x.to(torch.int32 if op == "sum" else torch.uint8), lambda t: t.to(torch.bool)
    if dtype not in _NATIVE:
        return x.to(torch.float32 if dtype.is_floating_point else torch.int64), lambda t: t.to(
            dtype
        )
    return x, None


# Backends whose own AVG is a sum and one division. Others reduce a sum that is divided here.
_AVERAGE = {"nccl", "gloo"} if torch.__version__ >= "2.13" else {"nccl"}


def factors(op: str, n: int, dtype: torch.dtype) -> tuple[float, float]:
    """What n ranks multiply by before and after they add up, so that the result is the ``op``
    ("sum" or "avg").

    fp16 ends at 65504 above and at 2**-24 below. A sum of n values may pass the first on its way to
    a small sum or to an average; an average that divides by all of n first loses what is below n *
    2**-24. So fp16 goes half-way down before, by 2**k, the power of two near sqrt(n), and the rest
    of the way (for a sum: up again) after. Sums on the way may then reach 2**k * 65504, and values
    keep their bits down to 2**k * 2**-24: a power of two changes none above. It cannot be had for
    nothing at both ends. Other dtypes need nothing before.
    """
    half = math.log2(n) / 2
    if dtype != torch.float16:
        k = 0
    elif op == "avg":
        k = math.floor(half + 0.5)
    else:  # two ranks have no sum on the way
        k = math.ceil(half - 0.5)
    return 2.0**-k, 2.0**k / n if op == "avg" else 2.0**k


def _scaled(op: str, wire: Tensor, group: Group) -> tuple[str, float, float]:
    """The backend's reduction for ``op``, and the factors before and after it."""
    if op == "avg" and wire.dtype != torch.float16:
        if backend_of(group.pg, wire.device).name() in _AVERAGE:
            return "avg", 1.0, 1.0
    elif op != "avg" and (op != "sum" or wire.dtype != torch.float16):
        return op, 1.0, 1.0
    return "sum", *factors(op, group.size, wire.dtype)


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    """A new tensor of x's shape: the elementwise ``op`` over all members; ``avg`` divides by n."""
    n = group.size
    if n == 1:
        return x.detach()
    buffer, back = _wire(x, op)
    native, before, after = _scaled(op, buffer, group)
    if before != 1:
        buffer = buffer * before
    elif back is None or x.dtype.is_complex:  # not a copy yet
        buffer = buffer.clone()
    _call(
        "all_reduce",
        group,
        buffer,
        2 * (n - 1) / n,
        _PG.allreduce,
        group.pg,
        [buffer],
        _REDUCE[native],
        op=op,
    )
    if after != 1:
        buffer = buffer.div_(1 / after)
    return buffer if back is None else back(buffer)


def all_gather(x: Tensor, group: Group, shape: Sequence[int] | None = None) -> Tensor:
    """[n, *x.shape], or that in ``shape``: each member's x in mesh order; all have one shape."""
    n = group.size
    x = _dense(x)
    if shape is None:
        shape = (n, *x.shape)
    if n == 1:
        return x.view(shape)
    out = x.new_empty(shape)
    wire, target = _matching(_bytes(x), _bytes(out))
    _call("all_gather", group, x, n - 1, _gather, group.pg, target, wire, _GATHER)
    return out if group.straight else out.view(n, -1)[list(group.order)].view(shape)


def reduce_scatter(x: Tensor, op: str, group: Group, shape: Sequence[int] | None = None) -> Tensor:
    """[n, *s] to [*s]: member i gets the ``op`` over all members of their x[i].

    With ``shape``, that is s, and x any tensor whose n equal parts in memory are the pieces.
    """
    n = group.size
    if shape is None:
        shape = x.shape[1:]
    if n == 1:
        return x.detach().reshape(shape)
    buffer, back = _wire(x, op)
    if not group.straight:
        buffer = buffer.reshape(n, -1)[[group.order.index(i) for i in range(n)]]
    native, before, after = _scaled(op, buffer, group)
    if before != 1:
        buffer = buffer * before
    out = buffer.new_empty((*shape, 2) if x.dtype.is_complex else shape)
    share = (n - 1) / n
    target, wire = _matching(out, buffer)
    _call(
        "reduce_scatter",
        group,
        buffer,
        share,
        _scatter_sum,
        group.pg,
        target,
        wire,
        _REDUCE_SCATTER[native],
        op=op,
    )
    if after != 1:
        out = out.div_(1 / after)
    return out if back is None else back(out)


def all_to_all(pieces: Sequence[Tensor], numels: Sequence[int], group: Group) -> list[Tensor]:
    """Sends ``pieces[i]`` to member i; gives what came from each, flat, of ``numels[i]``
    elements."""
    if group.size == 1:
        return [pieces[0].detach().reshape(-1)]
    slots = (
        range(group.size) if group.straight else [group.order.index(i) for i in range(group.size)]
    )
    send = _dense(torch.cat([pieces[i].reshape(-1) for i in slots]))
    sizes_in, sizes_out = [pieces[i].numel() for i in slots], [numels[i] for i in slots]
    out = send.new_empty(sum(sizes_out))
    wire, target = _bytes(send), _bytes(out)
    scale = 1 if wire is send else send.itemsize
    share = 1 - pieces[group.index].numel() / max(1, len(send))
    _call(
        "all_to_all", group, send, share, _exchange, group.pg, target, wire,
        [n * scale for n in sizes_out], [n * scale for n in sizes_in], _EXCHANGE,
    )  # fmt: skip
    got = out.split(sizes_out)
    return list(got) if group.straight else [got[i] for i in group.order]


def all_to_all_even(x: Tensor, group: Group) -> Tensor:
    """[n, *s] to [n, *s]: x[i] goes to member i, and out[i] is what member i sent."""
    n = group.size
    x = _dense(x)
    if n == 1:
        return x
    if not group.straight:
        x = x[[group.order.index(i) for i in range(n)]]
    out = torch.empty_like(x)
    wire, target = _bytes(x), _bytes(out)
    _call("all_to_all", group, x, (n - 1) / n, _exchange, group.pg, target, wire, [], [], _EXCHANGE)
    return out if group.straight else out[list(group.order)]


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """x of member ``src`` on every member; on the others x gives the shape and dtype."""
    if group.size == 1:
        return x.detach()
    mine = group.index == src
    buffer = (
        _dense(x).clone() if mine else torch.empty_like(x, memory_format=torch.contiguous_format)
    )
    wire = _bytes(buffer)
    _call("broadcast", group, buffer, float(mine), dist.broadcast, wire, group.ranks[src], group.pg)
    return buffer


def scatter(pieces: Sequence[Tensor] | None, like: Tensor, src: int, group: Group) -> Tensor:
    """Piece i of member ``src`` on member i; all are of the shape and dtype of ``like``."""
    mine = group.index == src
    if mine and (pieces is None or len(pieces) != group.size):
        count = "none" if pieces is None else len(pieces)
        raise CommError(
            f"scatter over {group!r} needs {group.size} pieces on its source, got {count}"
        )
    if group.size == 1:
        assert pieces is not None
        return pieces[0].detach()
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    wire, chunks = _bytes(out), None
    if mine and pieces is not None:
        chunks = [_bytes(_dense(pieces[group.order.index(i)])) for i in range(group.size)]
    share = float(mine) * (group.size - 1)
    _call("scatter", group, out, share, dist.scatter, wire, chunks, group.ranks[src], group.pg)
    return out


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every member's picklable ``value``, in mesh order: for set-up and checks, not for data."""
    if group.size == 1:
        return [value]
    out: list[Any] = [None] * group.size
    unknown = torch.empty(0)  # how much is sent differs between ranks, and is not counted
    _call("all_gather", group, unknown, 0, dist.all_gather_object, out, value, group.pg)
    return [out[i] for i in group.order]


# In the background --------------------------------------------------------------------------------
#
# Start such a collective on a group with a lane of its own (see new_group), and in the same order
# on all members. Its tensors may be neither read nor written until it has been waited for.


class Pending:
    """A collective under way. Holds its tensors; its result is there after ``wait``."""

    __slots__ = ("_after", "_error", "_group", "_held", "_kind", "_work")

    def __init__(self, kind: str, group: Group, work: Any, held: Any, after: Any = None) -> None:
        self._kind, self._group, self._work = kind, group, work
        self._held: Any = held
        self._after: Callable[[], Any] | None = after
        self._error: CommError | None = None

    def done(self) -> bool:
        """Would ``wait`` return, or raise, at once?"""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Return when the result is there. Raises CommError, each time, if the collective
        failed."""
        work, self._work = self._work, None
        if work is not None:
            after, self._after = self._after, None
            try:
                work.wait()
            except RuntimeError as error:
                self._error = _failed(self._kind, self._group, error)
                raise self._error from error
            if after is not None:
                after()
            self._held = None
        if self._error is not None:
            raise self._error


OVER = Pending("", Group((0,), 0, (), None), None, None)  # nothing was to be done


def _start(
    kind: str, group: Group, wire: Tensor, share: float, fn: Any, *args: Any, op: str = "",
    after: Callable[[], Any] | None = None,
) -> Pending:  # fmt: skip
    """Announce and start. The tensors are in ``args``."""
    if log.active or desync.enabled:
        _announce(kind, group, wire, share, op)
    try:
        return Pending(kind, group, fn(*args), args, after)
    except RuntimeError as error:
        raise _failed(kind, group, error) from error


def _startable(kind: str, x: Tensor, op: str = "") -> Tensor:
    """x, detached, if its memory can be sent (and with ``op`` reduced) as it is."""
    if not x.is_contiguous() or x.is_conj() or x.is_neg() or (op and x.dtype not in _NATIVE):
        raise CommError(
            f"{kind} in the background sends memory as it is: contiguous, and for a reduction of a "
            f"dtype that every backend reduces, not {x.dtype} of strides {x.stride()}. Make it so "
            "first: x.contiguous(), x.to(...)"
        )
    if op == "avg" and not x.dtype.is_floating_point:
        raise CommError(
            f"the average of {x.dtype} values is not {x.dtype}: reduce with 'sum' and divide"
        )
    return x.detach() if x.requires_grad else x


def _fits(kind: str, small: Tensor, large: Tensor, n: int) -> None:
    if small.numel() * n != large.numel() or small.dtype != large.dtype:
        raise CommError(
            f"{kind} over {n} ranks: {large.dtype} of {large.numel()} elements is not {n} times "
            f"{small.dtype} of {small.numel()}"
        )


def start_all_reduce(x: Tensor, op: str, group: Group) -> Pending:
    """``all_reduce`` in place: after ``wait``, x holds the elementwise ``op`` over all members."""
    n, x = group.size, _startable("all_reduce", x, op)
    if n == 1:
        return OVER
    native, before, after = _scaled(op, x, group)
    if before != 1:
        x.mul_(before)
    return _start(
        "all_reduce", group, x, 2 * (n - 1) / n, _PG.allreduce, group.pg, [x],
        _START_REDUCE[native],
        op=op, after=(lambda: x.div_(1 / after)) if after != 1 else None,
    )  # fmt: skip


def start_all_gather(x: Tensor, out: Tensor, group: Group) -> Pending:
    """``all_gather`` of x into ``out`` ([n * len(x)] or [n, len(x)]), in mesh order."""
    n, x, out = group.size, _startable("all_gather", x), _startable("all_gather", out)
    _fits("all_gather", x, out, n)
    if n == 1:
        out.view(-1).copy_(x.view(-1))
        return OVER
    after = None
    if not group.straight:
        rows = out.view(n, -1)
        after = lambda: rows.copy_(rows[list(group.order)])  # noqa: E731
    wire, target = _bytes(x).view(-1), _bytes(out).view(-1)
    return _start(
        "all_gather", group, x, n - 1, _gather, group.pg, target, wire, _START_GATHER, after=after
    )


def _add_up(rows: Tensor, out: Tensor, op: str, order: Sequence[int]) -> None:
    """What is left of a reduce-scatter when everybody's part has come: one order for all ranks, and
    wide sums of narrow numbers. gloo's own one works in the calling thread, at two to three times
    the cost."""
    first, *rest = order
    if out.dtype in (torch.float16, torch.bfloat16):
        total = rows[first].float()
    else:
        total = torch.add(rows[first], rows[rest.pop(0)], out=out)
    for i in rest:
        total.add_(rows[i])
    if op == "avg":
        total.div_(len(order))
    if total is not out:
        out.copy_(total)


def start_reduce_scatter(x: Tensor, out: Tensor, op: str, group: Group) -> Pending:
    """``reduce_scatter`` into ``out``: the ``op`` over all members of part i (of n equal ones) of
    their x on member i."""
    n, x = group.size, _startable("reduce_scatter", x, op)
    out = _startable("reduce_scatter", out, op)
    _fits("reduce_scatter", out, x, n)
    if n == 1:
        out.view(-1).copy_(x.view(-1))
        return OVER
    wire = x.view(-1)
    if not group.straight:
        wire = x.view(n, -1)[[group.order.index(i) for i in range(n)]].view(-1)
    if op in ("sum", "avg") and backend_of(group.pg, x.device).name() == "gloo":
        rows = torch.empty_like(wire)
        return _start(
            "reduce_scatter", group, x, (n - 1) / n, _exchange, group.pg, rows, wire, [], [],
            _START_EXCHANGE, op=op,
            after=lambda: _add_up(rows.view(n, -1), out.view(-1), op, group.order),
        )  # fmt: skip
    native, before, after = _scaled(op, x, group)
    if before != 1:
        wire = wire * before
    return _start(
        "reduce_scatter", group, x, (n - 1) / n, _scatter_sum, group.pg, out.view(-1), wire,
        _START_REDUCE_SCATTER[native], op=op,
        after=(lambda: out.div_(1 / after)) if after != 1 else None,
    )  # fmt: skip
