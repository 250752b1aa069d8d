"""Finds reasons for warnings: uneven work, axes in the wrong order, memory that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disttensor.simulate.devices import Device, Network
from disttensor.simulate.events import Collective
from disttensor.simulate.kind import Kind, names_of
from disttensor.simulate.text import amount

_UNEVEN = 1.2  # times the mean
_MANY = 0.5  # of the peak
_LARGE = 0.2  # of the peak, of one tensor
_NEARLY = 0.8  # of the memory of a device
_IN_SEGMENTS = {
    "parameters", "gathered parameters", "optimizer state", "gradients", "communication",
}  # fmt: skip


def findings(kinds: Sequence[Kind], device: Device, network: Network) -> list[str]:
    """Returns sentences, each with a fact and its remedy."""
    return [
        *_uneven(kinds),
        *_wrong_way_round(kinds, network),
        *_too_full(kinds, device),
        *_large(kinds),
    ]


def _uneven(kinds: Sequence[Kind]) -> Iterator[str]:
    """Yields the stages with more work than the mean, equal ones in one sentence, and the ranks
    with more work than the mean of their own stage."""
    stages: dict[int | None, list[Kind]] = {}
    for k in kinds:
        stages.setdefault(k.stage, []).append(k)
    mean, busy = _mean_work(kinds), dict[str, list[int]]()
    ahead: list[Kind] = []
    for stage, those in stages.items():
        work = _mean_work(those)
        ahead += [k for k in those if k.timeline.total("compute") > _UNEVEN * work]
        if stage is not None and work > _UNEVEN * mean:
            busy.setdefault(f"{work:.3g} s, {work / mean - 1:.0%} longer", []).append(stage)
    for longer, found in busy.items():
        ranks = sorted(r for stage in found for k in stages[stage] for r in k.ranks)
        yield (
            f"ranks {names_of(ranks)} compute for {longer} than the mean of all ranks "
            f"({mean:.3g} s), and the others wait for them: give stage{'s'[: len(found) > 1]} "
            f"{names_of(sorted(found))} fewer layers"
        )
    if ahead:
        peers = "all ranks" if None in stages else "their stage"
        most = max(k.timeline.total("compute") / _mean_work(stages[k.stage]) for k in ahead)
        yield (
            f"ranks {names_of(sorted(r for k in ahead for r in k.ranks))} compute up to "
            f"{most - 1:.0%} longer than the mean of {peers}, as others have smaller "
            "pieces or none: split what the axes divide (rows of a micro-batch, heads, experts)"
        )


def _mean_work(kinds: Sequence[Kind]) -> float:
    """Returns the mean seconds for which a rank computes."""
    ranks = sum(len(k.ranks) for k in kinds)
    return sum(k.timeline.total("compute") * len(k.ranks) for k in kinds) / ranks


def _wrong_way_round(kinds: Sequence[Kind], network: Network) -> Iterator[str]:
    """Yields axes that would fit into a node, and span several, while an axis that sends less does
    not."""
    sent: dict[str, int] = {}
    sizes: dict[str, int] = {}
    across: set[str] = set()
    for k in kinds:
        for e in k.events:
            if isinstance(e, Collective):
                sent[e.axis] = sent.get(e.axis, 0) + e.nbytes * len(k.ranks)
                sizes[e.axis] = len(e.ranks)
                if network.crosses(e.ranks):
                    across.add(e.axis)
    for axis in sorted(across):
        if sizes[axis] > network.ranks_per_node:
            continue
        inside = [a for a in sent if a not in across and sent[a] < sent[axis]]
        if inside:
            other = min(inside, key=lambda a: sent[a])
            yield (
                f"axis {axis} ({sizes[axis]} ranks) sends {amount(sent[axis])} between nodes, "
                f"while {other}, which sends {amount(sent[other])}, lies within one: swap the two, "
                f"so that {axis} comes after {other} in the mesh"
            )


def _too_full(kinds: Sequence[Kind], device: Device) -> Iterator[str]:
    """Yields ranks whose memory does not fit, or nearly so, with the bytes that recomputation
    saves."""
    if device.memory is None:
        return
    said: dict[str, list[int]] = {}
    for k in kinds:
        if k.peak_memory <= _NEARLY * device.memory:
            continue
        kept = k.memory.at_peak.get("activations", 0)
        way = "shard more (zero_stage, tp, pp)"
        if kept > _MANY * k.peak_memory:
            line = max(k.memory.kept, key=lambda at: k.memory.kept[at])
            way = (
                f"{amount(kept)} of it are activations, {amount(k.memory.kept[line])} made at "
                f"{line}: recompute them (Strategy.recompute), which computes their forward twice"
            )
        elif k.peak_memory <= device.memory:
            continue
        need = f"need {amount(k.peak_memory)}, and {device.name} has {amount(device.memory)}; {way}"
        said.setdefault(need, []).extend(k.ranks)
    for need, ranks in said.items():
        yield f"ranks {names_of(sorted(ranks))} {need}"


def _large(kinds: Sequence[Kind]) -> Iterator[str]:
    """Yields tensors that are larger than all segments of gathered parameters."""
    said = set[str]()
    for k in kinds:
        segment, _ = k.memory.largest.get("gathered parameters", (0, ""))
        others = [found for name, found in k.memory.largest.items() if name not in _IN_SEGMENTS]
        nbytes, line = max(others, default=(0, ""))
        if 0 < segment < nbytes and nbytes > _LARGE * k.peak_memory and line not in said:
            said.add(line)
            yield (
                f"a tensor of {amount(nbytes)} made at {line} is larger than the largest segment "
                f"of gathered parameters ({amount(segment)}) and {nbytes / k.peak_memory:.0%} of "
                f"the peak of ranks {names_of(k.ranks)}: smaller segments save nothing there; use "
                "smaller micro-batches, or split the dim of this tensor over tp or cp"
            )
