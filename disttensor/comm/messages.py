"""Messages over gloo: a header with the number of bytes of a tensor, and the bytes. A wait for a
message that was sent with another size ends with an error.

gloo ends the process if a message is larger than the receiver's buffer, and reports nothing if it
is smaller. So the tag contains the size class too (``tag_with_size``), and a buffer has room for
every message of its class. Messages of different classes never match; in one class the header
shows the size that was sent.

A receiver whose message has another tag would wait until the time limit. After some time its
watcher thread (``failure_watch.py``) sends a request to the sender through the store. If the sender
holds a message of this transfer, but of another size only, it posts that size, and sends a
placeholder, which ends the wait. While messages arrive in time, no request is sent. After a failure
of a rank (``lone_failure.py``), a sender without a message of this transfer ends the wait in the
same way.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disttensor import callbacks
from disttensor.comm import blocked_wait, failure_watch, lone_failure, send_queue
from disttensor.comm.process_group import read_key
from disttensor.errors import MismatchError, user_line
from disttensor.runtime import current_runtime, last_runtime

Tensor = torch.Tensor

PATIENCE = 1.0  # seconds
_NOTHING = -1  # the header before a message has arrived
_HEADER = 8  # words; the bytes behind it are aligned as torch aligns memory
_CLASSES = 256  # of sizes
SIZES_AT = 22  # their bits in a tag: above the bits of a transfer, below the bit of all our tags


def size_class(nbytes: int) -> int:
    """Returns the class of a size: 8 for each power of two from 64 on; class 0 has the smaller
    sizes too."""
    k = max(0, nbytes.bit_length() - 7)
    return min(_CLASSES - 1, 8 * k + max(0, (nbytes >> k + 3) - 8))


def _room(nbytes: int) -> int:
    """Returns the upper end of the class of ``nbytes``, at most an eighth more. The memory behind a
    message is reserved, and never written."""
    k, eighth = divmod(size_class(nbytes), 8)
    return max(nbytes, 8 * (eighth + 9) << k)


class WireMessage:
    """The memory of a message of ``nbytes`` bytes, behind a header: ``wire``. A message to be
    received has ``room`` for each size of its class."""

    __slots__ = ("nbytes", "wire")

    def __init__(self, nbytes: int, room: int) -> None:
        self.nbytes = nbytes
        self.wire = torch.empty((room + 7) // 8 + _HEADER, dtype=torch.int64, device="cpu")
        self.wire[0] = _NOTHING

    @classmethod
    def to_receive(cls, nbytes: int) -> WireMessage:
        return cls(nbytes, _room(nbytes))

    @classmethod
    def copy_of(cls, x: Tensor) -> WireMessage:
        """Returns a message with a copy of ``x``, since the memory of ``x`` may be written before
        the message has been sent."""
        message = cls(x.nbytes, x.nbytes)
        message.content(x.shape, x.dtype).copy_(x.detach())
        message.wire[0] = x.nbytes
        return message

    def content(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the bytes as a tensor, whose base is not ``wire``."""
        whole = self.wire[_HEADER:].view(torch.uint8)
        return whole[: self.nbytes].view(dtype).view(shape).detach()


def tag_with_size(tag: int, nbytes: int) -> int:
    return tag | size_class(nbytes) << SIZES_AT


class PostedMessage(NamedTuple):
    """A message, as text for errors: formatted only after a failure. ``way``: "sends to" or
    "receives from". ``tag``, ``nbytes``, ``line``: of a message that may answer a request."""

    rank: int
    way: str
    peer: int
    label: object
    tag: int = -1
    nbytes: int = 0
    line: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.way} rank {self.peer}: {self.label}"


class PendingReceive:
    """A message on its way from the rank ``source``."""

    __slots__ = ("message", "since", "source", "tag", "work")

    def __init__(self, work: Any, message: WireMessage, source: int, tag: int) -> None:
        self.work, self.message, self.source, self.tag = work, message, source, tag

    def wait(self) -> None:
        self.since = time.monotonic()
        _waiting.append(self)
        try:
            self.work.wait()
        finally:
            _waiting.remove(self)
        if int(self.message.wire[0]) != self.message.nbytes:
            raise self._error()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def _error(self) -> RuntimeError:
        """Returns the error of a wait that another message or a placeholder has ended."""
        watcher, sent = failure_watch.watcher_of(current_runtime()), None
        if watcher is not None:
            sent = read_key(watcher.store, f"sent/{watcher.rank}/{self.tag}")
            if sent is None and watcher.store.check([lone_failure.STOPPED]):
                return RuntimeError(f"given up after {time.monotonic() - self.since:.0f} s")
        arrived = int(self.message.wire[0])
        sent = sent or f"{arrived if arrived >= 0 else 'fewer'} bytes were sent"
        return MismatchError(
            f"{sent}, and {self.message.nbytes} are expected at "
            f"{user_line()}: these two ranks do not run the same program on the same shapes"
        )


_waiting: list[PendingReceive] = []


def _request(watcher: failure_watch.Watcher) -> None:
    """Sends requests to the senders repeatedly while this rank waits: a sender that has no message
    yet drops the request."""
    for pending in list(_waiting):
        seconds = time.monotonic() - pending.since
        if seconds > blocked_wait.PATIENCE:
            lone_failure.find(watcher, [pending.source])
        if seconds > PATIENCE:
            request = json.dumps([watcher.rank, pending.tag, pending.message.nbytes])
            watcher.store.append(f"requests/{pending.source}", f"{request}\n")


def _answer(watcher: failure_watch.Watcher) -> None:
    key = f"requests/{watcher.rank}"
    requests = read_key(watcher.store, key)
    if requests is None:
        return
    watcher.store.delete_key(key)
    for peer, tag, nbytes in map(json.loads, set(requests.splitlines())):
        held = {
            sent.nbytes: sent
            for sent in send_queue.QUEUE.held()
            if (sent.peer, sent.tag) == (peer, tag)
        }
        if nbytes not in held and (held or last_runtime().is_given_up):
            unsent = PostedMessage(watcher.rank, "sends to", peer, "", tag)
            sent = next(iter(held.values()), unsent)
            if held:
                text = f"{sent.nbytes} bytes were sent at {sent.line}"
                watcher.store.set(f"sent/{peer}/{tag}", text)
            # not a whole header, so no size, and it ends the wait
            wire, group = torch.zeros(1, dtype=torch.uint8, device="cpu"), last_runtime().default
            with contextlib.suppress(RuntimeError):  # the peer is gone, which other checks report
                work = group.send([wire], peer, tag_with_size(tag, nbytes))
                send_queue.QUEUE.put(work, wire, sent._replace(nbytes=nbytes))


callbacks.on_heartbeat += [_request, _answer]
