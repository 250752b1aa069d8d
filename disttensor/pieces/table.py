"""Table: the parameters and buffers of a module, with their placements and the bytes on a rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from torch import nn

from disttensor.comm.process_group import world
from disttensor.core.layout import describe, replicated
from disttensor.core.placement import show
from disttensor.fsdp.engine import engines
from disttensor.nn.parameters import slots
from disttensor.pieces.names import listed
from disttensor.pieces.picture import bytes_on
from disttensor.simulate.text import amount
from disttensor.tensor.dist_tensor import DistTensor

_HEAD = ("name", "tensor", "placements", "on", "bytes on a rank")


class TensorRow(NamedTuple):
    """A parameter or buffer.

    Attributes:
        name: in the module.
        tensor: dtype, global shape and layout, as ``f32[64@tp, 16]``.
        placements: by mesh axis, as ``[R, S(0)]``; "regular" for a tensor without a mesh.
        ranks: the ranks of its mesh.
        nbytes: the bytes that each of these ranks holds. 0 for a tied tensor that an earlier row
            counts.
        note: "buffer", or the earlier name of a tied tensor.
    """

    name: str
    tensor: str
    placements: str
    ranks: tuple[int, ...]
    nbytes: tuple[int, ...]
    note: str


@dataclass(frozen=True, repr=False)
class Table:
    """The tensors of a module. ``print`` shows it as text, a notebook as an HTML table.

    Attributes:
        title: the module, and its number of tensors.
        rows: of all tensors, one each. The text shows equal tensors of numbered layers in one line.
        nbytes: rank -> bytes of all tensors that it holds.
        notes: other memory.
    """

    title: str
    rows: list[TensorRow]
    nbytes: dict[int, int]
    notes: list[str]

    @classmethod
    def of(cls, module: nn.Module, title: str = "") -> Table:
        sizes: dict[Any, Any] = {}
        names: dict[int, str] = {}
        rows = []
        nbytes = dict.fromkeys(range(world()[1]), 0)
        for name, owner, table, _, x in slots(module):
            first = names.setdefault(id(x), name)
            note = "buffer" if table is owner._buffers else ""
            if not isinstance(x, DistTensor):
                lazy = nn.parameter.is_lazy(x)
                text = str(x) if lazy else describe(x.shape, x.dtype, replicated(x.ndim), ())
                places, ranks = "regular", tuple(nbytes)
                held = (0 if lazy else x.numel() * x.itemsize,) * len(ranks)
            else:
                spec = x.spec.on_root()
                if spec not in sizes:
                    sizes[spec] = bytes_on(spec)
                text, places = repr(spec), show(spec.placements)
                ranks, held = spec.mesh.ranks, sizes[spec]
            if first != name:
                note, held = f"= {first}", (0,) * len(ranks)
            for rank, n in zip(ranks, held, strict=True):
                nbytes[rank] += n
            rows.append(TensorRow(name, text, places, ranks, held, note))
        return cls(title or type(module).__name__, rows, nbytes, _notes(set(names)))

    def _cells(self) -> list[tuple[str, ...]]:
        """Returns the lines, without the head: equal tensors of numbered layers are one."""
        alike: dict[Any, list[TensorRow]] = {}
        for row in self.rows:
            kind = tuple("*" if part.isdigit() else part for part in row.name.split("."))
            note = row.note if row.note in ("", "buffer") else row.name
            alike.setdefault((kind, *row[1:-1], note), []).append(row)
        out: list[tuple[str, ...]] = []
        for rows in alike.values():
            _, tensor, places, ranks, held, note = rows[0]
            parts = [set(same) for same in zip(*(r.name.split(".") for r in rows), strict=True)]
            name = ".".join("*" if len(same) > 1 else same.pop() for same in parts)
            times = f"{len(rows)} x " if len(rows) > 1 else ""
            last = note if note.startswith("=") else times + _between(held)
            name += " (buffer)" if note == "buffer" else ""
            out.append((name, tensor, places, listed(ranks), last))
        by_rank = self.nbytes
        low, high = min(by_rank, key=by_rank.__getitem__), max(by_rank, key=by_rank.__getitem__)
        total = amount(by_rank[low])
        if by_rank[low] < by_rank[high]:
            total += f" (rank {low}) to {amount(by_rank[high])} (rank {high})"
        out.append((f"sum of {len(self.rows)}", "", "", listed(tuple(by_rank)), total))
        return out

    def __repr__(self) -> str:
        cells = [_HEAD, *self._cells()]
        wide = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(row[:-1], wide, strict=False)), row[-1]])
            for row in cells
        ]
        return "\n".join([self.title, "", *lines, *([""] if self.notes else []), *self.notes])

    def _repr_html_(self) -> str:
        """Returns a table in the colours of the page."""
        style = ' style="text-align: left; white-space: nowrap"'
        lines = [f"<p>{escape(self.title)}</p>", "<table>"]
        for i, row in enumerate([_HEAD, *self._cells()]):
            kind = "td" if i else "th"
            cells = (f"<{kind}{style}>{escape(cell)}</{kind}>" for cell in row)
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</table>", *(f"<p>{escape(n)}</p>" for n in self.notes), ""])


def _between(held: tuple[int, ...]) -> str:
    low, high = min(held), max(held)
    return amount(low) + (f" to {amount(high)}" if low < high else "")


def _notes(ids: set[int]) -> list[str]:
    """Describes the memory of the parameters that shard_data_parallel gathers."""
    kept, brief = Counter[int](), 0
    for segment in (s for engine in engines() for s in (*engine.segments, *engine.off_mesh)):
        if any(id(p.sharded_param) in ids for p in segment.params):
            gathered = Counter[int]()
            for spec in (p.spec.on_root() for p in segment.copied):
                gathered.update(dict(zip(spec.mesh.ranks, bytes_on(spec), strict=True)))
            if segment.persist:
                kept.update(gathered)
            else:
                brief = max([brief, *gathered.values()])
    out = []
    if kept:
        out.append(f"gathered copies that are kept: {amount(max(kept.values()))} on a rank")
    if brief:
        out.append(f"gathered copies of one segment, freed after its use: {amount(brief)} at most")
    return out
