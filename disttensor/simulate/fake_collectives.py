"""Answers operators of ``torch.ops.c10d`` without communication: records an event, and returns a
Work that records when the program waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from disttensor.comm.log import CommRecord
from disttensor.errors import user_line
from disttensor.pytree import collect
from disttensor.simulate.events import Collective, Message, Wait
from disttensor.torch_private import unboxed_group

_SENDS = {"send": True, "recv_": False}


class _Signature(NamedTuple):
    """The positions of the process group and of the peer in the arguments, and of the Work in the
    results, and the number of results."""

    group: int
    peer: int | None
    work: int
    results: int


@cache
def _signature_of(func: Any) -> _Signature:
    names = [a.name for a in func._schema.arguments]
    types = [str(a.type) for a in func._schema.arguments]
    results = [str(r.type) for r in func._schema.returns]
    group = next(i for i, t in enumerate(types) if t.endswith("ProcessGroup"))
    peer = next((names.index(n) for n in ("dst", "src") if n in names), None)
    work = next((i for i, t in enumerate(results) if t.endswith("Work")), -1)
    return _Signature(group, peer, work, len(results))


class _Work(dist.Work):
    """The last of ``works``. Records when the program waits for it; a sender does not wait."""

    def __init__(self, collectives: FakeCollectives, sends: bool) -> None:
        super().__init__()
        self.collectives, self.sends = collectives, sends
        self.number = len(collectives.works)
        collectives.works.append(self)

    def wait(self, *_: Any) -> bool:
        if not self.sends:
            self.collectives.note(Wait(self.number))
        return True

    def is_completed(self) -> bool:
        """Returns True for a collective in the background when another one has been started."""
        return len(self.collectives.works) > self.number + 1

    def is_success(self) -> bool:
        return True


def _uneven(args: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the lists of sizes in the arguments, as of an all-to-all, if a list has several."""
    sizes = [tuple(a) for a in args if isinstance(a, list) and a and isinstance(a[0], int)]
    return tuple(sizes) if any(len({*s}) > 1 for s in sizes) else ()


class FakeCollectives:
    """Answers the collectives of one rank. ``note`` receives each event; ``phase()`` returns the
    phase of the step."""

    def __init__(self, note: Callable[[Any], None], phase: Callable[[], str]) -> None:
        self.note, self.phase = note, phase
        self.count: Counter[Any] = Counter()
        self.works: list[_Work] = []  # C++ does not keep them alive
        self.groups: dict[str, tuple[int, ...]] = {}

    def answer(self, func: Any, args: Any, kwargs: Any, record: CommRecord | None) -> Any:
        """Returns the result of ``func(*args)``. ``record``: the engine's record of this call, None
        for a call of the user."""
        form = _signature_of(func)
        if form.group >= len(args):  # a barrier's process group may be named
            args = (*args, *kwargs.values())
        group = unboxed_group(args[form.group])
        name = group.group_name
        if name not in self.groups:
            self.groups[name] = tuple(dist.get_process_group_ranks(group))
        kind = func._schema.name.split("::")[1]
        if kind in _SENDS:
            self._message(_SENDS[kind], args, form, self.groups[name])
        elif len(self.groups[name]) > 1:
            self._collective(kind, name, args, record)
        work = _Work(self, sends=_SENDS.get(kind, False))
        if form.results == 1:
            return work.boxed() if form.work == 0 else args[0]
        return args[0], work.boxed()

    def _message(self, sends: bool, args: Any, form: _Signature, ranks: tuple[int, ...]) -> None:
        assert form.peer is not None
        peer = ranks[args[form.peer]]
        tag = args[form.peer + 1]
        number = self.count[peer, sends, tag]
        self.count[peer, sends, tag] += 1
        nbytes = sum(t.nbytes for t in args[0])
        self.note(Message(
            peer, sends, nbytes, tag, number, len(self.works), self.phase(), user_line()
        ))  # fmt: skip

    def _collective(self, kind: str, name: str, args: Any, record: CommRecord | None) -> None:
        if record is None:
            sizes = [t.nbytes for t in collect(list(args), [])]
            nbytes = max(sizes, default=0)
            record = CommRecord(
                kind.strip("_"), "", nbytes, self.phase(), user_line(), (), torch.uint8
            )
        self.note(Collective(
            record.kind, record.axis, record.bytes, self.groups[name], name, _uneven(args),
            len(self.works), self.phase(), record.where,
        ))  # fmt: skip
