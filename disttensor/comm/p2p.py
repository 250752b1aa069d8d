"""Point-to-point messages from one rank of the world to another.

They go over the default process group, and nobody else takes part (``directions`` says where over
others). Sending returns at once, and
receiving is posted now and waited for later, so ranks need not meet. Messages of one pair of ranks
with one tag arrive in the order in which they were sent.

Note on tags. Every rank of the world calls ``next_tag`` once for every transfer of the program,
takes part or not, so all agree. The backward of a transfer uses ``tag + 1``. A *channel* numbers
transfers on its own: micro-batches, which ranks may take in different order, have one each.

Note on NCCL. It knows no tags: messages from one rank to another match by the order in which both
post them, so there both must take micro-batches in one order.
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
from disttensor.runtime import Runtime, current_runtime, last_runtime

Tensor = torch.Tensor

CHANNELS = 1 << 10
_TRANSFERS = 1 << 13  # of one channel, before tags are used again
Receive = tuple[int, Sequence[int]]  # from which rank, in which shape
Early = tuple[int, int, int]  # a message that is asked for ahead: source, tag, bytes

_OURS = 1 << 30  # set in all our tags: a program's own small tags stay free; sizes are below


# Tags ------------------------------------------------------------------------------------------

CHANNEL: ContextVar[int] = ContextVar("channel", default=0)


class channel:
    """``with channel(3):`` transfers of this thread are numbered on their own. 0 is everybody's."""

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
    """The tag of the next transfer: even and positive, the same on all ranks that count alike."""
    tags = current_runtime().tags
    number = CHANNEL.get()
    count = tags.get(number, 0)
    tags[number] = count + 1
    return _OURS | number << 14 | count % _TRANSFERS << 1


def transfers(channel: int) -> int:
    """How many transfers a channel has had."""
    return current_runtime().tags.get(channel, 0)


def channels(count: int) -> list[int]:
    """The channels of so many micro-batches. Raises RuntimeError if failed runs used up all."""
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
    """Some of as many micro-batches have failed. Ranks were not all at the same transfer, and
    messages of these channels may not have been received: they are not used again."""
    current_runtime().retired += min(count, CHANNELS - 1)


def moved_tag(tag: int, before: tuple[int, int], after: tuple[int, int]) -> int:
    """The tag of the same transfer in another channel: ``before`` and ``after`` are a channel and
    how many transfers it has had when that program began. A tag of yet another channel stays."""
    (channel, count), (other, later) = before, after
    if not tag & _OURS or tag >> 14 & CHANNELS - 1 != channel:
        return tag
    nth = (tag >> 1) - count + later
    return tag & ~(CHANNELS - 1 << 14 | _TRANSFERS - 1 << 1) | other << 14 | nth % _TRANSFERS << 1


# Messages --------------------------------------------------------------------------------------


class _Receiving(NamedTuple):
    """A message to this rank, for people: put into words only where it failed."""

    rank: int
    peer: int
    label: object

    def __str__(self) -> str:
        return f"rank {self.rank} receives from rank {self.peer}: {self.label}"


_abandons: ContextVar[bool] = ContextVar("abandons", default=False)


@contextlib.contextmanager
def abandoning() -> Iterator[None]:
    """A Message that is dropped in here may never come, as the program that was to send it has
    failed: its buffer is kept as long as the world, and nobody waits for it."""
    token = _abandons.set(True)
    try:
        yield
    finally:
        _abandons.reset(token)


class ReceiveWork(Work[Tensor]):
    """A message that is on its way to this rank; ``wait`` raises CommError if the sender is gone or
    sends nothing in time, MismatchError where it sends another size."""

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

    def __del__(self) -> None:  # nobody wants it, but the sender must get rid of it
        if self._finish is not None and not sys.is_finalizing():
            works, out, what = self._posted
            if _abandons.get():
                last_runtime().abandoned.append(self._posted)
                return
            for work in works:
                OUTBOX.put(work, out, what)


