"""Ends waits of ranks that wait for each other in different collectives.

A rank that has waited for some seconds posts in which collective, and how many it has started in
each communicator. Two ranks never go on if each waits in a collective that needs the other, which
has not started it. This holds for the threads that run the program: another thread, as the one that
writes a checkpoint, may wait for long while the program of its rank goes on, so it posts nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from disttensor.comm import failure_watch, lone_failure
from disttensor.comm.reports import Topic
from disttensor.errors import MismatchError, user_line
from disttensor.runtime import last_runtime

SLICE = timedelta(seconds=1)
PATIENCE = 3  # number of slices that a wait takes before it reads the posts, and that it reads them


class _Post(NamedTuple):
    """A rank waits in the collective ``words``, the ``number``-th of the communicator of ``ranks``
    and ``purpose``, at ``line``. ``started``: how many it has started in each communicator."""

    words: str
    line: str
    ranks: list[int]
    purpose: str
    number: int
    started: dict[str, int]
    time: float  # makes each wait differ

    def communicator(self) -> str:
        return _communicator(self.ranks, self.purpose)


_WAIT = Topic("wait", _Post)


def _communicator(ranks: Sequence[int], purpose: str) -> str:
    return f"{purpose}{sorted(ranks)}"


class BlockedWait:
    """This rank waits in the collective ``words``, the ``number``-th of the communicator of
    ``ranks`` and ``purpose``."""

    def __init__(
        self, watcher: failure_watch.Watcher, ranks: Sequence[int], purpose: str, words: str,
        number: int,
    ) -> None:  # fmt: skip
        started = {_communicator(*key): n for key, (n,) in last_runtime().started.items()}
        now = time.monotonic()
        self.post = _Post(words, user_line(), list(ranks), purpose, number, started, now)
        self.watcher, self.same = watcher, 0  # calls of check for which ``before`` was the same
        self.before: dict[int, _Post] = {}
        self.is_posted = _runs_program(watcher)
        if self.is_posted:
            _WAIT.post(watcher, self.post)

    def check(self) -> None:
        """Raises MismatchError if other ranks, for some calls, wait in collectives that never end,
        because this rank waits: in this communicator another one by ``words``, in another one a
        collective that this rank has not started while they have not started this one."""
        if not self.is_posted:
            return
        others = [r for r in self.post.ranks if r != self.watcher.rank]
        posts = _WAIT.read(self.watcher, others)
        blocked = {r: theirs for r, theirs in posts.items() if self._blocks(theirs)}
        self.same = self.same + 1 if blocked and blocked == self.before else 0
        self.before = blocked
        if self.same == PATIENCE:
            self._raise(blocked)

    def end(self) -> None:
        if self.is_posted and not self.watcher.lost:
            with contextlib.suppress(RuntimeError):
                _WAIT.withdraw(self.watcher, self.watcher.rank)

    def _blocks(self, theirs: _Post) -> bool:
        mine, own, other = self.post, self.post.communicator(), theirs.communicator()
        if own == other:
            return theirs.number == mine.number and theirs.words != mine.words
        needed = self.watcher.rank in theirs.ranks
        begun = mine.started.get(other, 0) >= theirs.number
        return needed and not begun and theirs.started.get(own, 0) < mine.number

    def _raise(self, blocked: dict[int, _Post]) -> None:
        posts = {self.watcher.rank: self.post, **blocked}
        where = [f"rank {r} in {p.words} at {p.line}" for r, p in posts.items()]
        raised = last_runtime().raised
        text = (
            f"ranks wait in different collectives, which never end: {', '.join(where)}. All ranks "
            "make the same calls in the same order: look for a call (also one that reads a value, "
            "as item()), or an error that was caught, on some ranks only"
            + ("" if raised is None else f". This rank caught {raised.words}")
        )
        failure_watch.post(text)
        self.watcher.store.set(lone_failure.STOPPED, "")
        raise MismatchError(text)


def _runs_program(watcher: failure_watch.Watcher) -> bool:
    """Returns True if the program of this rank goes on only when the present thread does: in the
    thread that started the watcher, and in threads of micro-batches, for which it waits."""
    thread = threading.current_thread()
    return thread.ident == watcher.program or getattr(thread, "runs_program", False)


def wait(work: Any, group: Any, kind: str, sent: Any, number: int) -> None:
    """Runs ``work.wait()`` for the collective ``number`` of ``group``, which ends once all ranks
    have started it. Raises RuntimeError also if a rank has stopped, after some seconds, and
    MismatchError if ranks wait in different collectives: by ``kind``, or by the size and dtype of
    ``sent``."""
    try:
        work.wait(SLICE)
        return
    except RuntimeError:  # the collective failed, or the slice has passed
        watcher = last_runtime().watcher
    words = kind  # sizes of all_to_all differ between ranks
    if kind != "all_to_all":
        words += f" of {sent.numel()} {sent.dtype}"
    blocked: BlockedWait | None = None
    try:
        for slices in itertools.count(1):
            if work.is_completed():
                work.wait()
                return
            if slices >= PATIENCE and watcher and not watcher.lost:
                if lone_failure.find(watcher, group.ranks):
                    raise RuntimeError(f"given up after {slices} s")
                if blocked is None:
                    blocked = BlockedWait(watcher, group.ranks, group.purpose, words, number)
                blocked.check()
            with contextlib.suppress(RuntimeError):
                work.wait(SLICE)
    finally:
        if blocked:
            blocked.end()
