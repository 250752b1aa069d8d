"""Operators of ``torch.ops.c10d``, answered without a message: what they would have sent, and a
Work that says when the program waits for it."""

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


class _Form(NamedTuple):
    """Where the process group stands in the arguments, the peer of a message, and the Work among
    the results."""

    group: int
    peer: int | None
    work: int
    results: int


@cache
def _form(func: Any) -> _Form:
    names = [a.name for a in func._schema.arguments]
    types = [str(a.type) for a in func._schema.arguments]
    results = [str(r.type) for r in func._schema.returns]
    group = next(i for i, t in enumerate(types) if t.endswith("ProcessGroup"))
    peer = next((names.index(n) for n in ("dst", "src") if n in names), None)
    work = next((i for i, t in enumerate(results) if t.endswith("Work")), -1)
    return _Form(group, peer, work, len(results))


class _Work(dist.Work):
    """Says when it is waited for."""

    def __init__(self, on_wait: Callable[[], None], done: Callable[[], bool]) -> None:
        super().__init__()
        self.on_wait, self.done = on_wait, done

    def wait(self, *_: Any) -> bool:
        self.on_wait()
        return True

    def is_completed(self) -> bool:
        return self.done()

    def is_success(self) -> bool:
        return True


def _uneven(args: Any) -> bool:
    """Are there lists of sizes, for an all-to-all, that are not all the same?"""
    sizes = [a for a in args if isinstance(a, list) and a and isinstance(a[0], int)]
    return any(len(set(s)) > 1 for s in sizes)


class FakeCollectives:
    """Answers for one rank. ``note``: is given each event; ``phase()``: the phase of the step."""

    def __init__(self, note: Callable[[Any], None], phase: Callable[[], str]) -> None:
        self.note, self.phase = note, phase
        self.count: Counter[Any] = Counter()
        self.works: list[_Work] = []  # C++ keeps no hold on them
        self.groups: dict[str, tuple[int, ...]] = {}

    def answer(self, func: Any, args: Any, kwargs: Any, announced: CommRecord | None) -> Any:
        """The result of ``func(*args)``. ``announced``: what the engine has said of it."""
        form = _form(func)
        if form.group >= len(args):  # a barrier's process group may be named
            args = (*args, *kwargs.values())
        group = unboxed_group(args[form.group])
        name = group.group_name
        if name not in self.groups:
            self.groups[name] = tuple(dist.get_process_group_ranks(group))
        kind = func._schema.name.split("::")[1]
        number = len(self.works)
        if kind in _SENDS:
            self._message(_SENDS[kind], args, form, self.groups[name])
        elif len(self.groups[name]) > 1:
            self._collective(kind, name, args, announced)
        # in the background it is done, as far as anybody asks, when another one has been started
        work = self._work(not _SENDS.get(kind, False), lambda: len(self.works) > number + 1)
        if form.results == 1:
            return work.boxed() if form.work == 0 else args[0]
        return args[0], work.boxed()

    def _work(self, waits: bool, done: Callable[[], bool]) -> _Work:
        number = len(self.works)

        def noted() -> None:
            if waits:  # who has sent goes on
                self.note(Wait(number))

        self.works.append(_Work(noted, done))
        return self.works[-1]

    def _message(self, sends: bool, args: Any, form: _Form, ranks: tuple[int, ...]) -> None:
        assert form.peer is not None
        peer = ranks[args[form.peer]]
        tag = args[form.peer + 1]
        number = self.count[peer, sends, tag]
        self.count[peer, sends, tag] += 1
        nbytes = sum(t.nbytes for t in args[0])
        self.note(Message(
            peer, sends, nbytes, tag, number, len(self.works), self.phase(), user_line()
        ))  # fmt: skip

    def _collective(self, kind: str, name: str, args: Any, said: CommRecord | None) -> None:
        number = self.count[name]
        self.count[name] += 1
        tensors: list[torch.Tensor] = collect(list(args), [])
        payload = max((t.nbytes for t in tensors), default=0)
        if said is None:  # a call of the user's own
            said = CommRecord(
                kind.strip("_"), "", payload, self.phase(), user_line(), (), torch.uint8
            )
        self.note(Collective(
            said.kind, said.axis, said.bytes, payload, self.groups[name], name, number,
            _uneven(args), len(self.works), self.phase(), said.where,
        ))  # fmt: skip
