"""Point-to-point messages from one rank of the world to another.

Messages use the default process group, or on NCCL the groups of ``directions``; only the sender and
the receiver take part. ``send`` returns before delivery. ``receive`` posts the receive, and
``ReceiveWork.wait`` waits for it. So the two ranks do not synchronize; only the first transfer of a
pair on NCCL does, to create its groups. Messages of one pair of ranks with one tag arrive in the
order in which they were sent.

Note on tags. Every rank of the world calls ``next_tag`` once for every transfer of the program,
even if it takes no part, so all ranks agree. The backward of a transfer uses ``tag + 1``. A
*channel* has its own numbering of transfers: ranks may run micro-batches in different orders, so
each micro-batch has its own channel.

Note on NCCL. NCCL has no tags: messages from one rank to another match by the order in which both
post them, so both must run the micro-batches in the same order.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from disttensor.comm import directions, failures, log
from disttensor.comm.letter import WireMessage, copied, sized
from disttensor.comm.mismatch import PendingReceive, Sending
from disttensor.comm.outbox import OUTBOX, check_delivered, failed
from disttensor.comm.outbox import flush as flush
from disttensor.comm.process_group import is_fake, world
from disttensor.comm.wire import as_bytes
from disttensor.comm.work import Work
from disttensor.errors import MismatchError, user_line
from disttensor.observe import observers
from disttensor.runtime import Runtime, current_runtime, last_runtime

Tensor = torch.Tensor

CHANNELS = 1 << 10
_TRANSFERS = 1 << 13  # of one channel, before its tags repeat
Receive = tuple[int, Sequence[int]]  # source rank, shape
Early = tuple[int, int, int]  # a receive posted in advance: source, tag, bytes

_OURS = 1 << 30  # set in all our tags, so that small tags stay free for the user; sizes are below


# Tags ------------------------------------------------------------------------------------------

CHANNEL: ContextVar[int] = ContextVar("channel", default=0)


class channel:
    """``with channel(3):`` numbers the transfers of this thread separately. 0 is the default."""

    __slots__ = ("_number", "_token")

    def __init__(self, number: int) -> None:
        if not 0 <= number < CHANNELS:
            raise ValueError(f"p2p.channel({number}): channels are numbered 0 to {CHANNELS - 1}")
        self._number = number

    def __enter__(self) -> None:
        self._token = CHANNEL.set(self._number)

    def __exit__(self, *exc: object) -> None:
        CHANNEL.reset(self._token)


def next_tag() -> int:
    """Returns the tag of the next transfer: even, positive, the same on ranks with equal counts."""
    tags = current_runtime().tags
    number = CHANNEL.get()
    count = tags.get(number, 0)
    tags[number] = count + 1
    return _OURS | number << 14 | count % _TRANSFERS << 1


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
            f"pipeline.run: runs of {retired} micro-batches have failed, so {free} of the "
            f"{CHANNELS - 1} numbers for their messages are left, and {count} are needed: start "
            "the processes again, or call destroy_process_group and init_process_group"
        )
    return [1 + retired + i % free for i in range(count)]


def retire_channels(count: int) -> None:
    """Retires the channels of ``count`` micro-batches, some of which failed. Ranks were not all at
    the same transfer, so messages of these channels may never be received: they are not used
    again."""
    current_runtime().retired += min(count, CHANNELS - 1)


def moved_tag(tag: int, before: tuple[int, int], after: tuple[int, int]) -> int:
    """Returns the tag of the same transfer in another channel. ``before`` and ``after``: a channel,
    and its number of transfers when the program began. A tag of a third channel is returned
    unchanged."""
    (channel, count), (other, later) = before, after
    if not tag & _OURS or tag >> 14 & CHANNELS - 1 != channel:
        return tag
    nth = (tag >> 1) - count + later
    return tag & ~(CHANNELS - 1 << 14 | _TRANSFERS - 1 << 1) | other << 14 | nth % _TRANSFERS << 1


# Messages --------------------------------------------------------------------------------------


class _Receiving(NamedTuple):
    """A message to this rank, as text for errors: formatted only after a failure."""

    rank: int
    peer: int
    label: object

    def __str__(self) -> str:
        return f"rank {self.rank} receives from rank {self.peer}: {self.label}"


_abandons: ContextVar[bool] = ContextVar("abandons", default=False)


@contextlib.contextmanager
def abandoning() -> Iterator[None]:
    """Within the block, a ReceiveWork that is destroyed is not waited for: its sender has failed,
    so the message may never arrive. Its buffer is kept until the process group is destroyed."""
    token = _abandons.set(True)
    try:
        yield
    finally:
        _abandons.reset(token)


class ReceiveWork(Work[Tensor]):
    """A message that is on its way to this rank. ``wait`` raises CommError if the sender is gone or
    sends nothing in time, and MismatchError if a message of another size was sent."""

    __slots__ = ("_posted",)

    def __init__(self, works: Sequence[Any], out: Tensor, what: object) -> None:
        def finish() -> Tensor:
            try:
                for work in works:
                    work.wait()
            except MismatchError as error:
                raise MismatchError(f"{what}: {error}") from None
            except RuntimeError as error:
                raise failed(what, error) from error
            return out

        super().__init__(finish, lambda: all(work.is_completed() for work in works))
        self._posted = works, out, what

    def __del__(self) -> None:  # never waited for: the sender must complete
        if self._finish is not None and not sys.is_finalizing():
            works, out, what = self._posted
            if _abandons.get():
                last_runtime().abandoned.append(self._posted)
                return
            for work in works:
                OUTBOX.put(work, out, what)


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
    now = failures.watch()
    if now.undelivered is not None:
        raise now.undelivered
    if observers:
        me = world()[0]
        for to, x in sends:
            log.record("send", (f"{me} -> {to}",), x.nbytes, (x.numel(),), x.dtype)
        for o in observers:
            o.transfer(label, [me] * bool(sends) + [source for source, _ in receives])
    try:
        if _by_letters(now, device):
            messages = [_awaited(now, each, dtype, tag, label) for each in receives]
            if sends:
                _post_letters(now, sends, tag, label)
            return messages
        return _post_batches(sends, receives, dtype, device, tag, label)
    except RuntimeError as error:
        OUTBOX.flush(10.0)  # gives the error of an earlier message time to be recorded
        check_delivered()
        me, peers = world()[0], sorted({r for r, _ in (*sends, *receives)})
        what = f"rank {me} exchanges messages with ranks {peers}: {label}"
        raise failed(what, error) from error


def _by_letters(now: Runtime, device: torch.device) -> bool:
    fake = is_fake() if now.is_fake is None else now.is_fake
    return device.type == "cpu" and not fake and not directions.needed(device)


# Over gloo: every message separately, in any dtype. Receives are posted first.


def post_early_receives(
    receives: Sequence[Receive], dtype: torch.dtype, device: torch.device, tag: int
) -> list[Early]:
    """Posts the receives of a transfer that this rank has not reached yet; the ``transfer`` with
    this tag takes them over. Returns their keys: none if messages match by order only."""
    now = current_runtime()
    if not _by_letters(now, device):
        return []
    keys = [(source, tag, math.prod(shape) * dtype.itemsize) for source, shape in receives]
    for key, (source, shape) in zip(keys, receives, strict=True):
        if key not in now.early:
            now.early[key] = _asked(now, source, shape, dtype, tag)
    return keys


def is_unclaimed(keys: Iterable[Early]) -> bool:
    """Returns True if any of these early receives has not been taken over by its transfer."""
    return not current_runtime().early.keys().isdisjoint(keys)


def _awaited(
    now: Runtime, receive: Receive, dtype: torch.dtype, tag: int, label: object
) -> ReceiveWork:
    source, shape = receive
    awaited: PendingReceive | None = None
    if now.early:
        awaited = now.early.pop((source, tag, math.prod(shape) * dtype.itemsize), None)
    if awaited is None:
        awaited = _asked(now, source, shape, dtype, tag)
    content = awaited.letter.content
    if content.dtype != dtype or content.shape != shape:  # posted early for another shape
        content = as_bytes(content).view(dtype).view(shape)
    return ReceiveWork([awaited], content, _Receiving(now.default.rank(), source, label))


def _asked(
    now: Runtime, source: int, shape: Sequence[int], dtype: torch.dtype, tag: int
) -> PendingReceive:
    letter = WireMessage.awaited(shape, dtype)
    work = now.default.recv([letter.wire], source, sized(tag, letter.nbytes))
    return PendingReceive(work, letter, source, tag)


def _post_letters(
    now: Runtime, sends: Sequence[tuple[int, Tensor]], tag: int, label: object
) -> None:
    me, line = now.default.rank(), user_line()[-100:]
    letters: dict[int, WireMessage] = {}
    for to, x in sends:
        letter = letters.get(id(x)) or letters.setdefault(id(x), WireMessage.of(x))
        work = now.default.send([letter.wire], to, sized(tag, letter.nbytes))
        OUTBOX.put(work, letter.wire, Sending(me, to, label, tag, letter.nbytes, line))


# Over other backends and a fake group ------------------------------------------------------------


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
    me, apart = world()[0], directions.needed(device)
    if apart:
        directions.meet([rank for rank, _ in (*sends, *receives)])
    outs = [torch.empty(shape, dtype=dtype, device=device) for _, shape in receives]
    given = {id(x): x for _, x in sends}  # one copy for all receivers
    copies = {key: copied(x) for key, x in given.items()}
    raw = {key: as_bytes(copy) for key, copy in copies.items()}
    posts: list[tuple[Any, Tensor, int, Any]] = [
        (dist.irecv, as_bytes(out), r, directions.group(r, me) if apart else None)
        for (r, _), out in zip(receives, outs, strict=True)
    ]
    posts += [
        (dist.isend, raw[id(x)], r, directions.group(me, r) if apart else None) for r, x in sends
    ]
    works: list[Any] = [None] * len(posts)
    for group in dict.fromkeys(group for *_, group in posts):
        places = [i for i, post in enumerate(posts) if post[-1] is group]
        made = dist.batch_isend_irecv([dist.P2POp(*posts[i], tag=tag) for i in places])
        for nth, i in enumerate(places):  # or a single Work for all
            works[i] = made[nth if len(made) == len(places) else -1]
    for (to, x), work in zip(sends, works[len(receives) :], strict=True):
        OUTBOX.put(work, copies[id(x)], Sending(me, to, label, tag, x.nbytes, ""))
    return [
        ReceiveWork([work], out, _Receiving(me, r, label))
        for (r, _), out, work in zip(receives, outs, works, strict=False)
    ]
