"""``plan_strategy``: simulated strategies, sorted by the time of their step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from disttensor.checks import check_callable, check_int, check_positive, check_sequence, check_type
from disttensor.parallel.strategy import Strategy
from disttensor.simulate import devices
from disttensor.simulate import layer_times as layer_times  # for balance="time"
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.recorder import Values, check_values
from disttensor.simulate.strategy_search import Search
from disttensor.simulate.strategy_table import Candidate as Candidate
from disttensor.simulate.strategy_table import StrategyTable


def plan_strategy(
    build_with: Callable[[Strategy], Callable[[], Any]],
    world: int,
    candidates: Iterable[Strategy] | None = None,
    *,
    device: Device = devices.H100,
    network: Network = Network(),  # noqa: B008  (it is frozen)
    memory: float | None = None,
    values: Values = 0.0,
    like: Strategy = Strategy(),  # noqa: B008
    most: int = 8,
    progress: Callable[[str], Any] | None = None,
) -> StrategyTable:
    """Simulate a program under each of several strategies, and sort them by the time of a step.

    ``build_with(strategy)`` is what ``simulate`` takes as ``build``: it applies the strategy and
    returns ``step``. ``candidates``: strategies to compare. ``memory``: bytes that a rank may use,
    those of the device without it. ``progress`` hears of each simulation in a line; without it a
    terminal shows them.

    Without ``candidates`` they are all degrees of pp, dp, sharding, cp, and tp within a node, with
    each zero stage, number of micro-batches, schedule, and recomputation of no layer, of those that
    are alike and of all, and larger segments; what none of this decides is as in ``like``, as
    ``dt.Strategy(amp="bf16")``. Rank 0 without stages is simulated for each tp, and time and memory
    of the others are estimated from it, layer by layer. Those that look best are simulated as a
    whole, ``most`` of them at most.

    A strategy that the program refuses loses with that error. Where memory may not suffice, and for
    given candidates, rank 0 is simulated first: if it does not fit, or computes for longer than the
    best step so far takes, the other ranks are not.

    >>> def build_with(strategy):
    ...     model = torch.nn.Linear(8, 8)
    ...     strategy.apply(model, plan={"weight": {"tp": dt.Shard(0)}})
    ...     def step():
    ...         places = strategy.batch(sequence=None)
    ...         x = dt.shard_tensor(torch.ones(64, 8), strategy.stages()[0], places)
    ...         model(x).sum().backward()
    ...     return step
    >>> table = dt.plan_strategy(build_with, 4, [dt.Strategy(tp=4), dt.Strategy(tp=8)])
    >>> table.best.tp, [c.fits for c in table.candidates]
    (4, [True, False])
    """
    check_callable("plan_strategy: build_with", build_with, "a function of a Strategy")
    check_int("plan_strategy: world", world, 1, "a number of ranks")
    check_type("plan_strategy: device", device, Device, "a dt.devices.Device")
    check_type("plan_strategy: network", network, Network, "a dt.devices.Network")
    check_values("plan_strategy", values)
    check_type("plan_strategy: like", like, Strategy, "a Strategy")
    check_int("plan_strategy: most", most, 1, "a number of strategies")
    if memory is not None:
        check_positive("plan_strategy: memory", memory, "a number of bytes")
    if progress is not None:
        check_callable("plan_strategy: progress", progress, "a function of a line")
    room = device.memory if memory is None else memory
    say = progress or _shown
    search = Search(build_with, world, device, network, values, room, like, most, say)
    try:
        if candidates is None:
            return StrategyTable.of(world, search.all())
        expected = "a list of strategies"
        listed = check_sequence("plan_strategy: candidates", candidates, expected)
        for one in listed:
            check_type("plan_strategy: candidates: entry", one, Strategy, expected)
        if not listed:
            raise ValueError("plan_strategy: candidates are empty: give one strategy at least")
        return StrategyTable.of(world, [search.simulate(strategy) for strategy in listed])
    finally:
        if progress is None:
            _shown("")


def _shown(line: str) -> None:
    """On a terminal, in place of the line before; "" ends it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line[:100]}", end="", file=sys.stderr, flush=True)
