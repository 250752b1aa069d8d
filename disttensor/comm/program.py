"""The program that this rank runs, compared with that of the other ranks of a mesh at each
optimizer step.

Every call is noted (``note``), which appends to a list and costs nothing else. A step folds what
was noted since the last one into a few numbers for each mesh that this rank is in, and the watcher
(``watcher.py``) compares them through the store while the program goes on. Where they differ the
ranks exchange what they noted, and the next step raises.

Ranks may ask for values alone: calls that one rank makes besides are no difference as long as they
write to nothing, make nothing new, and are in no graph.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from disttensor import callbacks
from disttensor.cache import cached, call_when_cleared
from disttensor.comm import watcher
from disttensor.errors import MismatchError, Place, said, user_line, user_place
from disttensor.runtime import current_runtime
from disttensor.torch_private import next_node

_KEPT = 1 << 16  # calls that are remembered between two steps
_PATIENCE = 5.0  # seconds for the other ranks to say what they noted


class Call:
    """One kind of call on a mesh (None: nobody to compare it with). ``words``: what it is, the same
    text on all ranks; ``effect``: 0 where it only gives a result, 1 where it writes, 2 where it
    begins or ends something; ``draws``: it is what a random call draws from."""

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
    def call(self) -> Call:
        return self

    @property
    def mark(self) -> int:
        """A number that says the words, in every process the same."""
        if not self._mark:
            self._mark = int.from_bytes(blake2b(self.words().encode(), digest_size=7).digest())
        return self._mark

    def __str__(self) -> str:
        return f"{self.words()} ({self.where})"


# What has been noted since the last step: each has a Call in its attribute ``call``.
NOTED: deque[Any] = deque(maxlen=_KEPT)
note: Callable[[Any], None] = NOTED.append
call_when_cleared(NOTED.clear, told=True)


class State(NamedTuple):
    """The calls on one mesh since the last step, as numbers: how many, all in order, those that
    have an effect, and how many nodes of autograd this thread has made meanwhile."""

    made: int
    calls: int
    effects: int
    nodes: int

    def agrees(self, other: State) -> bool:
        """Is the program the same, but for values that one rank has asked for besides?"""
        same = self.effects == other.effects
        return same and (self.calls == other.calls or (
            self.made != other.made and self.nodes == other.nodes
        ))  # fmt: skip


def enters(what: str, spec: Any) -> None:
    """Something that is made of nothing, or ends in nothing: a new DistTensor, a backward."""
    mesh = spec.mesh
    if mesh.coordinate is not None and len(mesh.ranks) > 1:
        note(_entry(what, spec, user_place(sys._getframe(1))))


def draws(mesh: Any, seed: int, call: int) -> None:
    """A random call on ``mesh``, which draws the same on all ranks."""
    if mesh.coordinate is not None and len(mesh.ranks) > 1:
        words = f"random numbers of seed {seed}, call {call}"
        note(Call(lambda: words, mesh, 1, "a random call", draws=True))


def noted_calls() -> list[Call]:
    """What was noted since the last step and other ranks note too, the draws behind all others: a
    replay notes its calls before it makes them."""
    calls = [n.call for n in NOTED if n.call.mesh is not None]
    return [c for c in calls if not c.draws] + [c for c in calls if c.draws]


@cached(4096)
def _entry(what: str, spec: Any, place: Place) -> Call:
    """The same each time that a line does this."""
    return Call(lambda: f"{what} {spec!r}", spec.mesh, 2, said(place))


def folded(calls: Sequence[Call], nodes: int, least: int = 1) -> State:
    """``least``: the effect that counts as one."""
    # a hash of ints is the same in all processes
    effects = hash(tuple([c.mark for c in calls if c.effect >= least]))
    return State(len(calls), hash(tuple([c.mark for c in calls])), effects, nodes)


class ProgramStep(NamedTuple):
    """What ended in an optimizer step: its number, its place, the calls before it by mesh."""

    number: int
    place: str
    calls: dict[Any, list[Call]]


class Steps:
    """The optimizer steps of this rank's program so far."""

    def __init__(self) -> None:
        self.count = 0
        self.node = 0  # of autograd, at the last one
        self.error = ""  # what differed
        self.compared: Any = None  # an Event: the last one has been
        self.kept: deque[ProgramStep] = deque(maxlen=4)


