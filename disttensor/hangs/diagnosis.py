"""Says why ranks wait: which of them differs, and where they parted, from the posts of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disttensor.hangs.flight import StartedCollective, show_ranks
from disttensor.hangs.status import Status

_SHOWN = 16  # ranks whose lines are shown
# A process that does not answer, by the letter of its state.
_SILENT = {
    None: "has posted nothing: it is on another machine, or has not come so far",
    "": "is gone: its process has ended",
    "T": "is stopped (SIGSTOP or a debugger)",
    "t": "is stopped by a debugger",
    "R": "does not answer: it computes, in one call that keeps Python from running",
}
_LIVES = "does not answer, though its process lives"


def diagnose(found: Mapping[int, Status], silent: Mapping[int, str | None]) -> str:
    """Returns a text: the ranks that wait, the reasons, and the place of each rank.

    Args:
        found: what each rank that answered has posted.
        silent: the states of the processes of the other ranks (``Reports.process_state``).
    """
    waiting = [rank for rank, s in found.items() if s.waits()]
    reasons = [f"rank {r} {_SILENT.get(state, _LIVES)}" for r, state in silent.items()]
    for collective, ranks in _pending(found):
        reasons += _of_collective(collective, ranks, found)
    for rank, s in found.items():
        if s.waits() and s.pending() is None and s.peer in found:
            does = _does(found[s.peer])
            reasons.append(f"rank {rank} waits for a message of rank {s.peer}, which {does}")
    if not reasons:
        reasons = [f"rank {rank} {_does(s)}" for rank, s in found.items() if not s.waits()]
    seconds = max((found[rank].seconds for rank in waiting), default=0.0)
    lines = [f"watch: {show_ranks(waiting)} ha{'s' if len(waiting) == 1 else 've'} waited "
             f"{seconds:.0f} s"] if waiting else ["watch: no rank waits any more"]  # fmt: skip
    lines += [f"  {reason}" for reason in reasons] or ["  all ranks wait for each other"]
    lines += ["where the ranks are:"]
    lines += [f"  rank {r}: {_place(s)}" for r, s in sorted(found.items())[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"  ... and {len(found) - _SHOWN} other ranks")
    return "\n".join(lines)


def situation(found: Mapping[int, Status], silent: Mapping[int, str | None]) -> str:
    """Returns a text that is equal as long as no rank goes on."""
    places = [(r, s.line, s.waits(), str(s.pending())) for r, s in sorted(found.items())]
    return repr((places, sorted(silent)))


def _pending(found: Mapping[int, Status]) -> list[tuple[StartedCollective, list[int]]]:
    """Returns the collectives in which ranks wait, one for each group and number, with the waiting
    ranks."""
    every: dict[tuple[str, int], tuple[StartedCollective, list[int]]] = {}
    for rank, s in found.items():
        pending = s.pending()
        if pending is not None and s.waits():
            key = f"{sorted(pending.ranks)} {pending.group}", pending.number
            every.setdefault(key, (pending, []))[1].append(rank)
    return [*every.values()]


def _of_collective(
    c: StartedCollective, waiting: list[int], found: Mapping[int, Status]
) -> list[str]:
    """Returns the reasons why a collective does not end: members that do not take part in it."""
    calls = {r: _started(found[r], c) for r in c.ranks if r in found}
    words: dict[str, list[int]] = {}
    for rank, call in calls.items():
        if call is not None:
            words.setdefault(call.words, []).append(rank)
    if len(words) > 1:  # the members have parted here
        texts = "; ".join(f"{show_ranks(r)} {w} at {_at(calls, r)}" for w, r in words.items())
        name = f"collective #{c.number} of {show_ranks(c.ranks)}"
        return [f"the ranks start different calls as {name}: {texts}"]
    reasons = []
    for rank in [r for r, call in calls.items() if call is None]:
        last = found[rank].last(c.group)
        parted = (
            "" if last is None else f"; its last of this group is #{last.number} at {last.line}"
        )
        reasons.append(
            f"rank {rank} has not started {c}, in which {show_ranks(waiting)} "
            f"wait{'s' if len(waiting) == 1 else ''}: it {_does(found[rank])}{parted}"
        )
    return reasons


def _started(s: Status, c: StartedCollective) -> StartedCollective | None:
    """Returns the collective that a rank has started with the number of ``c``; None: it has not
    come so far. A collective that it no longer keeps is taken to be equal."""
    last = s.last(c.group)
    if last is None or last.number < c.number:
        return None
    same = (e for e in s.collectives if e.group == c.group and e.number == c.number)
    return next(same, c)


def _at(calls: Mapping[int, StartedCollective | None], ranks: Iterable[int]) -> str:
    lines = dict.fromkeys(call.line for r in ranks if (call := calls[r]) is not None)
    return " and ".join(lines)


def _does(s: Status) -> str:
    """Returns what a rank does, after the name of the rank."""
    pending = s.pending()
    where = f" at {s.line}" if s.line else ""
    text = s.doing
    if s.waits() and pending is not None:
        text = f"waits in {pending}"
    elif s.waits() and s.peer >= 0:
        text = f"waits for a message of rank {s.peer}"
    if s.error:
        text = f"handles {s.error}, and {text}"
    return text + where


def _place(s: Status) -> str:
    pending = s.pending() if s.waits() else None
    does = s.doing if pending is None else f"waits in {pending}"
    inner = f" (in {s.inner})" if s.inner and pending is None else ""
    error = f", handles {s.error}" if s.error else ""
    line = s.line or "no line of the program"
    return f"{line}  {s.call}{inner}: {does}, {s.seconds:.0f} s{error}"
