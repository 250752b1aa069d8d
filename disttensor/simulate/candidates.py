"""Lists all strategies of a world, for a batch of some rows and a model of some layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from disttensor.fsdp.segment_policy import SegmentBySize
from disttensor.parallel.degrees import divisors
from disttensor.parallel.strategy import Strategy
from disttensor.pipeline.schedules import NAMES
from disttensor.simulate.devices import Network
from disttensor.simulate.probe import Probe

LARGE = SegmentBySize(128)  # MiB; the engine has segments of its own size


@dataclass(frozen=True)
class ProgramShape:
    """The facts that decide which strategies a program can run under.

    rows             of its batch; None: not known
    layers           the names of its layers in order
    blocks           the names of the layers of the most frequent class
    splits_sequence  whether cp splits a sequence
    """

    rows: int | None = None
    layers: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    splits_sequence: bool = True

    @classmethod
    def of(cls, probe: Probe) -> ProgramShape:
        kinds: dict[str, list[str]] = {}
        for layer in probe.layers:
            kinds.setdefault(layer.kind, []).append(layer.name)
        most = max(kinds.values(), key=len, default=[])
        blocks = tuple(most) if len(most) > 1 else ()
        names = tuple(layer.name for layer in probe.layers)
        return cls(probe.rows, names, blocks, probe.splits_sequence)


def strategies(
    world: int, network: Network, program: ProgramShape, like: Strategy
) -> Iterator[tuple[Strategy, str]]:
    """Yields all strategies, each with "" or the reason why the program cannot run under it. One
    strategy stands for all that the same degree rules out.

    Args:
        world: the number of ranks.
        network: tp stays within its nodes.
        program: the program.
        like: its options are kept, except degrees, schedule, recomputation and segments.
    """
    for tp in divisors(world):
        if tp > network.ranks_per_node:
            yield replace(like, tp=tp), "tp over nodes"
            continue
        for cp, pp in itertools.product(divisors(world // tp), repeat=2):
            if world // tp % (cp * pp):
                continue
            one = replace(like, tp=tp, cp=cp, pp=pp)
            data = world // (tp * cp * pp)
            reason = _ruled_out(cp, pp, program, data)
            if reason:
                yield one, reason
            else:
                yield from ((changed, "") for changed in _with_data(one, pp, program, data))


def _ruled_out(cp: int, pp: int, program: ProgramShape, data: int) -> str:
    if cp > 1 and not program.splits_sequence:
        return "cp splits nothing: strategy.batch() has it split a sequence"
    if pp > 1 and not program.layers:
        return "stages of which layers? apply(..., layers=[...])"
    if pp > 1 and pp > len(program.layers):
        return f"{pp} stages of {len(program.layers)} layers"
    if program.rows is not None and data > program.rows:
        return f"{program.rows} rows over {data} ranks"
    return ""


def _with_data(one: Strategy, pp: int, program: ProgramShape, data: int) -> Iterator[Strategy]:
    """Yields every division of ``data`` ranks into dp and sharding, with every number of
    micro-batches, schedule and recomputation."""
    enough = 2 * pp <= len(program.layers)
    schedules = [name for name, made in NAMES.items() if enough or not made.needs_stages]
    for steps, schedule, names in itertools.product(
        _micro_batches(program.rows, data, pp),
        schedules if pp > 1 else ["1f1b"],
        _recomputations(program),
    ):
        recompute = tuple(dict.fromkeys((*one.recompute, *names)))
        base = replace(one, accumulate_steps=steps, schedule=schedule, recompute=recompute)
        yield replace(base, dp=data, sharding=1, zero_stage=None)
        for sharding, stage, segments in itertools.product(
            divisors(data)[1:], (1, 2, 3), {one.segments, LARGE}
        ):
            yield replace(
                base, dp=data // sharding, sharding=sharding, zero_stage=stage, segments=segments
            )


def _micro_batches(rows: int | None, data: int, pp: int) -> list[int]:
    """Returns the numbers of micro-batches that give each rank equally many rows, or else at least
    one row."""
    if rows is None:
        return [1] if pp == 1 else [pp, 2 * pp, 4 * pp]
    enough = [n for n in divisors(rows) if rows // n >= data]
    return [n for n in enough if rows // n % data == 0] or enough


def _recomputations(program: ProgramShape) -> list[tuple[str, ...]]:
    """Returns three choices: no layer, the blocks, all layers."""
    choices = (), _globs(program.blocks, program.layers), _globs(program.layers, program.layers)
    return list(dict.fromkeys(choices))


def _globs(names: Sequence[str], layers: Sequence[str]) -> tuple[str, ...]:
    """Replaces numbered layers by a glob, as ``blocks.*``, where ``names`` has all of them."""
    out: dict[str, None] = {}
    for name in names:
        parent, _, number = name.rpartition(".")
        alike = [n for n in layers if n.rpartition(".")[0] == parent]
        numbers = number.isdigit() and parent and set(alike) <= set(names)
        out[f"{parent}.*" if numbers else name] = None
    return tuple(out)
