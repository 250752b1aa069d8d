"""Compares this rank's program with the other ranks of each mesh, at each optimizer step.

Every call is recorded (``record_call``), at the cost of one append to a list. A step computes a few
numbers from the calls since the last step, for each mesh that this rank is in. The watcher
(``failure_watch.py``) compares the numbers through the store while the program goes on. If they
differ, the ranks exchange their calls, and the next step raises. A rank may make extra read-only
calls (for example to log a value): they are ignored if they write nothing, create no tensor and
build no graph.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

from disttensor import callbacks
from disttensor.cache import cached, call_when_cleared
from disttensor.comm import failure_watch
from disttensor.comm.reports import Topic
from disttensor.errors import MismatchError, Place, show_place, user_line, user_place
from disttensor.runtime import current_runtime
from disttensor.torch_private import next_node

_KEPT = 1 << 16  # most calls that are kept between two steps
_PATIENCE = 5.0  # seconds for the other ranks to post their calls


class CallSignature:
    """A kind of call on a mesh (None: no other rank to compare with). ``words``: a description, the
    same text on all ranks. ``effect``: 0 for a call that only returns a result, 1 for a write, 2
    for a start or an end. ``draws``: the entry records the random numbers that another call
    draws."""

    __slots__ = ("_mark", "draws", "effect", "mesh", "where", "words")

    def __init__(
        self,
        words: Callable[[], str],
        mesh: Any,
        effect: int,
        where: str | None = None,
        draws: bool = False,
    ) -> None:
        self.words, self.mesh, self.effect, self.draws = words, mesh, effect, draws
        self.where = where or user_line()
        self._mark = 0

    @property
    def call(self) -> CallSignature:
        return self

    @property
    def mark(self) -> int:
        """A hash of the words, the same in every process."""
        if not self._mark:
            self._mark = int.from_bytes(blake2b(self.words().encode(), digest_size=7).digest())
        return self._mark

    def __str__(self) -> str:
        return f"{self.words()} ({self.where})"


# Calls recorded since the last step: each entry has a CallSignature in its attribute ``call``.
CALLS: deque[Any] = deque(maxlen=_KEPT)
record_call: Callable[[Any], None] = CALLS.append
call_when_cleared(CALLS.clear, received=True)


@contextmanager
def preserve_calls() -> Iterator[None]:
    """Leaves the recorded calls as they are after a block that clears or adds some."""
    before = [*CALLS]
    try:
        yield
    finally:
        CALLS.clear()
        CALLS.extend(before)


class CallFingerprint(NamedTuple):
    """The calls on one mesh since the last step, as numbers: their count, hashes of all and of
    those with an effect, and the number of autograd nodes that this thread has created
    meanwhile. ``made`` is -1 if the first of the calls are no longer kept."""

    made: int
    calls: int
    effects: int
    nodes: int

    def agrees(self, other: CallFingerprint) -> bool:
        """Returns True if the programs are the same except for extra read-only calls, or if one
        rank made too many calls to compare."""
        if -1 in (self.made, other.made):
            return True
        same = self.effects == other.effects
        return same and (self.calls == other.calls or (
            self.made != other.made and self.nodes == other.nodes
        ))  # fmt: skip


def record_entry(what: str, spec: Any, requires_grad: bool = False) -> None:
    """Records a call without tensor arguments or without results: a new DistTensor, a backward."""
    if _is_compared(spec.mesh):
        what += ", which requires grad, of" * requires_grad
        record_call(_entry(what, spec, user_place(sys._getframe(1))))


def record_draw(mesh: Any, seed: int, call: int) -> None:
    """Records a random call on ``mesh``, which draws the same numbers on all ranks."""
    if _is_compared(mesh):
        words = f"random call {call} of seed {seed}"
        record_call(CallSignature(lambda: words, mesh, 1, "a random call", draws=True))


def _is_compared(mesh: Any) -> bool:
    return mesh.coordinate is not None and len(mesh.ranks) > 1


@cached(4096)
def _entry(what: str, spec: Any, place: Place) -> CallSignature:
    """Returns the entry of a call with this description; cached."""
    return CallSignature(lambda: f"{what} {spec!r}", spec.mesh, 2, show_place(place))


def recorded_calls() -> list[CallSignature]:
    """Returns the calls since the last step that other ranks record too. Draws come last, because a
    replay records its calls before it makes them."""
    calls = [n.call for n in [*CALLS]]  # a copy: other threads may record calls meanwhile
    return sorted((call for call in calls if call.mesh is not None), key=lambda call: call.draws)


def fingerprint(calls: Sequence[CallSignature], nodes: int, least: int = 1) -> CallFingerprint:
    """Returns the fingerprint of ``calls``. ``least``: the smallest effect that counts as one."""
    # a hash of ints is the same in all processes
    effects = hash(tuple([c.mark for c in calls if c.effect >= least]))
    return CallFingerprint(len(calls), hash(tuple([c.mark for c in calls])), effects, nodes)


_COLLECTIVES = "the collectives"  # in place of the name of a mesh
_CALLS: Topic[Any] = Topic("calls")  # place of the step, [(call, line), ...]

# At optimizer steps -------------------------------------------------------------------------------


class ProgramStep(NamedTuple):
    """An optimizer step: its number, its source line, and the calls before it by mesh."""

    number: int
    place: str
    calls: dict[Any, list[CallSignature]]


class ProgramSteps:
    """The optimizer steps of this rank's program so far."""

    def __init__(self) -> None:
        self.count = 0
        self.node = 0  # the next autograd node at the last step
        self.error = ""  # the difference found, as text
        self.compared: Any = None  # an Event: the last step has been compared
        self.kept: deque[ProgramStep] = deque(maxlen=16)


