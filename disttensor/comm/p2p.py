"""Point-to-point messages from one rank of the world to another.

Messages use the default process group, or on NCCL the groups of ``directions``; only the sender and
the receiver take part. ``send`` returns before delivery. ``receive`` posts the receive, and
``ReceiveWork.wait`` waits for it. So the two ranks do not synchronize; only the first transfer of a
pair on NCCL does, to create its groups. Messages of one pair of ranks with one tag arrive in the
order in which they were sent.

Note on tags. Every rank of the world calls ``next_tag`` once for every transfer of the program,
even if it takes no part, so all ranks agree. The backward of a transfer uses ``tag ^ 1``, so the
backward of a backward uses ``tag`` again. A *channel* has its own numbering of transfers: ranks may
run micro-batches in different orders, so each micro-batch has its own channel.

Note on NCCL. NCCL has no tags: messages from one rank to another match by the order in which both
post them, so both must run the micro-batches in the same order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from disttensor.callbacks import set_during
from disttensor.comm import directions, failure_watch, log, send_queue
from disttensor.comm.messages import (
    PendingReceive,
    PostedMessage,
    WireMessage,
    size_class,
    tag_with_size,
)
from disttensor.comm.process_group import backend_name, is_fake, world
from disttensor.comm.send_queue import check_delivered, failed
from disttensor.comm.send_queue import flush as flush
from disttensor.comm.wire import as_bytes, dense
from disttensor.comm.work import Work
from disttensor.errors import MismatchError, user_line
from disttensor.observe import observers
from disttensor.runtime import Runtime, current_runtime, last_runtime

Tensor = torch.Tensor

CHANNELS = 1 << 10
_CHANNEL_AT = 12  # the bits of a channel in a tag, up to messages.SIZES_AT
_TRANSFERS = 1 << _CHANNEL_AT - 1  # of one channel, before its tags repeat
Receive = tuple[int, Sequence[int]]  # source rank, shape
Early = tuple[int, int, int]  # a receive posted in advance: source, tag, class of its size

_OURS = 1 << 30  # set in all our tags, so that small tags stay free for the user; sizes are below


# Tags ------------------------------------------------------------------------------------------

CHANNEL: ContextVar[int] = ContextVar("channel", default=0)


def channel(number: int) -> AbstractContextManager[None]:
    """Numbers the transfers of this thread within the block separately. 0 is the default."""
    if not 0 <= number < CHANNELS:
        raise ValueError(f"p2p.channel({number}): channels are numbered 0 to {CHANNELS - 1}")
    return set_during(CHANNEL, number)


def next_tag() -> int:
    """Returns the tag of the next transfer: even, positive, the same on ranks with equal counts."""
    tags = current_runtime().tags
    number = CHANNEL.get()
    count = tags.get(number, 0)
    tags[number] = count + 1
    return _OURS | number << _CHANNEL_AT | count % _TRANSFERS << 1


def transfers(channel: int) -> int:
    """Returns the number of transfers that a channel has had."""
    return current_runtime().tags.get(channel, 0)


def channels(count: int) -> list[int]:
    """Returns a channel for each of ``count`` micro-batches; with many, channels repeat. Raises
    RuntimeError if failed runs have left fewer."""
    retired = current_runtime().retired
    free = CHANNELS - 1 - retired
    if retired and count > free:
        raise RuntimeError(
            f"pipeline.run: failed runs have used up {retired} of {CHANNELS - 1} channels for the "
            f"messages of micro-batches; {free} are left, and this run needs {count}. Start the "
            "processes again, or call destroy_process_group and init_process_group"
        )
    return [1 + retired + i % free for i in range(count)]


def retire_channels(count: int) -> None:
    """Retires the channels of ``count`` micro-batches, some of which failed. Ranks were not all at
    the same transfer, so messages of these channels may never be received: they are not used
    again."""
    current_runtime().retired += min(count, CHANNELS - 1)


def tag_in_channel(tag: int, before: tuple[int, int], after: tuple[int, int]) -> int:
    """Returns the tag of the same transfer in another channel. ``before`` and ``after``: a channel,
    and its number of transfers when the program began. A tag of a third channel is returned
    unchanged."""
    (channel, count), (other, later) = before, after
    if not tag & _OURS or tag >> _CHANNEL_AT & CHANNELS - 1 != channel:
        return tag
    nth = (tag >> 1) - count + later
    kept = tag & ~(CHANNELS - 1 << _CHANNEL_AT | _TRANSFERS - 1 << 1)
    return kept | other << _CHANNEL_AT | nth % _TRANSFERS << 1


# Messages --------------------------------------------------------------------------------------


_abandons: ContextVar[bool] = ContextVar("abandons", default=False)


def abandon_receives() -> AbstractContextManager[None]:
    """Makes a ReceiveWork that is destroyed within the block not wait: its sender has failed, so
    the message may never arrive. Its buffer is kept until the process group is destroyed."""
    return set_during(_abandons, True)


class ReceiveWork(Work[Tensor]):
    """A message that is on its way to this rank. ``wait`` raises CommError if the sender is gone or
    sends nothing in time, and MismatchError if a message of another size was sent."""

    __slots__ = ("_posted",)

    def __init__(
        self, work: Any, out: Tensor, description: PostedMessage, device: torch.device
    ) -> None:
        def finish() -> Tensor:
            try:
                work.wait()
            except MismatchError as error:
                raise MismatchError(f"{description}: {error}") from None
            except RuntimeError as error:
                raise failed(description, error) from error
            return out.to(device)

        super().__init__(finish, work.is_completed)
        self._posted = work, out, description

    def __del__(self) -> None:  # never waited for: the sender must complete
        if self._finish is not None and not sys.is_finalizing():
            if _abandons.get():
                last_runtime().abandoned.append(self._posted)
            else:
                send_queue.QUEUE.put(*self._posted)


def send(x: Tensor, to: int | Sequence[int], tag: int, label: object = "") -> None:
    """Sends a copy of ``x`` to the global rank ``to``, or to several. x may change afterwards."""
    ranks = (to,) if isinstance(to, int) else to
    transfer([(rank, x) for rank in ranks], [], x.dtype, x.device, tag, label)


def receive(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    source: int,
    tag: int,
    label: object = "",
) -> ReceiveWork:
    """Posts a receive of the tensor that the global rank ``source`` sends with this tag."""
    return transfer([], [(source, shape)], dtype, device, tag, label)[0]


def transfer(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[Receive],
    dtype: torch.dtype,
    device: torch.device,
    tag: int,
    label: object = "",
) -> list[ReceiveWork]:
    """Posts all messages of a transfer: sends ``(to, tensor)``, receives ``(source, shape)``.

    Returns a ReceiveWork per receive. The tensors may be changed afterwards. ``label`` describes
    the transfer in errors, and is formatted only then. Raises CommError, also for an earlier
    message of this rank that could not be delivered.
    """
    now = failure_watch.watch()
    if now.undelivered is not None:
        raise now.undelivered
    if observers:
        me = world()[0]
        for to, x in sends:
            log.record("send", (f"{me} -> {to}",), x.nbytes, (x.numel(),), x.dtype)
        for o in observers:
            o.transfer(label, [me] * bool(sends) + [source for source, _ in receives])
    try:
        if _has_tags(device):
            works = [_receive(now, each, dtype, device, tag, label) for each in receives]
            if sends:
                _send(now, sends, tag, label)
            return works
        return _post_batches(sends, receives, dtype, device, tag, label)
    except RuntimeError as error:
        send_queue.QUEUE.flush(10.0)  # gives the error of an earlier message time to be recorded
        check_delivered()
        me, peers = world()[0], sorted({r for r, _ in (*sends, *receives)})
        what = f"rank {me} exchanges messages with ranks {peers}: {label}"
        raise failed(what, error) from error


# Over gloo: every message separately, in any dtype, through CPU memory: gloo ends the process if it
# is given other memory. Receives are posted first.


def _has_tags(device: torch.device) -> bool:
    if is_fake() or directions.needs_directions(device):
        return False
    return device.type == "cpu" or backend_name(current_runtime().default, device) == "gloo"


def post_early_receives(
    receives: Sequence[Receive], dtype: torch.dtype, device: torch.device, tag: int
) -> list[Early]:
    """Posts the receives of a transfer that this rank has not reached yet; the ``transfer`` with
    this tag takes them over. Returns their keys: none if messages match by order only."""
    now = current_runtime()
    if not _has_tags(device):
        return []
    keys = []
    for source, shape in receives:
        nbytes = math.prod(shape) * dtype.itemsize
        keys.append((source, tag, size_class(nbytes)))
        if keys[-1] not in now.early:
            now.early[keys[-1]] = _post_receive(now, source, tag, nbytes)
    return keys


def is_unclaimed(keys: Iterable[Early]) -> bool:
    """Returns True if any of these early receives has not been taken over by its transfer."""
    return not current_runtime().early.keys().isdisjoint(keys)


def _post_receive(now: Runtime, source: int, tag: int, nbytes: int) -> PendingReceive:
    message = WireMessage.to_receive(nbytes)
    work = now.default.recv([message.wire], source, tag_with_size(tag, nbytes))
    return PendingReceive(work, message, source, tag)


def _receive(
    now: Runtime, receive: Receive, dtype: torch.dtype, device: torch.device, tag: int,
    label: object,
) -> ReceiveWork:  # fmt: skip
    source, shape = receive
    nbytes = math.prod(shape) * dtype.itemsize
    pending = now.early.pop((source, tag, size_class(nbytes)), None)
    if pending is None:
        pending = _post_receive(now, source, tag, nbytes)
    pending.message.nbytes = nbytes  # an early receive takes each size of its class
    description = PostedMessage(now.default.rank(), "receives from", source, label)
    return ReceiveWork(pending, pending.message.content(shape, dtype), description, device)


def _send(now: Runtime, sends: Sequence[tuple[int, Tensor]], tag: int, label: object) -> None:
    me, line = now.default.rank(), user_line()[-100:]
    messages: dict[int, WireMessage] = {}  # one copy for all receivers
    for to, x in sends:
        message = messages.get(id(x)) or messages.setdefault(id(x), WireMessage.copy_of(x))
        work = now.default.send([message.wire], to, tag_with_size(tag, x.nbytes))
        description = PostedMessage(me, "sends to", to, label, tag, x.nbytes, line)
        send_queue.QUEUE.put(work, message.wire, description)


# Over other backends and a fake group ------------------------------------------------------------


def copy_dense(x: Tensor) -> Tensor:
    return dense(x.detach().clone(memory_format=torch.contiguous_format))


def _post_batches(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[Receive],
    dtype: torch.dtype,
    device: torch.device,
    tag: int,
    label: object,
) -> list[ReceiveWork]:
    """Posts the messages of a transfer in one batch per communicator: posted separately, two ranks
    could wait for each other."""
    me, default = world()[0], current_runtime().default
    group = directions.group if directions.needs_directions(device) else lambda *_: default
    if directions.needs_directions(device):
        directions.create_directions([rank for rank, _ in (*sends, *receives)])
    outs = [torch.empty(shape, dtype=dtype, device=device) for _, shape in receives]
    given = {id(x): x for _, x in sends}  # one copy for all receivers
    copies = {key: as_bytes(copy_dense(x)) for key, x in given.items()}
    posts: list[tuple[Any, Tensor, int, Any]] = [
        (dist.irecv, as_bytes(out), r, group(r, me))
        for (r, _), out in zip(receives, outs, strict=True)
    ]
    posts += [(dist.isend, copies[id(x)], r, group(me, r)) for r, x in sends]
    started: dict[Any, Iterator[Any]] = {}
    for each in dict.fromkeys(post[-1] for post in posts):
        batch = [dist.P2POp(*post, tag=tag) for post in posts if post[-1] is each]
        made = dist.batch_isend_irecv(batch)  # or a single Work for all
        started[each] = iter(made if len(made) == len(batch) else made[-1:] * len(batch))
    works = [next(started[post[-1]]) for post in posts]
    for (to, x), work in zip(sends, works[len(receives) :], strict=True):
        send_queue.QUEUE.put(work, copies[id(x)], PostedMessage(me, "sends to", to, label))
    return [
        ReceiveWork(work, out, PostedMessage(me, "receives from", r, label), device)
        for (r, _), out, work in zip(receives, outs, works, strict=False)
    ]
