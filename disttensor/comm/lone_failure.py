"""Ends the waits of other ranks for a rank whose call raised while its process lives.

A rank whose call raised, and which makes no other call for some seconds, posts the error to the
store. A failed ``pipeline.run`` is posted at once. A rank that has waited for some seconds reads
the posts. If the awaited rank has raised more errors in the same calls than the waiting rank, the
waiting rank posts the failure, and the waits of all ranks end. Each rank counts its own errors, so
an error that all ranks raise alike ends no wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from disttensor import callbacks
from disttensor.comm import compare_programs, failure_watch
from disttensor.comm.process_group import read_key, world
from disttensor.errors import headline, user_line
from disttensor.runtime import Runtime, last_runtime

QUIET = 6.0  # seconds without a call, after which a rank counts as stopped
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
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    words = f"{headline(error)[:400]} ({user_line(None if trace is None else trace.tb_frame)})"
    key = _, step = tuple(ranks), _step(now)
    every = (*now.raises.get(key, ()), words)
    now.raises = {k: e for k, e in now.raises.items() if k[1] == step} | {key: every}
    now.raised = Raised(*key, len(every), words, mark, time.monotonic() + seconds)


def errors_with(ranks: Sequence[int]) -> list[str]:
    """Returns the errors of this rank's calls with all of ``ranks`` since the optimizer step."""
    now = last_runtime()
    step = _step(now)
    found = [e for (of, at), e in now.raises.items() if at == step and set(of).issuperset(ranks)]
    return [words for every in found for words in every]


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
    if raised is None or now.watcher is not watcher:  # the watcher of an earlier world
        return
    goes_on = raised.mark is not None and raised.mark != _mark()
    was_posted = now.posted is raised
    if goes_on and now.raised is raised:  # the program may have raised another error meanwhile
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
            own = len(now.raises.get((tuple(ranks), step), ()))
            if watcher.rank in ranks and step == _step(now) and own < nth:
                failure_watch.post(
                    f"rank {rank} raised {words} and other ranks did not; it has stopped, and its "
                    "process lives. Start all processes again"
                )
                watcher.store.set(STOPPED, "")
                return _give_up(watcher)
    return now.is_given_up


def _give_up(watcher: failure_watch.Watcher, text: str = "") -> bool:
    now = watcher.runtime()
    if now is not None:
        now.is_given_up = True
    return True


callbacks.on_heartbeat.append(_post)
callbacks.on_report[STOPPED] = _give_up
