"""Runs one rank without stages, and records each layer: the input of estimates of strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from disttensor.core.placement import Placement
from disttensor.parallel.strategy import Strategy
from disttensor.pipeline.partition import elements, named_layers
from disttensor.simulate.child import Child
from disttensor.simulate.devices import Device
from disttensor.simulate.events import Event, Visit
from disttensor.simulate.layers import ModuleCall
from disttensor.simulate.memory import Held, MemoryChange
from disttensor.simulate.rank_run import Entry, RankRun
from disttensor.simulate.recorder import StepRecorder, Values
from disttensor.simulate.run_rank import start_rank


@dataclass
class Layer:
    """A layer that stages consist of.

    name        the name of the module
    kind        the class of the module
    elements    elements of its parameters
    parameters  the number of its parameters
    events      the events of its forward
    kept        bytes that its forward keeps for the backward
    input       bytes of its input
    shape       the global shape of its input
    """

    name: str
    kind: str
    elements: int
    parameters: int
    events: list[Event] = field(default_factory=list)
    kept: int = 0
    input: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Probe:
    """The recorded step of rank 0 under ``strategy``, which has one stage and one micro-batch.

    layers           the layers in order; empty if their order is not known
    balance          the argument of ``Strategy.apply``
    events           events outside of the layers: "forward", "backward", and "last" for the events
                     after the backward
    held             bytes by category when the step begins
    loss             bytes that are kept between the layers and the backward
    splits_sequence  whether the program splits the sequence over cp
    visits           number of forwards and backwards in pipeline runs
    """

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
        """The rows of the batch, by the input of the first layer."""
        shape = self.layers[0].shape if self.layers else ()
        return shape[0] if shape else None


def probe(
    build_with: Callable[[Strategy], Callable[[], Any]], strategy: Strategy, world: int,
    values: Values, ranks_per_node: int, device: Device,
) -> Probe:  # fmt: skip
    """Runs the program as rank 0. Raises any exception of the program."""
    observed = _ObservedStrategy.of(strategy)
    calls: list[ModuleCall] = []

    def program(recorder: StepRecorder) -> None:
        step = build_with(observed)
        step()
        recorder.layers.watch(observed.layers)
        recorder.start()
        step()
        recorder.stop()
        calls.extend(recorder.layers.calls)

    child: Child[Probe] = start_rank(
        program, 0, world, values, ranks_per_node, device,
        result=lambda run, _: observed.probe(Strategy(), run, calls),
    )  # fmt: skip
    return replace(child.result(), strategy=strategy)


class _ObservedStrategy(Strategy):
    """A strategy that notes how a program applies it."""

    layers: dict[nn.Module, Layer]
    balance: Any
    splits_sequence: bool

    @classmethod
    def of(cls, strategy: Strategy) -> _ObservedStrategy:
        observed = cls(**vars(strategy))
        observed._note(layers={}, balance=None, splits_sequence=False)
        return observed

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
        modules = [] if named is None else named_layers(named, model)[1]
        sizes = elements(modules)
        self._note(balance=how.get("balance"))
        out = super().apply(model, *args, **how)
        for (name, module), size in zip(modules, sizes, strict=True):
            number = sum(1 for _ in module.parameters())
            self.layers[module] = Layer(name, type(module).__qualname__, size, number)
        return out

    def probe(self, strategy: Strategy, run: RankRun, calls: list[ModuleCall]) -> Probe:
        within: set[int] = set()
        after_layers = 0
        for module, start, end, shape, nbytes in calls:
            layer, after_layers = self.layers[module], end
            layer.events += [e for e in run.log[start:end] if isinstance(e, Event)]
            layer.kept += _bytes(run.log[start:end])
            within.update(range(start, end))
            if shape or nbytes:
                layer.shape, layer.input = shape, nbytes
        events = [(i, e) for i, e in enumerate(run.log) if isinstance(e, Event)]
        back = [n for n, (_, e) in enumerate(events) if _phase(e) == "backward"] or [0]
        before = events[back[0] - 1][0] if back[0] else 0  # the last event before the backward
        loss = _bytes(run.log[after_layers:before])
        others: dict[str, list[Event]] = {"forward": [], "backward": [], "last": []}
        for n, (i, event) in enumerate(events):
            if i not in within:
                others["last" if n > back[-1] else _phase(event)].append(event)
        visits = sum(isinstance(e, Visit) for _, e in events)
        return Probe(
            strategy, list(self.layers.values()), self.balance, others, run.held, loss,
            self.splits_sequence, visits,
        )  # fmt: skip


def _bytes(log: Iterable[Entry]) -> int:
    """Returns the bytes by which these entries change the memory."""
    return sum(e.nbytes for e in log if isinstance(e, MemoryChange))


def _phase(event: Event) -> str:
    phase: str = getattr(event, "phase", "forward")
    return "backward" if phase == "backward" else "forward"