def send(x: Tensor, to: int | Sequence[int], tag: int, label: object = "") -> None:
    """A copy of ``x`` goes to the global rank ``to``, or to each of several. Returns at once; x may
    be changed after."""
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
    """Ask for the tensor that the global rank ``source`` sends with this tag; wait for it later."""
    return transfer([], [(source, shape)], dtype, device, tag, label)[0]


def transfer(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[Receive],
    dtype: torch.dtype,
    device: torch.device,
    tag: int,
    label: object = "",
) -> list[ReceiveWork]:
    """All messages of one transfer: ``(to, tensor)`` go out, ``(source, shape)`` come in.

    Gives a Message per receive. The tensors may be changed after. ``label``, of which ``str`` is
    taken only then, says in errors what was moved. Raises CommError, for an earlier message of this
    rank too that could not be delivered.
    """
    now = failures.watch()
    if now.undelivered is not None:
        raise now.undelivered
    if log.active:
        me = world()[0]
        for to, x in sends:
            log.record("send", (f"{me} -> {to}",), x.nbytes, (x.numel(),), x.dtype)
        for each in log.active:
            each.transfer(label, [me] * bool(sends) + [source for source, _ in receives])
    try:
        if _by_letters(now, device):
            messages = [_awaited(now, each, dtype, tag, label) for each in receives]
            if sends:
                _post_letters(now, sends, tag, label)
            return messages
        return _post_batches(sends, receives, dtype, device, tag, label)
    except RuntimeError as error:
        OUTBOX.flush(10.0)  # an earlier message that failed is being put into words
        check_delivered()
        me, peers = world()[0], sorted({r for r, _ in (*sends, *receives)})
        what = f"rank {me} exchanges messages with ranks {peers}: {label}"
        raise failed(what, error) from error


def _by_letters(now: Runtime, device: torch.device) -> bool:
    fake = is_fake() if now.is_fake is None else now.is_fake
    return device.type == "cpu" and not fake and not directions.needed(device)


# Over gloo: every message on its own, in any dtype. What comes is asked for first.


def expect(
    receives: Sequence[Receive], dtype: torch.dtype, device: torch.device, tag: int
) -> list[Early]:
    """Ask for what a transfer brings that this rank has not come to yet: it waits for the
    ``transfer`` with this tag. Gives what was asked for: nothing where messages match by their
    order.
    """
    now = current_runtime()
    if not _by_letters(now, device):
        return []
    keys = [(source, tag, math.prod(shape) * dtype.itemsize) for source, shape in receives]
    for key, (source, shape) in zip(keys, receives, strict=True):
        if key not in now.early:
            now.early[key] = _asked(now, source, shape, dtype, tag)
    return keys


def in_vain(keys: Iterable[Early]) -> bool:
    """Was something of this expected, and has not been waited for?"""
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
    if content.dtype != dtype or content.shape != shape:  # it was expected to be another one
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


# Over others, and a fake process group ------------------------------------------------------------


def _post_batches(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[Receive],
    dtype: torch.dtype,
    device: torch.device,
    tag: int,
    label: object,
) -> list[ReceiveWork]:
    """The messages of a transfer in one communicator as one batch, or two ranks could wait for each
    other."""
    me, apart = world()[0], directions.needed(device)
    if apart:
        directions.meet([rank for rank, _ in (*sends, *receives)])
    outs = [torch.empty(shape, dtype=dtype, device=device) for _, shape in receives]
    given = {id(x): x for _, x in sends}  # one copy for all who get it
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
        for nth, i in enumerate(places):  # or one Work for all
            works[i] = made[nth if len(made) == len(places) else -1]
    for (to, x), work in zip(sends, works[len(receives) :], strict=True):
        OUTBOX.put(work, copies[id(x)], Sending(me, to, label, tag, x.nbytes, ""))
    return [
        ReceiveWork([work], out, _Receiving(me, r, label))
        for (r, _), out, work in zip(receives, outs, works, strict=False)
    ]
