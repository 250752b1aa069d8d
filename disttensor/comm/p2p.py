"""Point-to-point messages from one rank of the world to another.

They go over the default process group, and nobody else takes part. Sending returns at once, and
receiving is posted now and waited for later, so ranks need not meet. Messages of one pair of ranks
with one tag arrive in the order in which they were sent.

Note on tags. Every rank of the world calls ``next_tag`` once for every transfer of the program,
takes part or not, so all agree. The backward of a transfer uses ``tag + 1``. A *channel* numbers
transfers on its own: micro-batches, which ranks may take in different order, have one each.

Note on NCCL. It knows no tags: messages of a pair match by the order in which both ranks post them,
so there both must take micro-batches in one order. The messages of a transfer are one batch, and
the first ``next_tag`` is a barrier, because a batch of some ranks may not be the first thing in a
group.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from disttensor import runtime
from disttensor.comm import failures, log
from disttensor.comm.outbox import OUTBOX, check_delivered, failed
from disttensor.comm.outbox import flush as flush
from disttensor.comm.process_group import is_fake, is_nccl, world
from disttensor.comm.wire import as_bytes, dense
from disttensor.comm.work import Work
from disttensor.errors import MismatchError, user_line

Tensor = torch.Tensor

CHANNELS = 1 << 10
_TRANSFERS = 1 << 13  # of one channel, before tags are used again
_OURS = 1 << 30  # set in all our tags: a program's own small tags stay free
_SLIP = 1 << 29  # set in the tag of the slip that goes with a message
_SLIP_BYTES = 128


# Tags ------------------------------------------------------------------------------------------

_channel: ContextVar[int] = ContextVar("channel", default=0)


@contextlib.contextmanager
def channel(number: int) -> Iterator[None]:
    """``with channel(3):`` transfers of this thread are numbered on their own. 0 is everybody's."""
    if not 0 <= number < CHANNELS:
        raise ValueError(f"p2p.channel({number}): channels are numbered 0 to {CHANNELS - 1}")
    token = _channel.set(number)
    try:
        yield
    finally:
        _channel.reset(token)


def next_tag() -> int:
    """The tag of the next transfer: even and positive, the same on all ranks that count alike."""
    tags = runtime.current().tags
    if not tags:
        _meet()
    number = _channel.get()
    count = tags.get(number, 0)
    tags[number] = count + 1
    return _OURS | number << 14 | count % _TRANSFERS << 1


def moved_tag(tag: int, before: tuple[int, int], after: tuple[int, int]) -> int:
    """The tag of the same transfer in another channel: ``before`` and ``after`` are a channel and
    how many transfers it has had when that program began. A tag of yet another channel stays."""
    (channel, count), (other, later) = before, after
    if not tag & _OURS or tag >> 14 & CHANNELS - 1 != channel:
        return tag
    nth = (tag >> 1) - count + later
    return tag & ~(CHANNELS - 1 << 14 | _TRANSFERS - 1 << 1) | other << 14 | nth % _TRANSFERS << 1


def _meet() -> None:
    """NCCL: batched messages between some ranks are defined only after a collective of all."""
    if is_nccl():
        dist.barrier()


# Called before this rank waits to hear of a tensor that it holds nothing of: see pipeline.tape.
BEFORE_HEARING: ContextVar[Callable[[], None]] = ContextVar("before_hearing", default=lambda: None)


# Messages --------------------------------------------------------------------------------------


class _What(NamedTuple):
    """A message, for people: put into words only where it failed."""

    rank: int
    verb: str
    peer: int
    label: object

    def __str__(self) -> str:
        return f"rank {self.rank} {self.verb} rank {self.peer}: {self.label}"


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


class Message(Work[Tensor]):
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
                runtime.here().abandoned.append(self._posted)
                return
            for work in works:
                OUTBOX.put(work, out, what)


def send(x: Tensor, to: int | Sequence[int], tag: int, label: object = "") -> None:
    """A copy of ``x`` goes to the global rank ``to``, or to each of several. Returns at once; x may
    be changed after."""
    copy = dense(x).reshape(-1).clone()
    ranks = (to,) if isinstance(to, int) else to
    _exchange([(rank, copy) for rank in ranks], [], tag, label)


