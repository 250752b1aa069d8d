"""Ends the waits of other ranks for a rank whose call raised while its process lives.

A rank whose call raised, and which makes no other call for some seconds, posts the error to the
store. A failed ``pipeline.run`` is posted at once. A rank that has waited for some seconds reads
the posts. If the awaited rank has raised more errors in the same calls than the waiting rank, the
waiting rank posts the failure, and the waits of all ranks end. Each rank counts its own errors, so
an error that all ranks raise alike ends no wait.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from disttensor import callbacks
from disttensor.comm import compare_programs, failure_watch
from disttensor.comm.process_group import read_key, world
from disttensor.errors import MismatchError, user_line
from disttensor.runtime import Runtime, last_runtime

QUIET = 6.0  # seconds without a call, after which a rank counts as stopped
SLICE = timedelta(seconds=1)
PATIENCE = 3  # number of slices that a wait takes before it reads the posts
STOPPED = "stopped"  # the key in the store


class Raised(NamedTuple):
    """The last error of this rank: the ``nth`` in calls of ``ranks`` since the optimizer step
    ``step``. ``mark``: the calls recorded until then (a later call shows that the program goes on);
    None: later calls do not matter."""

    ranks: tuple[int, ...]
    step: int
    nth: int
    words: str
    mark: Any
    due: float


def note_error(error: BaseException, planned: Any) -> None:
    """Records that a call of the plan ``planned`` raised on this rank."""
    call = planned.call
    if call is not None and call.mesh is not None:
        _note(error, call.mesh.ranks, _mark(), QUIET)


def note_failed_backward(error: BaseException) -> None:
    """Records that a backward, which all ranks run, raised on this rank."""
    _note(error, range(world()[1]), _mark(), QUIET)


def note_failed_run(error: BaseException) -> None:
    """Records that ``pipeline.run`` raised here: this rank sends no more messages of this run."""
    _note(error, range(world()[1]), None, 0.0)


def _note(error: BaseException, ranks: Sequence[int], mark: Any, seconds: float) -> None:
    now = last_runtime()
    if not now.watcher or len(ranks) < 2 or not now.posts_errors:
        return
    trace, text = error.__traceback__, type(error).__name__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    with contextlib.suppress(Exception):  # the error may have no text
        text = f"{text}: {str(error).splitlines()[0][:400]}"
    words = f"{text} ({user_line(None if trace is None else trace.tb_frame)})"
    key = _, step = tuple(ranks), _step(now)
    nth = now.raises.get(key, 0) + 1
    now.raises = {k: n for k, n in now.raises.items() if k[1] == step} | {key: nth}
    now.raised = Raised(*key, nth, words, mark, time.monotonic() + seconds)


def _step(now: Runtime) -> int:
    return 0 if now.steps is None else int(now.steps.count)


def _mark() -> tuple[int, int]:
    """Returns a value that changes with each recorded call."""
    noted = compare_programs.CALLS
    try:
        return len(noted), id(noted[-1])
    except IndexError:  # another thread may have cleared the deque
        return 0, 0


def _post(watcher: failure_watch.Watcher) -> None:
    """Posts the last error of this rank when it is due, and withdraws it if the program goes on."""
    now = last_runtime()
    raised: Raised | None = now.raised
    if raised is None:
        return
    goes_on = raised.mark is not None and raised.mark != _mark()
    was_posted = now.posted is raised
    if goes_on:
        now.raised = None
    if goes_on == was_posted and (goes_on or time.monotonic() >= raised.due):
        now.posted, entry = raised, None if goes_on else raised[:4]
        watcher.store.append("raised", json.dumps([watcher.rank, entry]) + "\n")


def find(watcher: failure_watch.Watcher, awaited: Sequence[int]) -> bool:
    """Returns True if a rank has stopped while others wait. Posts the failure if the stopped rank
    is among ``awaited``, the ranks for which this rank has waited for some seconds."""
    now = last_runtime()
    if not now.is_given_up:
        lines = (read_key(watcher.store, "raised") or "").splitlines()
        for rank, entry in dict(map(json.loads, lines)).items():
            if entry is None or rank not in awaited:
                continue
            ranks, step, nth, words = entry
            own = now.raises.get((tuple(ranks), step), 0)
            if watcher.rank in ranks and step == _step(now) and own < nth:
                failure_watch.post(
                    f"rank {rank} raised {words} and other ranks did not; it has stopped, and its "
                    "process lives. Start all processes again"
                )
                watcher.store.set(STOPPED, "")
                return _give_up(watcher)
    return now.is_given_up


def _give_up(watcher: failure_watch.Watcher, text: str = "") -> bool:
    last_runtime().is_given_up = True
    return True


class _Wait(NamedTuple):
    """A rank waits in the collective ``words``, the ``number``-th of the communicator of ``ranks``
    and ``purpose``, at ``line``. ``started``: how many it has started in each communicator."""

    words: str
    line: str
    ranks: list[int]
    purpose: str
    number: int
    started: dict[str, int]
    time: float  # makes each wait differ


def wait(work: Any, group: Any, kind: str, sent: Any, number: int) -> None:
    """Runs ``work.wait()`` for the collective ``number`` of ``group``, which ends once all ranks
    have started it. Raises RuntimeError also if a rank has stopped, after some seconds. Raises
    MismatchError if another rank waits in another collective that needs this rank: in this
    communicator it differs by ``kind``, or by the size and dtype of ``sent``; in another one this
    rank has not started it, and the other has not started this one."""
    try:
        work.wait(SLICE)
        return
    except RuntimeError:  # the collective failed, or the slice has passed
        watcher = last_runtime().watcher
    words = kind  # sizes of all_to_all differ between ranks
    if kind != "all_to_all":
        words += f" of {sent.numel()} {sent.dtype}"
    posted: _Wait | None = None
    before: dict[int, _Wait] = {}  # the other collectives that ranks waited in at the last slice
    same = 0  # slices for which they have waited in them
    try:
        for slices in itertools.count(1):
            if work.is_completed():
                work.wait()
                return
            if slices >= PATIENCE and watcher and not watcher.lost:
                if find(watcher, group.ranks):
                    raise RuntimeError(f"given up after {slices} s")
                posted = posted or _post_wait(watcher, group, words, number)
                waits = _other_waits(watcher, posted, group.ranks)
                before, same = waits, same + 1 if waits and waits == before else 0
                if same == PATIENCE:
                    _raise_mismatch(watcher, f"{words} at {user_line()}", waits)
            with contextlib.suppress(RuntimeError):
                work.wait(SLICE)
    finally:
        if posted and not watcher.lost:
            with contextlib.suppress(RuntimeError):
                watcher.store.delete_key(f"wait/{watcher.rank}")


def _communicator(ranks: Sequence[int], purpose: str) -> str:
    return f"{purpose}{sorted(ranks)}"


def _post_wait(
    watcher: failure_watch.Watcher, group: Any, words: str, number: int
) -> _Wait:
    """Posts that this rank waits in a collective of ``group``."""
    started = {_communicator(*key): counter[0] for key, counter in last_runtime().started.items()}
    ranks, now = list(group.ranks), time.monotonic()
    entry = _Wait(words, user_line(), ranks, group.purpose, number, started, now)
    watcher.store.set(f"wait/{watcher.rank}", json.dumps(entry))
    return entry


def _other_waits(
    watcher: failure_watch.Watcher, mine: _Wait, ranks: Sequence[int]
) -> dict[int, _Wait]:
    """Returns the waits of other ranks that never end, because this rank waits."""
    own = _communicator(mine.ranks, mine.purpose)

    def blocks(theirs: _Wait) -> bool:
        communicator = _communicator(theirs.ranks, theirs.purpose)
        if communicator == own:
            return theirs.words != mine.words
        needed = watcher.rank in theirs.ranks
        begun = mine.started.get(communicator, 0) >= theirs.number
        return needed and not begun and theirs.started.get(own, 0) < mine.number

    texts = {r: read_key(watcher.store, f"wait/{r}") for r in ranks if r != watcher.rank}
    waits = {r: _Wait(*json.loads(text)) for r, text in texts.items() if text is not None}
    return {r: theirs for r, theirs in waits.items() if blocks(theirs)}


def _raise_mismatch(watcher: failure_watch.Watcher, mine: str, waits: dict[int, _Wait]) -> None:
    others = [f"rank {r} in {w.words} at {w.line}" for r, w in waits.items()]
    raised: Raised | None = last_runtime().raised
    text = (
        f"ranks wait in different collectives, which never end: rank {watcher.rank} "
        f"in {mine}, {', '.join(others)}. All ranks make the same calls in the same order: look "
        "for a call (also one that reads a value: item(), a print), or an error that was caught, on "
        "some ranks only"
        + ("" if raised is None else f". This rank caught {raised.words}")
    )
    failure_watch.post(text)
    watcher.store.set(STOPPED, "")
    raise MismatchError(text)


callbacks.on_heartbeat.append(_post)
callbacks.on_report[STOPPED] = _give_up
