"""Ends a wait for a message that was sent with another size, by an error.

Messages of different sizes have different tags (``letter.py``), so the receiver would wait until
the time limit. After some time the receiver's watcher thread (``watcher.py``) sends a request to
the sender through the store. If the sender holds a message of this transfer, but of another size
only, it posts that size, and sends a message marked as refused, which ends the wait. While messages
arrive in time, no request is sent. After a failure of a rank (``lone_failure.py``), a sender
without a message of this transfer ends the wait in the same way.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from disttensor import callbacks
from disttensor.comm import lone_failure, watcher
from disttensor.comm.letter import WireMessage, sized
from disttensor.comm.outbox import OUTBOX
from disttensor.errors import MismatchError, user_line
from disttensor.runtime import current_runtime, last_runtime

PATIENCE = 1.0  # seconds


class Sending(NamedTuple):
    """A message to another rank, as text for errors: formatted only after a failure."""

    rank: int
    peer: int
    label: object
    tag: int
    nbytes: int
    line: str

    def __str__(self) -> str:
        return f"rank {self.rank} sends to rank {self.peer}: {self.label}"


class PendingReceive:
    """A message on its way from the rank ``source``."""

    __slots__ = ("letter", "since", "source", "tag", "work")

    def __init__(self, work: Any, letter: WireMessage, source: int, tag: int) -> None:
        self.work, self.letter, self.source, self.tag = work, letter, source, tag

    def wait(self) -> None:
        self.since = time.monotonic()
        _waiting.append(self)
        try:
            self.work.wait()
        finally:
            _waiting.remove(self)
        if not self.letter.is_whole:
            if self._is_given_up():
                raise RuntimeError(f"given up after {time.monotonic() - self.since:.0f} s")
            raise MismatchError(
                f"{self._what_was_sent()}, and {self.letter.nbytes} are expected at "
                f"{user_line()}: these two ranks do not run the same program on the same shapes"
            )

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def _is_given_up(self) -> bool:
        beside = watcher.of(current_runtime())
        if beside is None or beside.store.check([f"sent/{beside.rank}/{self.tag}"]):
            return False
        return beside.store.check([lone_failure.STOPPED])

    def _what_was_sent(self) -> str:
        beside = watcher.of(current_runtime())
        key = "" if beside is None else f"sent/{beside.rank}/{self.tag}"
        if beside is None or not beside.store.check([key]):
            return "fewer bytes were sent"
        return str(beside.store.get(key).decode())  # the message received was marked as refused


_waiting: list[PendingReceive] = []


def _ask(beside: watcher.Watcher) -> None:
    """Sends requests to the senders repeatedly while this rank waits: a sender that has no message
    yet drops the request."""
    for awaited in list(_waiting):
        seconds = time.monotonic() - awaited.since
        if seconds > lone_failure.PATIENCE:
            lone_failure.find(beside, [awaited.source])
        if seconds > PATIENCE:
            asked = json.dumps([beside.rank, awaited.tag, awaited.letter.nbytes])
            beside.store.append(f"asked of/{awaited.source}", f"{asked}\n")


def _answer(beside: watcher.Watcher) -> None:
    key = f"asked of/{beside.rank}"
    if not beside.store.check([key]):
        return
    asked = set(beside.store.get(key).decode().splitlines())
    beside.store.delete_key(key)
    for peer, tag, nbytes in map(json.loads, asked):
        held = {
            what.nbytes: what
            for what in OUTBOX.held()
            if isinstance(what, Sending) and (what.peer, what.tag) == (peer, tag)
        }
        if nbytes not in held and (held or last_runtime().is_given_up):
            what = next(iter(held.values()), Sending(beside.rank, peer, "", tag, 0, ""))
            if held:
                text = f"{what.nbytes} bytes were sent at {what.line}"
                beside.store.set(f"sent/{peer}/{tag}", text)
            wire, group = WireMessage.refusing(nbytes).wire, cast(Any, dist.group.WORLD)
            with contextlib.suppress(RuntimeError):  # the peer is gone, which other checks report
                work = group.send([wire], peer, sized(tag, nbytes))
                OUTBOX.put(work, wire, what._replace(nbytes=nbytes))


callbacks.on_heartbeat += [_ask, _answer]