def peers(mesh: Any, rank: int) -> list[int]:
    """The ranks of ``mesh`` that do what ``rank`` does: those that are in the same meshes. Calls on
    tensors of several meshes differ where one of them is another rank's."""
    used = [m.root.ranks for m in list(current_runtime().meshes.values()) if m.specs]
    return [r for r in mesh.ranks if all((r in ranks) == (rank in ranks) for ranks in used)]


def at_step(who: str) -> None:
    """The program comes to an optimizer step. Raises MismatchError if the ranks' programs differed
    before the last one."""
    now = current_runtime()
    beside = watcher.of(now)
    if beside is None:
        NOTED.clear()
        return
    steps = now.steps = now.steps or Steps()
    check()
    node, steps.node = steps.node, next_node()
    steps.count += 1
    step = ProgramStep(steps.count, f"{who} at {user_line()}", {})
    for call in noted_calls():
        step.calls.setdefault(call.mesh, []).append(call)
    NOTED.clear()
    steps.kept.append(step)
    if (step.number - 1) % max(1, beside.size // 32):  # the store serves one rank after another
        return
    least = 2 if step.number == 1 else 1  # one rank may load a model, and broadcast it then
    nodes = steps.node - node
    states = {
        (repr(mesh), *peers(mesh, beside.rank)): folded(calls, nodes, least)
        for mesh, calls in step.calls.items()
    }

    def compare(store: Any) -> None:
        for (name, *ranks), mine in states.items():
            key = f"step/{name} {ranks}/"
            first = store.compare_set(f"{key}{step.number}", "", json.dumps(mine))
            if not mine.agrees(State(*json.loads(first))):
                store.set("differ", json.dumps([name, ranks, step.number]))
            if beside.rank == ranks[0]:
                store.delete_key(f"{key}{step.number - 64}")

    steps.compared = beside.ask(compare)


def check() -> None:
    """Raises MismatchError if what was noted before the last optimizer step differs from what other
    ranks have noted. A rank that finds a difference itself knows of it here."""
    steps: Steps | None = current_runtime().steps
    if steps is not None and steps.compared is not None:
        steps.compared.wait(2 * _PATIENCE)  # mostly it has been long ago
        if steps.error:
            raise MismatchError(steps.error)


def _explain(beside: watcher.Watcher, where: str) -> bool:
    """Some rank has found a difference: all of the mesh say what they noted, each when its program
    has come to that step."""
    name, ranks, number = json.loads(where)
    if beside.rank not in ranks:
        return True
    steps: Steps | None = current_runtime().steps
    kept = [] if steps is None else list(steps.kept)
    if steps is None or not any(s.number >= number for s in kept):
        return False
    step = next((s for s in kept if s.number == number), None)
    if step is None:  # long ago
        return True
    mine = next((c for m, c in step.calls.items() if repr(m) == name), [])
    beside.store.set(f"noted/{beside.rank}", json.dumps(
        [step.place, [(c.words(), c.where) for c in mine]]
    ))  # fmt: skip
    said = beside.said("noted", ranks, _PATIENCE)
    notes = {rank: json.loads(text) for rank, text in said.items()}
    steps.error = difference(name, number, notes)
    return True


def difference(name: str, number: int, notes: dict[int, Any]) -> str:
    """In words, from what each rank has noted: ``[place of the step, [(call, line), ...]]``. Most
    ranks are right."""
    camps: dict[tuple[str, ...], list[int]] = {}
    for rank, (_, calls) in sorted(notes.items()):
        camps.setdefault(tuple(words for words, _ in calls), []).append(rank)
    (most, *others) = sorted(camps.items(), key=lambda camp: -len(camp[1]))
    if not others:
        return ""
    together = zip(*camps, strict=False)  # as far as all go
    shared = sum(1 for _ in itertools.takewhile(lambda calls: len(set(calls)) == 1, together))
    lines = []
    for _, ranks in (most, *others):
        place, calls = notes[ranks[0]]
        words, line = calls[shared] if shared < len(calls) else ("no more calls before", place)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        lines.append(f"{who}: {words} ({line})")
    return (
        f"the ranks of {name} do not run the same program. Before optimizer step {number}, after "
        f"{shared} calls that are the same: " + "; ".join(lines) + ". The lines are those where a "
        "call of this kind was first made. Every rank makes the same calls on tensors of the same "
        "global shapes; what one rank computes for itself alone, it computes of x.detach() without "
        "writing to it, or of plain tensors: x.to_local()"
    )


callbacks.on_report["differ"] = _explain
