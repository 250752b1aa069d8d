"""The connection of a rank to the store that several worlds share, and what the worlds post there.

A thread of each rank posts a heartbeat, and watches the other worlds: the ranks of a world divide
the ranks of another one among them. A rank that finds one dead posts this for all.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from typing import Any

from disttensor.checks import argument_error, check_type
from disttensor.comm.process_group import read_key, wait_until
from disttensor.comm.reports import Reports
from disttensor.errors import CommError

PUBLISHER = "publisher"  # the name of the world that sends
PERIOD = 1.0  # seconds between heartbeats
SILENCE = 10.0  # seconds without a heartbeat after which a rank of another machine has ended
PAUSE = 0.02  # seconds between two looks at the store


def split_address(who: str, address: Any) -> tuple[str, int]:
    """Returns host and port of "host:port"."""
    expected = 'an address "host:port"'
    check_type(who, address, str, expected)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise argument_error(who, address, expected, ValueError)
    return host, int(port)


class Lifeline:
    """``world``: the name of this world, whose ``size`` ranks include this ``rank``."""

    def __init__(self, host: str, port: int, world: str, rank: int, size: int) -> None:
        self.address, self.world, self.rank, self.size = f"{host}:{port}", world, rank, size
        self.reports = Reports(host, port, world, rank, size)
        self.store: Any = self.reports.store.underlying_store
        self.watched: dict[str, int] = {}  # name of another world -> number of its ranks
        self.lost: dict[str, str] = {}  # name of another world -> the rank that has ended, and how
        self._beats: dict[tuple[str, int], tuple[int, float]] = {}
        self.stopped = threading.Event()
        threading.Thread(target=self._run, name=f"{world} lifeline", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self.stopped.wait(PERIOD) and self._has_store():
                self.reports.beat()
                for world, size in list(self.watched.items()):
                    self._look_at(world, size)
        except RuntimeError:  # the store has ended
            self._has_store()

    def _has_store(self) -> bool:
        """Returns False if the store has ended. After that, C++ would print each operation."""
        if self.reports.is_closed():
            self.lost[PUBLISHER] = (
                f"the {PUBLISHER} at {self.address} has ended: the store is gone, which its rank 0 "
                "keeps"
            )
            return False
        return True

    def _look_at(self, world: str, size: int) -> None:
        theirs = self.reports.of_world(world)
        for rank in range(self.rank, size, self.size):
            state, now = theirs.process_state(rank), time.monotonic()
            if state is None:  # on another machine
                beats = theirs.store.add(f"beat/{rank}", 0)
                before, since = self._beats.get((world, rank), (-1, now))
                since = since if beats == before else now
                self._beats[world, rank] = beats, since
                state = "" if now - since > SILENCE else None
            if state == "":
                how = "its process has ended without close(), or was killed"
                self.declare_lost(world, f"rank {rank} of {world} is gone: {how}")
        text = read_key(theirs.store, "lost")
        if text is not None:
            self.lost[world] = text

    def check(self, world: str) -> None:
        """Raises CommError if a rank of ``world``, or the store, has ended."""
        ended = world if self._has_store() else PUBLISHER
        if ended in self.lost:
            raise CommError(self.lost[ended])

    def declare_lost(self, world: str, how: str) -> None:
        """Posts for all ranks that ``world`` is lost, unless this is known."""
        if self._has_store():
            self.store.compare_set(f"{world}/lost", "", how)

    def cause(self, world: str, error: object) -> str:
        """Returns which rank of ``world`` has ended, the cause of ``error``; if none has, the
        error."""
        wait_until(lambda: world in self.lost, 3 * PERIOD)
        return self.lost.get(world, f"messages to or from {world} have failed: {error}")

    def read(self, key: str, world: str, readers: int = 0, seconds: float = math.inf) -> Any:
        """Waits for a key that is written once, and returns its value. The last of ``readers``
        deletes it. Raises CommError if ``world``, which writes it, is lost, or after so many
        seconds."""
        end = time.monotonic() + seconds
        try:
            while True:
                self.check(world)
                text = read_key(self.store, key)
                if text is not None:
                    break
                if time.monotonic() > end:
                    raise CommError(f"{world} did not come within {seconds:g} s ({key})")
                time.sleep(PAUSE)
            if readers and self.store.add(f"{key}/read", 1) == readers:
                self.store.delete_key(key)
                self.store.delete_key(f"{key}/read")
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(self.cause(PUBLISHER, error)) from error
        return json.loads(text)

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def post(self, *event: Any) -> None:
        """Adds an event to the log that rank 0 of the publisher reads."""
        with contextlib.suppress(RuntimeError):  # the store ends now: the next read says so
            if self._has_store():
                number = self.store.add(f"{PUBLISHER}/events", 1) - 1
                self.write(f"{PUBLISHER}/event/{number}", event)
