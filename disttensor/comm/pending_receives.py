"""Waits for messages, and ends a wait for a message that was sent with another size, by an error.

Messages of different sizes have different tags (``message_format.py``), so the receiver would wait
until the time limit. After some time the receiver's watcher thread (``failure_watch.py``) sends a
request to the sender through the store. If the sender holds a message of this transfer, but of
another size only, it posts that size, and sends a placeholder, which ends the wait. While messages
arrive in time, no request is sent. After a failure of a rank (``lone_failure.py``), a sender
without a message of this transfer ends the wait in the same way.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, NamedTuple

from disttensor import callbacks
from disttensor.comm import failure_watch, lone_failure, send_queue
from disttensor.comm.message_format import WireMessage, placeholder, tag_with_size
from disttensor.comm.process_group import read_key
from disttensor.errors import MismatchError, user_line
from disttensor.runtime import current_runtime, last_runtime

PATIENCE = 1.0  # seconds


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
        if not self.message.has_arrived:
            raise self._error()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def _error(self) -> RuntimeError:
        """Returns the error of a wait that a smaller message or a placeholder has ended."""
        watcher, sent = failure_watch.watcher_of(current_runtime()), None
        if watcher is not None:
            sent = read_key(watcher.store, f"sent/{watcher.rank}/{self.tag}")
            if sent is None and watcher.store.check([lone_failure.STOPPED]):
                return RuntimeError(f"given up after {time.monotonic() - self.since:.0f} s")
        return MismatchError(
            f"{sent or 'fewer bytes were sent'}, and {self.message.nbytes} are expected at "
            f"{user_line()}: these two ranks do not run the same program on the same shapes"
        )


_waiting: list[PendingReceive] = []


def _request(watcher: failure_watch.Watcher) -> None:
    """Sends requests to the senders repeatedly while this rank waits: a sender that has no message
    yet drops the request."""
    for pending in list(_waiting):
        seconds = time.monotonic() - pending.since
        if seconds > lone_failure.PATIENCE:
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
            wire, group = placeholder(), last_runtime().default
            with contextlib.suppress(RuntimeError):  # the peer is gone, which other checks report
                work = group.send([wire], peer, tag_with_size(tag, nbytes))
                send_queue.QUEUE.put(work, wire, sent._replace(nbytes=nbytes))


callbacks.on_heartbeat += [_request, _answer]
