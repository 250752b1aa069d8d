"""How the ranks of one world hold a tensor, as facts that another world reads, and which pieces the
ranks of one world send to the ranks of another."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from disttensor.checkpoint.load_pretrained import locate
from disttensor.checkpoint.safetensors_files import Stored
from disttensor.core.layout import Box, box_at
from disttensor.tensor.checkpointable import spec_of_boxes
from disttensor.tensor.dist_tensor import DistTensor
from reshard.routing import Routing

Tensor = torch.Tensor


class WorldTensor(NamedTuple):
    """A tensor of ``shape`` on a ``mesh`` (a shape) of ``ranks``; ``dims``: the mesh axes that
    split each of its dims. ``dtype``: its name. ``parts``: of a tensor that is received, the
    (number of a sent tensor, first row, one past the last row) that form it."""

    shape: Sequence[int]
    dtype: str
    dims: Sequence[Sequence[int]]
    mesh: Sequence[int]
    ranks: Sequence[int]
    parts: Sequence[tuple[int, int, int]] = ()

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype, size: int) -> WorldTensor:
        """Returns the facts of ``x``. A regular tensor is whole on all ``size`` ranks."""
        name, shape = str(dtype).removeprefix("torch."), tuple(x.shape)
        if not isinstance(x, DistTensor):
            return cls(shape, name, ((),) * x.ndim, (size,), tuple(range(size)))
        spec = spec_of_boxes(x.spec).on_root()
        return cls(shape, name, spec.layout.dims, spec.mesh.shape, spec.mesh.ranks)

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """Yields each rank, and the box that it holds."""
        places = itertools.product(*map(range, self.mesh))
        dims = [tuple(axes) for axes in self.dims]
        for rank, place in zip(self.ranks, places, strict=True):
            yield rank, box_at(self.shape, dims, tuple(self.mesh), place)

    def box_of(self, rank: int) -> Box | None:
        return dict(self.boxes()).get(rank)

    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def as_stored(self, name: str, number: int) -> Stored:
        """Returns the tensor as ``locate`` expects it: ``begin`` is its number."""
        return Stored(name, self.torch_dtype(), tuple(self.shape), Path(name), number)


def tensors_of(model: nn.Module) -> tuple[dict[str, int], list[Tensor]]:
    """Returns the number of each name in the model's state, and the tensors by number. A tied
    tensor has one number."""
    numbers, tensors = dict[str, int](), list[Tensor]()
    known: dict[int, int] = {}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Tensor):
            if id(value) not in known:
                known[id(value)] = len(tensors)
                tensors.append(value)
            numbers[name] = known[id(value)]
    return numbers, tensors


class SentPiece(NamedTuple):
    """``source``: the box of the sent tensor, ``target``: its place in the received tensor; both
    by the number of the tensor."""

    sent: int
    source: Box
    received: int
    target: Box
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.source.numel * self.dtype.itemsize


def plan_pieces(
    sent: Sequence[WorldTensor], received: Sequence[WorldTensor], size: int
) -> dict[tuple[int, int], list[SentPiece]]:
    """Returns the pieces of each (sender, receiver), the same on all ranks of both worlds. Receiver
    r has the number ``size`` + r. Each piece is sent once to each receiver, by the holder that has
    to send the fewest bytes so far. Pieces of wide elements come first, so that all are aligned."""
    pieces: dict[tuple[int, int], list[SentPiece]] = defaultdict(list)
    total = dict.fromkeys(range(size), 0)  # bytes, by sender
    stored = [one.as_stored("", number) for number, one in enumerate(sent)]
    held = [{rank: ((), box) for rank, box in one.boxes()} for one in sent]
    for i, target_facts in enumerate(received):
        parts = [(stored[number], start, stop) for number, start, stop in target_facts.parts]
        places: list[dict[int, tuple[Box, Box]]] = [{} for _ in parts]
        for rank, box in target_facts.boxes():
            for n, source, target in locate(box, parts):
                places[n][size + rank] = source, target
        for (one, _, _), place in zip(parts, places, strict=True):

            def nearest(receiver: int, holder: int, elements: int, one: Stored = one) -> Any:
                return total[holder] + elements * one.dtype.itemsize, (holder - receiver) % size

            needed = {rank: ((), source) for rank, (source, _) in place.items()}
            routing = Routing(held[one.begin], needed, nearest)
            for (sender, receiver), box in routing.messages.items():
                source, target = place[receiver]
                offset = zip(box.offset, source.offset, target.offset, strict=True)
                moved = Box(tuple(a - b + c for a, b, c in offset), box.shape)
                piece = SentPiece(one.begin, box, i, moved, one.dtype)
                pieces[sender, receiver].append(piece)
            for rank, elements in routing.sent.items():
                total[rank] += elements * one.dtype.itemsize
    for some in pieces.values():
        some.sort(key=lambda piece: -piece.dtype.itemsize)
    return pieces
