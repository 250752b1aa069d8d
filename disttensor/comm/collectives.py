"""Collectives: all calls of torch.distributed except messages (``p2p``) and objects (``objects``).

All take and return regular tensors, and take a ``Group``. Members are numbered in *mesh order* (the
order of ``Group.ranks``), whatever order the backend uses. Groups of one rank return at once. Each
call can be recorded (``record_comms``) and, in debug mode, is first compared between ranks.

With ``async_op`` a collective returns a Work, whose ``wait`` returns the result; ``start_async`` is
the same with types. Start asynchronous collectives on a group of their own purpose (see
``new_group``), in the same order on all members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from disttensor.comm import buffers, compare_collectives, wire
from disttensor.comm.collective_call import call_error, call_options, run, start, wait
from disttensor.comm.groups import Group
from disttensor.comm.process_group import backend_name
from disttensor.comm.work import Work, finished
from disttensor.errors import MismatchError
from disttensor.observe import observers
from disttensor.torch_private import all_gather_single, all_to_all_single, reduce_scatter_single

Tensor = torch.Tensor
P = ParamSpec("P")
T = TypeVar("T")


def start_async(collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Work[T]:
    """Starts a collective of this module, and returns its Work."""
    begin: Any = collective
    return begin(*args, async_op=True, **kwargs)


def _decode_sum(total: Tensor, decode: Any, into: Tensor | None, after: float = 1.0) -> Tensor:
    """Multiplies a sum by ``after`` and decodes it. ``into``: the result, if it is known before."""
    if after != 1:
        total.div_(1 / after)
    return decode(total) if into is None else into


def _target(total: Tensor, decode: Any, x: Tensor) -> Tensor | None:
    """Returns the tensor that ``total`` is decoded to if both share memory."""
    if decode is None:
        return total
    return decode(total) if x.dtype.is_complex else None


def _complete(result: Any, async_op: bool) -> Any:
    """Returns the result in a group of one rank."""
    return finished(result) if async_op else result


def all_reduce(
    x: Tensor, op: str, group: Group, *, inplace: bool = False, async_op: bool = False
) -> Tensor:
    """Reduces x elementwise with ``op`` over all members: to a new tensor, or ``inplace``. In a
    group of one rank the result shares the memory of x."""
    n = len(group.ranks)
    seen = observers or compare_collectives.enabled
    if op == "sum" and x.dtype in wire.SUMMED and n > 1 and not (inplace or async_op or seen):
        return _sum(x, group)
    x = wire.check_memory("all_reduce", x, op) if inplace else x
    if n == 1:
        return _complete(x.detach(), async_op)
    buffer, decode = wire.encode_memory(x) if inplace else wire.encode(x, op)
    native, before, after = wire.scale_factors(op, buffer, group)
    if not inplace and (decode is None or x.dtype.is_complex):  # not a copy yet
        buffer = buffer.clone() if before == 1 else buffer * before
    elif before != 1:
        buffer.mul_(before)
    into = _target(buffer, decode, x)
    finish = partial(_decode_sum, buffer, decode, into, after)
    args = group.pg, [buffer], call_options("AllreduceOptions", async_op, native)
    go: Any = partial(start, into=into) if async_op else run
    return go("all_reduce", group, buffer, 2 * (n - 1) / n, _allreduce, args, finish, op)


_allreduce = dist.ProcessGroup.allreduce
_dense = torch.contiguous_format


def _sum(x: Tensor, group: Group) -> Tensor:
    """Sums x of a dtype that needs no encoding: most all-reduces. The copy is dense, as from
    ``wire.dense``."""
    if x.requires_grad and torch.is_grad_enabled():
        x = x.detach()
    total = x.clone(memory_format=_dense)
    try:
        work = _allreduce(group.pg, [total], call_options("AllreduceOptions", False, "sum"))
        group.started[0] += 1
        if work is not None:
            wait(work, group, total, "all_reduce", group.started[0])
    except MismatchError:
        raise
    except (RuntimeError, TypeError) as error:
        raise call_error("all_reduce", group, error) from error
    return total


def all_gather(
    x: Tensor, group: Group, shape: Sequence[int] | None = None, *, out: Tensor | None = None,
    async_op: bool = False, custom: Any = None,
) -> Tensor:  # fmt: skip
    """Returns each member's x in mesh order: [n, *x.shape], or viewed as ``shape``, or in ``out``.
    All members have the same shape. ``custom``: runs instead, with the arguments of ``AllGather``
    of torch.distributed.fsdp."""
    n = group.size
    if out is not None:
        x, out = wire.check_memory("all_gather", x), wire.check_memory("all_gather", out)
        wire.check_sizes("all_gather", x, out, n)
    x = wire.dense(x)
    shape = (n, *x.shape) if shape is None else shape
    if n == 1:
        joined = x.view(shape) if out is None else out.copy_(x.view(out.shape))
        return _complete(joined, async_op)
    whole = x.new_empty(shape) if out is None else out

    def finish() -> Tensor:
        if not group.in_rank_order:
            rows = whole.view(n, -1)
            rows.copy_(group.to_members(rows))
        return whole

    one, all_ = wire.match_shapes(wire.sendable(x), wire.sendable(whole))
    fn: Any = all_gather_single
    args: tuple[Any, ...] = group.pg, all_, one, call_options("AllgatherOptions", async_op)
    if custom is not None:
        fn, args = custom, (all_, one, group.pg, async_op)
    go: Any = partial(start, into=whole) if async_op else run
    return go("all_gather", group, x, n - 1, fn, args, finish)


def reduce_scatter(
    x: Tensor, op: str, group: Group, shape: Sequence[int] | None = None, *,
    out: Tensor | None = None, async_op: bool = False, custom: Any = None,
) -> Tensor:  # fmt: skip
    """Reduces [n, *s] to [*s]: member i gets the ``op`` over all members' x[i].

    ``shape``, or the shape of ``out``, replaces s; x is then any tensor whose n equal parts in
    memory are the pieces. ``custom``: runs instead, with the arguments of ``ReduceScatter`` of
    torch.distributed.fsdp.
    """
    n = group.size
    if out is not None:
        x, out = (wire.check_memory("reduce_scatter", t, op) for t in (x, out))
        wire.check_sizes("reduce_scatter", out, x, n)
        shape = out.shape
    shape = x.shape[1:] if shape is None else shape
    if n == 1:
        part = x.detach().reshape(shape)
        return _complete(part if out is None else out.copy_(part), async_op)
    buffer, decode = wire.encode(x, op) if out is None else wire.encode_memory(x)
    if not group.in_rank_order:
        buffer = group.to_backend(buffer.reshape(n, -1))
    if out is None:
        total = buffer.new_empty((*shape, 2) if x.dtype.is_complex else shape)
    else:
        total = wire.encode_memory(out)[0]
    share = (n - 1) / n
    into = _target(total, decode, x)
    is_gloo = custom is None and backend_name(group.pg, x.device) == "gloo"
    if async_op and op in ("sum", "avg") and is_gloo:
        # gloo's own runs in the calling thread, and costs two to three times an exchange.
        rows = buffers.empty(buffer.numel(), buffer.dtype, buffer.device).view(n, -1)
        fn: Any = all_to_all_single
        options = call_options("AllToAllOptions", True)
        args: tuple[Any, ...] = (group.pg, rows.view(-1), buffer.view(-1), [], [], options)

        def finish() -> Tensor:
            wire.add_up(group.to_members(list(rows)), total.view(-1), op)
            return _decode_sum(total, decode, into)

    else:
        native, before, after = wire.scale_factors(op, buffer, group)
        if before != 1:
            buffer = buffer * before
        fn, options = reduce_scatter_single, call_options("ReduceScatterOptions", async_op, native)
        args = group.pg, *wire.match_shapes(total, buffer), options
        if custom is not None:
            fn, args = custom, (*args[1:3], group.pg, options.reduceOp, async_op)
        finish = partial(_decode_sum, total, decode, into, after)
    go: Any = partial(start, into=into) if async_op else run
    return go("reduce_scatter", group, buffer, share, fn, args, finish, op)


def all_to_all(
    pieces: Sequence[Tensor], numels: Sequence[int], group: Group, *, async_op: bool = False
) -> list[Tensor]:
    """Sends ``pieces[i]`` to member i. Returns the pieces received from each member, flat, of
    ``numels[i]`` elements."""
    full = [p for p in pieces if p.numel()]
    flat = full[0].reshape(-1) if len(full) == 1 else torch.cat([p.reshape(-1) for p in pieces])
    sent = [p.numel() for p in pieces]
    return _exchange(flat, sent, numels, group, lambda out: list(out.split(list(numels))), async_op)


def all_to_all_rows(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, *, async_op: bool = False
) -> Tensor:
    """Exchanges rows, [sum(sent), *s] to [sum(received), *s]: the first ``sent[0]`` rows go to
    member 0, and so on; ``received[i]`` rows come from member i, in order. Both empty: equal
    numbers."""
    return _exchange(x, sent, received, group, lambda out: out, async_op)


def _exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group,
    finish: Callable[[Tensor], T], async_op: bool,
) -> Any:  # fmt: skip
    """Exchanges rows as ``all_to_all_rows``, and returns ``finish`` of the result."""
    x, n = wire.dense(x), group.size
    if n == 1:
        return _complete(finish(x), async_op)
    share = 1 - sent[group.index] / max(1, sum(sent)) if sent else (n - 1) / n
    if not group.in_rank_order:
        x = torch.cat(group.to_backend(x.split(list(sent) or len(x) // n)))
        sent, received = (group.to_backend(sizes) if sizes else () for sizes in (sent, received))
    out = x.new_empty((sum(received), *x.shape[1:])) if received else torch.empty_like(x)

    def end() -> T:
        if group.in_rank_order:
            return finish(out)
        return finish(torch.cat(group.to_members(out.split(list(received) or len(x) // n))))

    given, target = wire.sendable(x), wire.sendable(out)
    scale = 1 if given is x else x.itemsize * math.prod(x.shape[1:])
    sizes = [n * scale for n in received], [n * scale for n in sent]
    args = group.pg, target, given, *sizes, call_options("AllToAllOptions", async_op)
    go: Any = start if async_op else run
    return go("all_to_all", group, x, share, all_to_all_single, args, end)


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """Returns the x of member ``src``; on the other members x gives the shape and dtype."""
    if group.size == 1:
        return x.detach()
    mine = group.index == src
    if mine:
        buffer = wire.dense(x).clone()
    else:
        buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
    args = wire.sendable(buffer), group.ranks[src], group.pg
    return run("broadcast", group, buffer, float(mine), dist.broadcast, args, lambda: buffer)