def peers(mesh: Any, rank: int) -> list[int]:
    """Returns the ranks of ``mesh`` that are in the same meshes as ``rank``: a call on tensors of
    several meshes is recorded differently by ranks that are not in all of them."""
    used = [m.root.ranks for m in list(current_runtime().meshes.values()) if m.specs]
    return [r for r in mesh.ranks if all((r in ranks) == (rank in ranks) for ranks in used)]


def at_step(who: str) -> None:
    """Records an optimizer step, and starts the comparison of the calls before it. Raises
    MismatchError if the ranks' programs differed before the last step."""
    now = current_runtime()
    watcher = failure_watch.watcher_of(now)
    if watcher is None:
        CALLS.clear()
        return
    rank, steps = watcher.rank, now.steps or ProgramSteps()
    now.steps = steps
    check()
    node, steps.node = steps.node, next_node()
    steps.count += 1
    step = ProgramStep(steps.count, f"{who} at {user_line()}", {})
    dropped = len(CALLS) == _KEPT
    for call in recorded_calls():
        step.calls.setdefault(call.mesh, []).append(call)
    CALLS.clear()
    steps.kept.append(step)
    if (step.number - 1) % max(1, watcher.size // 32):  # the store serves ranks one by one
        return
    least = 2 if step.number == 1 else 1  # one rank may load a model before it broadcasts it
    nodes = steps.node - node
    fingerprints = {
        (repr(mesh), *peers(mesh, rank)): fingerprint(calls, nodes, least)
        for mesh, calls in step.calls.items()
    }
    if dropped:  # ranks that made extra calls have dropped others than this rank
        fingerprints = {key: f._replace(made=-1) for key, f in fingerprints.items()}
    for (ranks, purpose), (count,) in [*now.started.items()]:
        if not purpose and any({*ranks} <= {*of} for _, *of in fingerprints):  # of the program
            fingerprints[_COLLECTIVES, *ranks] = CallFingerprint(count, 0, count, 0)

    def compare(store: Any) -> None:
        differs = False
        for (name, *ranks), mine in fingerprints.items():
            key = f"step/{name} {ranks}/"
            first = store.compare_set(f"{key}{step.number}", "", json.dumps(mine))
            if not differs and not mine.agrees(CallFingerprint(*json.loads(first))):
                differs = True  # calls first, which say more
                store.set("differ", json.dumps([name, ranks, step.number]))
            if rank == ranks[0]:
                store.delete_key(f"{key}{step.number - 64}")

    steps.compared = watcher.submit(compare)


def check() -> None:
    """Raises MismatchError if this rank's calls before the last optimizer step differ from the
    calls of other ranks. Waits for this rank's own comparison to end."""
    steps: ProgramSteps | None = current_runtime().steps
    if steps is not None and steps.compared is not None:
        steps.compared.wait(2 * _PATIENCE)  # usually done long before
        if steps.error:
            raise MismatchError(steps.error)


def _explain(watcher: failure_watch.Watcher, where: str) -> bool:
    """Posts this rank's calls after a rank has found a difference, and reads the others' calls.
    Returns False until the program of this rank has reached that step."""
    name, ranks, number = json.loads(where)
    if watcher.rank not in ranks:
        return True
    steps: ProgramSteps | None = current_runtime().steps
    kept = [] if steps is None else list(steps.kept)
    if steps is None or not kept or kept[-1].number < number:
        return False
    if name == _COLLECTIVES:
        steps.error = (
            f"ranks {ranks} had started different numbers of collectives before optimizer step "
            f"{number}: a rank reduced or gathered alone, and values of two calls may have met. "
            "All ranks write to their pieces (x.to_local()), or none does; an error that a rank "
            "caught alone may also be the cause"
        )
        return True
    error = ""
    for step in [s for s in kept if s.number == number]:  # none if it is no longer kept
        calls = next((c for mesh, c in step.calls.items() if repr(mesh) == name), [])
        _CALLS.post(watcher, [step.place, [(c.words(), c.where) for c in calls]])
        error = difference(name, number, _CALLS.gather(watcher, ranks, _PATIENCE))
    steps.error = error or (
        f"the ranks of {name} do not run the same program: their calls before optimizer step "
        f"{number} differ. A rank was some steps ahead, and has its calls no longer. Read a value "
        "on every rank before the step, as loss.item(), and the error names the calls"
    )
    return True


def difference(name: str, number: int, calls_of: dict[int, Any]) -> str:
    """Describes the difference between the calls of the ranks: ``[place of the step, [(call, line),
    ...]]`` of each. The largest set of equal ranks is listed first."""
    camps: dict[tuple[str, ...], list[int]] = {}
    for rank, (_, calls) in sorted(calls_of.items()):
        camps.setdefault(tuple(words for words, _ in calls), []).append(rank)
    (most, *others) = sorted(camps.items(), key=lambda camp: -len(camp[1]))
    if not others:
        return ""
    together = zip(*camps, strict=False)  # up to the shortest
    shared = sum(1 for _ in itertools.takewhile(lambda calls: len(set(calls)) == 1, together))
    lines = []
    for _, ranks in (most, *others):
        place, calls = calls_of[ranks[0]]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        text = f"made no further call before the step ({place})"
        if shared < len(calls):
            words, line = calls[shared]
            text = f"ran {words} ({line})"
        lines.append(f"{who} {text}")
    return (
        f"the ranks of {name} do not run the same program. Before optimizer step {number}, after "
        f"{shared} calls that are the same: " + "; ".join(lines) + ". The lines are those where a "
        "call of this kind was first made. Make the same calls on every rank, on tensors of the "
        "same global shapes. For a computation on one rank use x.detach(), without writing to it, "
        "or a regular tensor: x.to_local()"
    )


callbacks.on_report["differ"] = _explain
