"""A kind of rank: communication, memory, computation and time of one of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from disttensor.comm.log import CommLog
from disttensor.simulate.devices import Network
from disttensor.simulate.events import Collective, Event, Message, Op
from disttensor.simulate.layer_shares import Flops, added
from disttensor.simulate.memory import Memory
from disttensor.simulate.transfers import RankRow

Volume = dict[str, tuple[int, int]]
Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Kind:
    """Ranks that do the same as ``rank``.

    comms     its collectives and the messages that it sends, as ``record_comms`` returns them
    memory    in bytes by category
    timeline  its spans, in seconds
    stage     of the ranks in the first pipeline run of the step; None: there is none
    """

    ranks: tuple[int, ...]
    rank: int
    comms: CommLog
    memory: Memory
    events: list[Event] = field(repr=False)
    timeline: RankRow = field(default_factory=RankRow, repr=False)
    stage: int | None = None

    @property
    def peak_memory(self) -> int:
        """The most bytes that its tensors hold at one time in the step."""
        return self.memory.peak

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank in the step, by torch's formulas."""
        return sum(e.flops for e in self.events if isinstance(e, Op))

    @property
    def model_ops(self) -> list[Op]:
        """The operators with FLOPs of forwards and backwards, without those that run again."""
        ops = [e for e in self.events if isinstance(e, Op) and e.flops]
        return [op for op in ops if not op.again and op.phase != "optimizer"]

    @property
    def model_flops(self) -> int:
        """The FLOPs of forwards and backwards, without those that are computed again."""
        return sum(op.flops for op in self.model_ops)

    @cached_property
    def layers(self) -> Flops:
        """FLOPs of one rank by module and phase: ``{"mlp.up": {"forward": 8, "backward": 16}}``. A
        module does not include the modules inside. The name is its path in the model; "(outside
        modules)" is the rest."""
        ops = (e for e in self.events if isinstance(e, Op) and e.flops)
        return added((e.layer, {e.phase: e.flops}, 1) for e in ops)

    def flops_by(self, by: str = "phase") -> dict[str, int]:
        """Returns the FLOPs of one rank by "phase", "layer", "where", "dtype" or "name" of the
        operator."""
        out: Counter[str] = Counter()
        for e in self.events:
            if isinstance(e, Op) and e.flops:
                out[str(getattr(e, by))] += e.flops
        return dict(out)

    def volume(self, by: str = "axis") -> Volume:
        """Returns (number, bytes) of the collectives and sent messages of one rank, by a field of
        CommRecord: "axis", "kind", "phase" or "where". The axis of messages is "stages"."""
        found = _totals(
            ("stages" if by == "axis" and r.kind == "send" else str(getattr(r, by)), r.bytes)
            for r in self.comms
        )
        return dict(sorted(found.items()))

    def sent_by_phase(self, axis: str) -> dict[str, int]:
        """Returns the bytes that one rank sends over an axis, by phase."""
        over = [
            (e.phase, e.nbytes)
            for e in self.events
            if (isinstance(e, Collective) and e.axis == axis)
            or (isinstance(e, Message) and e.sends and axis == "stages")
        ]
        return {phase: nbytes for phase, (_, nbytes) in _totals(over).items()}

    def messages(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Returns (number, bytes) of the messages of one rank, by ("sent" or "received", phase)."""
        return _totals(
            (("sent" if e.sends else "received", e.phase), e.nbytes)
            for e in self.events
            if isinstance(e, Message)
        )

    def between_nodes(self, network: Network) -> int:
        """Returns the bytes that one rank sends in collectives over several nodes, and in messages
        to another node."""
        return sum(
            e.nbytes
            for e in self.events
            if (isinstance(e, Collective) and network.crosses(e.ranks))
            or (isinstance(e, Message) and e.sends and network.crosses((self.rank, e.peer)))
        )

    def as_dict(self, network: Network) -> dict[str, Any]:
        """Returns all figures as plain data."""
        return {
            "ranks": list(self.ranks),
            "peak_memory": self.peak_memory,
            "peak_at": self.memory.where,
            "memory_at_peak": self.memory.at_peak,
            "stage": self.stage,
            "flops": self.flops,
            "flops_by_layer": self.layers,
            "flops_by_line": self.flops_by("where"),
            "flops_by_phase": self.flops_by("phase"),
            "comms": {
                by: {key: {"count": n, "bytes": b} for key, (n, b) in self.volume(by).items()}
                for by in ("axis", "kind", "phase", "where")
            },
            "messages": [
                {"way": way, "phase": phase, "count": n, "bytes": b}
                for (way, phase), (n, b) in sorted(self.messages().items())
            ],
            "bytes_between_nodes": self.between_nodes(network),
            "seconds": {
                "compute": self.timeline.total("compute"),
                "wait_for_ranks": self.timeline.total("wait for ranks"),
                "wait_for_stages": self.timeline.total("wait for a stage"),
                "all": self.timeline.end,
            },
        }


def _totals(sizes: Iterable[tuple[Key, int]]) -> dict[Key, tuple[int, int]]:
    """Returns the number and the sum of the sizes of each key."""
    out: dict[Key, tuple[int, int]] = {}
    for key, nbytes in sizes:
        n, total = out.get(key, (0, 0))
        out[key] = n + 1, total + nbytes
    return out


def names_of(ranks: Sequence[int]) -> str:
    """Returns the names of ranks as ``0-3, 8``. Of many runs only the first ones are named."""
    runs = groupby(enumerate(ranks), lambda numbered: numbered[1] - numbered[0])
    ends = [(run[0][1], run[-1][1]) for run in ([*numbered] for _, numbered in runs)]
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ends]
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")
