"""All strategies of a world, for a batch of so many rows and a model of so many layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disttensor.fsdp.segment_policy import SegmentBySize
from disttensor.parallel.strategy import Strategy
from disttensor.pipeline.schedules import NAMES
from disttensor.simulate.devices import Network
from disttensor.simulate.probe import Probe

LARGE = SegmentBySize(128)  # MiB; without segments those of the engine


@dataclass(frozen=True)
class Program:
    """What of a program decides which strategies it can run under: the ``rows`` of its batch (None:
    not known), the names of its ``layers`` in order, of those that are alike (``blocks``), and
    whether cp splits something."""

    rows: int | None = None
    layers: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    splits_sequence: bool = True

    @classmethod
    def of(cls, probe: Probe) -> Program:
        names = tuple(layer.name for layer in probe.layers)
        kinds: dict[str, list[str]] = {}
        for layer in probe.layers:
            kinds.setdefault(layer.kind, []).append(layer.name)
        most = max(kinds.values(), key=len, default=[])
        blocks = tuple(most) if len(most) > 1 else ()
        return cls(probe.rows, names, blocks, probe.splits_sequence)


def strategies(
    world: int, network: Network, program: Program, like: Strategy
) -> Iterator[tuple[Strategy, str]]:
    """(a strategy, "" or why it is none for this program). One of those that a degree rules out
    stands for all of them. What no axis, schedule or recomputation decides is as in ``like``."""
    for tp in _divisors(world):
        if tp > network.ranks_per_node:
            yield replace(like, tp=tp), "tp over nodes"
            continue
        for cp, pp in itertools.product(_divisors(world // tp), repeat=2):
            if world // tp % (cp * pp):
                continue
            one = replace(like, tp=tp, cp=cp, pp=pp)
            data = world // (tp * cp * pp)
            reason = _ruled_out(one, program, data)
            if reason:
                yield one, reason
                continue
            for changed in _with_data(one, program, data):
                yield changed, ""


def _ruled_out(one: Strategy, program: Program, data: int) -> str:
    cp, pp = one.cp or 1, one.pp or 1
    if cp > 1 and not program.splits_sequence:
        return "cp splits nothing: strategy.batch() has it split a sequence"
    if pp > 1 and not program.layers:
        return "stages of which layers? apply(..., layers=[...])"
    if pp > 1 and pp > len(program.layers):
        return f"{pp} stages of {len(program.layers)} layers"
    if program.rows is not None and data > program.rows:
        return f"{program.rows} rows over {data} ranks"
    return ""


def _with_data(one: Strategy, program: Program, data: int) -> Iterator[Strategy]:
    """Every way to divide ``data`` ranks, every number of micro-batches, schedule and
    recomputation."""
    pp = one.pp or 1
    schedules = ["1f1b"] if pp == 1 else [
        name for name, made in NAMES.items()
        if not made.needs_stages or 2 * pp <= len(program.layers)
    ]  # fmt: skip
    for steps, schedule, names in itertools.product(
        _micro_batches(program.rows, data, pp), schedules, _recomputed(program)
    ):
        again = like_names(one.recompute, names)
        base = replace(one, accumulate_steps=steps, schedule=schedule, recompute=again)
        for sharding in _divisors(data):
            if sharding == 1:
                yield replace(base, dp=data, sharding=1, zero_stage=None)
                continue
            for stage, segments in itertools.product((1, 2, 3), {one.segments, LARGE}):
                yield replace(
                    base, dp=data // sharding, sharding=sharding, zero_stage=stage,
                    segments=segments,
                )  # fmt: skip


def like_names(given: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """Both, without repetition."""
    return tuple(dict.fromkeys((*given, *names)))


def _micro_batches(rows: int | None, data: int, pp: int) -> list[int]:
    """Numbers of micro-batches in which each rank has as many rows; where there is none, at least
    one row."""
    if rows is None:
        return [1] if pp == 1 else [pp, 2 * pp, 4 * pp]
    enough = [n for n in _divisors(rows) if rows // n >= data]
    return [n for n in enough if rows // n % data == 0] or enough


def _recomputed(program: Program) -> list[tuple[str, ...]]:
    """No layer, those that are alike, all."""
    choices = [(), _short(program.blocks, program.layers), _short(program.layers, program.layers)]
    return list(dict.fromkeys(choices))


def _short(names: Sequence[str], layers: Sequence[str]) -> tuple[str, ...]:
    """Globs for layers with numbers, as ``blocks.*``, where all of these are meant."""
    out: dict[str, None] = {}
    for name in names:
        parent, _, number = name.rpartition(".")
        alike = [n for n in layers if n.rpartition(".")[0] == parent]
        numbers = number.isdigit() and parent and set(alike) <= set(names)
        out[f"{parent}.*" if numbers else name] = None
    return tuple(out)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def shape(strategy: Strategy) -> tuple[Any, ...]:
    """Strategies that differ in nothing of this are much alike."""
    return strategy.pp, strategy.tp, strategy.cp