def receive(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    source: int,
    tag: int,
    label: object = "",
) -> Message:
    """Ask for the tensor that the global rank ``source`` sends with this tag; wait for it later."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    return _exchange([], [(source, out)], tag, label)[0]


def transfer(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    tag: int,
    label: object = "",
) -> list[Message]:
    """All messages of one transfer: ``(to, flat buffer)`` go out, ``(source, elements)`` come in.

    Gives a Message per receive, flat. Takes ownership of the contiguous buffers: do not change
    them. ``label``, of which ``str`` is taken only then, says in errors what was moved. Raises
    CommError, for an earlier message of this rank too that could not be delivered.
    """
    outs = [(source, torch.empty(n, dtype=dtype, device=device)) for source, n in receives]
    return _exchange(sends, outs, tag, label)


def _exchange(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    tag: int,
    label: object,
) -> list[Message]:
    failures.watch()
    check_delivered()
    me = world()[0]
    if log.active:
        for to, x in sends:
            log.record("send", (f"{me} -> {to}",), x.nbytes, (x.numel(),), x.dtype)
        for each in log.active:
            each.transfer(label, [me] * bool(sends) + [source for source, _ in receives])
    slips = not is_fake() and all(x.is_cpu for _, x in (*sends, *receives))
    try:
        works, sent = (_post if slips else _post_batch)(sends, receives, tag)
    except RuntimeError as error:
        OUTBOX.flush(10.0)  # an earlier message that failed is being put into words
        check_delivered()
        peers = sorted({r for r, _ in (*sends, *receives)})
        what = f"rank {me} exchanges messages with ranks {peers}: {label}"
        raise failed(what, error) from error
    for (to, x), work in zip(sends, sent, strict=True):
        OUTBOX.put(work, x, _What(me, "sends to", to, label))
    return [
        Message(own, out, _What(me, "receives from", r, label))
        for (r, out), own in zip(receives, works, strict=True)
    ]


Posted = tuple[list[list[Any]], list[Any]]  # Works per receive; one Work per send


def _post(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
) -> Posted:
    """gloo: every message on its own, as bytes, in any dtype, with a slip before it."""
    if not sends and not receives:
        return [], []
    group: Any = dist.group.WORLD
    works: list[list[Any]] = []
    for source, x in receives:
        slip = torch.zeros(_SLIP_BYTES, dtype=torch.uint8)
        comes = _Slip(group.recv([slip], source, tag | _SLIP), slip, x.nbytes)
        works.append([comes, group.recv([as_bytes(x)], source, _sized(tag, x))])
    line = user_line()[-100:] if sends else ""
    sent: list[Any] = []
    for to, x in sends:
        text = f"{x.nbytes} {line}".encode()[:_SLIP_BYTES].ljust(_SLIP_BYTES)
        slip = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sent.append(_Sent(group.send([slip], to, tag | _SLIP), slip,
                          group.send([as_bytes(x)], to, _sized(tag, x))))  # fmt: skip
    return works, sent


def _sized(tag: int, x: Tensor) -> int:
    """gloo ends the process where a message is larger than what the receiver has made room for, and
    says nothing where it is smaller. Of two sizes most have two tags, and never meet."""
    return tag | x.nbytes % 31 << 24


class _Slip(NamedTuple):
    """What goes before a message: how large it is, and the sender's line."""

    work: Any
    slip: Tensor
    nbytes: int

    def wait(self) -> None:
        self.work.wait()
        size, _, line = bytes(self.slip.tolist()).decode(errors="replace").partition(" ")
        if int(size) != self.nbytes:
            raise MismatchError(
                f"{size} bytes were sent at {line.strip()}, and {self.nbytes} are expected at "
                f"{user_line()}: these two ranks do not run the same program on the same shapes"
            )

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


class _Sent(NamedTuple):
    """A slip and a message on their way."""

    before: Any
    slip: Tensor
    work: Any

    def wait(self) -> None:
        self.before.wait()
        self.work.wait()


def _post_batch(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int
) -> Posted:
    """NCCL: sends and receives of a transfer as one batch, or two ranks could wait for each
    other. A fake process group, which brings no slips, is served the same way."""
    ops = [dist.P2POp(dist.irecv, as_bytes(x), r, tag=tag) for r, x in receives]
    sent = {id(x): x for _, x in sends}
    raw = {key: as_bytes(x) for key, x in sent.items()}
    ops += [dist.P2POp(dist.isend, raw[id(x)], r, tag=tag) for r, x in sends]
    works = dist.batch_isend_irecv(ops) if ops else []
    if len(works) != len(ops):  # one Work for all
        return [list(works) for _ in receives], [works[-1] for _ in sends]
    return [[work] for work in works[: len(receives)]], works[len(receives) :]
