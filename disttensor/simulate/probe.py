"""What one rank does without stages, layer by layer: what estimates of other strategies are made
of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from disttensor.core.placement import Placement
from disttensor.parallel.strategy import Strategy
from disttensor.pipeline.partition import chosen, elements
from disttensor.pytree import find_tensors
from disttensor.simulate.events import Event, Visit
from disttensor.simulate.memory import Held
from disttensor.simulate.rank_run import Position as Mark
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.recorder import StepRecorder, Values
from disttensor.simulate.run_rank import run_rank
from disttensor.tensor.dist_tensor import DistTensor


@dataclass
class Layer:
    """A layer that stages are made of: its ``parameters``, their ``elements``, and of the forward
    of a micro-batch the ``events``, the bytes that are ``kept`` for the backward, those of its
    ``input`` and the global shape of that."""

    name: str
    of: str
    elements: int
    parameters: int
    events: list[Event] = field(default_factory=list)
    kept: int = 0
    input: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Rank 0 of ``strategy``, which has one stage and one micro-batch. ``layers``: none where it is
    not known in which order they run; ``events``: outside of the layers, by phase, "last" is what
    follows the backward. ``held``: bytes at the begin of the step. ``visits``: forwards and
    backwards of a pipeline run."""

    strategy: Strategy
    layers: list[Layer]
    balance: Any
    events: dict[str, list[Event]]
    held: Held
    loss: int
    splits_sequence: bool
    visits: int

    @property
    def rows(self) -> int | None:
        """Of the batch, as the first layer is given it."""
        shape = self.layers[0].shape if self.layers else ()
        return shape[0] if shape else None


def probe(
    build_with: Callable[[Strategy], Callable[[], Any]], strategy: Strategy, world: int,
    values: Values, ranks_per_node: int, backend: str,
) -> Probe:  # fmt: skip
    """Runs the program as rank 0 of a world. Raises what it raises."""
    watched = _Watched.of(strategy)

    def program(recorder: StepRecorder) -> None:
        step = build_with(watched)
        step()
        watched._note(now=recorder.position)
        recorder.start()
        step()
        recorder.stop()

    run, _ = run_rank(program, 0, world, values, ranks_per_node, backend)
    return watched.probe(strategy, run)


class _Watched(Strategy):
    """A strategy that hears of the forwards of the layers that it is applied to."""

    layers: list[Layer]
    calls: list[tuple[Layer, Mark, Mark]]
    balance: Any
    splits_sequence: bool
    now: Callable[[], Mark | None]

    @classmethod
    def of(cls, strategy: Strategy) -> _Watched:
        fields = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)}
        watched = cls(**fields)
        watched._note(layers=[], calls=[], balance=None, splits_sequence=False, now=lambda: None)
        return watched

    def _note(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # it is frozen

    def batch(self, sequence: int | None = 1) -> list[Placement]:
        self._note(splits_sequence=self.splits_sequence or sequence is not None)
        return super().batch(sequence)

    def apply(self, model: nn.Module, *args: Any, **how: Any) -> Any:
        named = how.get("layers")
        if named is not None:
            named = how["layers"] = tuple(named)
        elif isinstance(model, nn.Sequential):
            named = model
        modules = [] if named is None else chosen(named, model)[1]
        sizes = elements(modules)
        self._note(balance=how.get("balance"))
        out = super().apply(model, *args, **how)
        for (name, module), size in zip(modules, sizes, strict=True):
            number = sum(1 for _ in module.parameters())
            layer = Layer(name, type(module).__qualname__, size, number)
            self.layers.append(layer)
            self._watch(layer, module)
        return out

    def _watch(self, layer: Layer, module: nn.Module) -> None:
        begun: list[Mark | None] = []

        def begins(_: nn.Module, args: Any, kwargs: Any) -> None:
            begun.append(self.now())
            given = next(
                (t for t in find_tensors((args, kwargs)) if isinstance(t, DistTensor)), None
            )
            if given is not None:
                layer.shape, layer.input = tuple(given.shape), given.local.nbytes

        def ends(*_: Any) -> None:
            start, end = begun.pop(), self.now()
            if start is not None and end is not None:
                self.calls.append((layer, start, end))

        module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
        module.register_forward_hook(ends)

    def probe(self, strategy: Strategy, run: RankRun) -> Probe:
        within: set[int] = set()
        end = Mark(0, 0, 0)
        for layer, start, end in self.calls:
            layer.events += run.events[start.events : end.events]
            layer.kept += sum(c.nbytes for c in run.changes[start.changes : end.changes])
            within.update(range(start.events, end.events))
        back = [i for i, e in enumerate(run.events) if _phase(e) == "backward"] or [0]
        loss = sum(c.nbytes for c in run.changes[end.changes :] if c.event < back[0])
        others: dict[str, list[Event]] = {"forward": [], "backward": [], "last": []}
        for i, event in enumerate(run.events):
            if i not in within:
                others["last" if i > back[-1] else _phase(event)].append(event)
        visits = sum(isinstance(e, Visit) for e in run.events)
        return Probe(
            strategy, self.layers, self.balance, others, run.held, loss, self.splits_sequence,
            visits,
        )  # fmt: skip


def _phase(event: Event) -> str:
    phase: str = getattr(event, "phase", "forward")
    return "backward" if phase == "backward" else "forward"
