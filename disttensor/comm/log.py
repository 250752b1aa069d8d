"""record_comms: records each collective, with its mesh axis and the user's source line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from disttensor.errors import user_line
from disttensor.observe import Observer, observers
from disttensor.torch_private import current_backward

OVERLAPPED = ", overlapped"  # in a table: the phase of a collective in the background
WAITED = ", waited for at"


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective on this rank. ``bytes``: sent by this rank (ring algorithms). ``background``:
    asynchronous, waited for where its result is needed. ``waited``: the line that waits; "" before.

    >>> from disttensor.debugging import CommRecord
    >>> CommRecord("all_reduce", "tp", 96, "backward", "train.py:7", (4, 6), torch.float32).axis
    'tp'
    """

    kind: str
    axis: str
    bytes: int
    phase: str
    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    background: bool = False
    waited: str = ""


@dataclass(eq=False)
class CommLog(Observer):
    """The collectives of a ``with record_comms()`` block: a sequence of CommRecord, printed as a
    table.

    >>> with dt.debugging.record_comms() as log:
    ...     total = dt.ones(4, mesh=mesh).sum().item()
    >>> isinstance(log, dt.debugging.CommLog), len(log), log.total_bytes, log.counts("forward")
    (True, 0, 0, {})
    """

    records: list[CommRecord] = field(default_factory=list)

    def communicate(self, record: CommRecord) -> None:
        self.records.append(record)

    def __iter__(self) -> Iterator[CommRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> CommRecord:
        return self.records[i]

    @property
    def total_bytes(self) -> int:
        return sum(r.bytes for r in self.records)

    def counts(self, phase: str | None = None) -> dict[str, int]:
        """Returns the collectives per kind, of one phase ("forward", "backward") or of both."""
        return dict(Counter(r.kind for r in self.records if phase in (None, r.phase)))

    def __str__(self) -> str:
        rows = [("kind", "axis", "bytes", "phase", "shape", "where")]
        rows += [
            (
                r.kind,
                r.axis,
                f"{r.bytes:,}",
                r.phase + OVERLAPPED * r.background,
                str(list(r.shape)),
                r.where + f"{WAITED} {r.waited}" * bool(r.waited),
            )
            for r in self.records
        ]
        rows.append(("total", str(len(self.records)), f"{self.total_bytes:,}", "", "", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def record_comms() -> CommLog:
    """Records one CommRecord per collective of this rank, forward and backward: ``with
    record_comms() as log:``.

    >>> with dt.debugging.record_comms() as log:
    ...     total = dt.ones(4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).sum().item()
    >>> print(log)
    kind   axis  bytes  phase  shape  where
    total  0     0
    """
    return CommLog()


def record(
    kind: str, axes: tuple[str, ...], nbytes: int, shape: Any, dtype: torch.dtype,
    background: bool = False,
) -> CommRecord:  # fmt: skip
    phase = "backward" if current_backward() != -1 else "forward"
    where = user_line()
    entry = CommRecord(kind, "+".join(axes), nbytes, phase, where, tuple(shape), dtype, background)
    for o in observers:
        o.communicate(entry)
    return entry


def record_wait(entry: CommRecord) -> None:
    """Records that this line waits for the collective; only this field is set later."""
    object.__setattr__(entry, "waited", user_line())
