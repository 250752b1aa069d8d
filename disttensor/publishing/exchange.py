"""Sends the pieces of a version from the ranks of one world to the ranks of another, over a group
of both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from disttensor.comm.process_group import open_store
from disttensor.comm.wire import as_bytes, dense
from disttensor.core.layout import Box
from disttensor.gradients.sync import in_buckets
from disttensor.publishing.lifeline import PUBLISHER, Lifeline, split_address
from disttensor.publishing.world_tensor import SentPiece, WorldTensor, plan_pieces

Tensor = torch.Tensor


class PieceExchange:
    """The group of a publisher of ``size`` ranks and the world ``receiver`` of ``joining`` ranks,
    as rank ``rank`` of both together. All of these ranks make the object at the same time."""

    def __init__(
        self, line: Lifeline, receiver: str, rank: int, size: int, joining: int, timeout: float,
        sent: Sequence[WorldTensor], received: Sequence[WorldTensor],
    ) -> None:  # fmt: skip
        other = receiver if line.world == PUBLISHER else PUBLISHER
        line.write(f"{receiver}/here/{rank}", "")
        for each in range(size + joining):  # gloo does not see that a rank has ended before
            line.read(f"{receiver}/here/{each}", other, seconds=timeout)
        store = open_store(*split_address("", line.address), keeps=False)
        limit = timedelta(seconds=timeout)
        names = dist.PrefixStore(f"{receiver}/gloo", store)
        self.group: Any = dist.ProcessGroupGloo(names, rank, size + joining, limit)
        self.started: list[tuple[Any, Tensor]] = []
        plan = plan_pieces(sent, received, size)
        self.sends = {r: _messages(p) for (s, r), p in plan.items() if s == rank}
        self.receives = {s: _messages(p) for (s, r), p in plan.items() if r == rank}
        self.holds = [one.box_of(rank) for one in sent] if rank < size else []
        self.dtypes = [one.torch_dtype() for one in received]
        self.needs = [one.box_of(rank - size) for one in received]

    def send(self, tensors: Sequence[Any]) -> int:
        """Sends this rank's pieces of ``tensors``, in the order of ``sent``. Returns the bytes."""
        nbytes = 0
        for messages in _turns(self.sends):
            for number, peer, pieces in messages:
                flat = torch.cat([as_bytes(self._piece(tensors, p)) for p in pieces])
                self.started.append((self.group.send([flat], peer, number), flat))
            nbytes += sum(flat.nbytes for flat in self._wait())
        return nbytes

    def receive(self) -> tuple[list[Tensor | None], int]:
        """Receives this rank's pieces of the ``received`` tensors, in new memory (None: it has no
        piece). Returns them and their bytes."""
        nbytes = 0
        out = [
            None if box is None else torch.empty(box.shape, dtype=dtype, device="cpu")
            for box, dtype in zip(self.needs, self.dtypes, strict=True)
        ]
        for messages in _turns(self.receives):
            for number, peer, pieces in messages:
                flat = torch.empty(sum(p.nbytes for p in pieces), dtype=torch.uint8, device="cpu")
                self.started.append((self.group.recv([flat], peer, number), flat))
            for (_, _, pieces), flat in zip(messages, self._wait(), strict=True):
                nbytes += flat.nbytes
                parts = flat.split([p.nbytes for p in pieces])
                for piece, part in zip(pieces, parts, strict=True):
                    whole, outer = out[piece.received], self.needs[piece.received]
                    assert whole is not None and outer is not None
                    place = piece.target.cut(whole, outer)
                    place.copy_(part.view(piece.dtype).view(piece.target.shape))
        return out, nbytes

    def _piece(self, tensors: Sequence[Any], piece: SentPiece) -> Tensor:
        outer = self.holds[piece.sent]
        assert isinstance(outer, Box)
        return dense(piece.source.cut(tensors[piece.sent], outer))

    def _wait(self) -> list[Tensor]:
        """Waits for the messages of a turn, and returns them."""
        for work, _ in self.started:
            work.wait()
        started, self.started = self.started, []
        return [flat for _, flat in started]

    def close(self) -> None:
        self.group = None  # before the memory of messages that have not ended
        self.started = []


def _messages(pieces: Sequence[SentPiece]) -> list[list[SentPiece]]:
    """Splits the pieces for one rank into messages. A piece is never cut."""
    return [*in_buckets(pieces, [piece.nbytes for piece in pieces])]


def _turns(peers: dict[int, list[list[SentPiece]]]) -> Iterator[list[Any]]:
    """Yields, turn by turn, (number, peer, pieces) of at most one message for each peer. All ranks
    start the first messages before they wait, so no two ranks wait for each other."""
    for number in itertools.count():
        messages = [(number, peer, m[number]) for peer, m in peers.items() if number < len(m)]
        if not messages:
            return
        yield messages
