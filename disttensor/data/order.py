"""The order of the samples of an epoch: the rows of each global batch that this rank loads, and the
position from which another run continues."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from disttensor.data.entries import Places, rows_of

Tensor = torch.Tensor
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass
class LoaderPosition:
    """A position in the samples, from which a run can continue.

    Args:
        samples: the samples of this epoch that were given.
        digest: a digest of their indices, in order.
        generators: the states of the loader's generators at the begin of this epoch; between two
            epochs, the present ones.
        inside: an epoch has begun and has not ended.
        epochs: the number of epochs that have begun before this one.
        last: the digest of the last complete epoch.
        later: the states of the generators after epochs of this loader that have begun before this
            one ended; restored after this one has drawn its order.
        seeds_workers: this epoch draws a seed for its workers; workers that persist have theirs
            from the first epoch.
    """

    samples: int = 0
    digest: str = ""
    generators: list[Tensor] = field(default_factory=list)
    inside: bool = False
    epochs: int = 0
    last: str = ""
    later: list[Tensor] = field(default_factory=list)
    seeds_workers: bool = True


class BatchRows(NamedTuple):
    """The samples of a global batch, of which this rank loads those from ``first`` to ``stop``.
    ``digest``: of the indices of the epoch up to the end of the batch."""

    samples: int
    first: int
    stop: int
    digest: str


class Digest:
    """A running digest of indices, which does not depend on how they are divided into batches."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, indices: Sequence[Any]) -> str:
        """Adds indices, and returns the digest of all."""
        text = repr(indices)[1:-1]
        if " at 0x" in text:  # objects, whose addresses differ between ranks
            text = ", ".join(map(_text, indices))
        self._hash.update(f"{text}, ".encode() if indices else b"")
        return self._hash.hexdigest()


def _text(index: Any) -> str:
    """Returns a text of an index without addresses of objects."""
    kind: Any = type(index)
    has_default = kind.__repr__ is object.__repr__
    return _ADDRESS.sub("", repr(getattr(index, "__dict__", index) if has_default else index))


def digest_of(batches: Iterable[Any]) -> str:
    """Returns the digest of all indices of an epoch."""
    digest = Digest()
    for batch in batches:
        digest.add(list(batch))
    return digest.add([])


class Order(Iterator[list[Any]]):
    """Iterates over the indices that this rank loads in one epoch, for a DataLoader, which reads
    some batches in advance. Batches of which this rank loads no sample are left out.

    Args:
        batches: the indices of the global batches.
        places: the placements for which this rank loads samples.
        begin: the samples that are left out, and their digest.
    """

    def __init__(
        self, batches: Iterable[Any], places: Sequence[Places], begin: LoaderPosition
    ) -> None:
        self._digest, self._begin = Digest(), begin
        self._batches = filter(None, map(list, batches))
        self._rest: list[Any] = []  # of the batch in which the saved position lies
        self._places = places
        self._rows: deque[BatchRows] = deque()
        self._indices: deque[list[Any]] = deque()

    def __next__(self) -> list[Any]:
        while not self._indices:
            self._read()
        return self._indices.popleft()

    def next_rows(self) -> BatchRows | None:
        """Returns the next global batch of the training loop, or None at the end of the epoch."""
        try:
            if not self._rows:
                self._read()
        except StopIteration:
            return None
        return self._rows.popleft()

    def start(self) -> None:
        """Makes the sampler draw the order of the epoch, and reads no more than the saved run had
        read at this position."""
        if self._begin.samples:
            self._skip()
        elif not self._rows:
            self._read()

    def _read(self) -> None:
        """Reads a global batch. Raises StopIteration at the end of the epoch."""
        if self._begin.samples:
            self._skip()
        batch, self._rest = self._rest or next(self._batches), []
        digest = self._digest.add(batch)
        ranges = [r for r in (rows_of(len(batch), *p) for p in self._places) if r[0] < r[1]]
        first = min((r[0] for r in ranges), default=0)
        stop = max((r[1] for r in ranges), default=0)
        self._rows.append(BatchRows(len(batch), first, stop, digest))
        if first < stop:
            self._indices.append(batch[first:stop])

    def _skip(self) -> None:
        """Leaves out the samples of the saved position. Raises ValueError if they have other
        indices than in the run that was saved."""
        begin, self._begin, digest = self._begin, LoaderPosition(), ""
        left = begin.samples
        while left and (batch := next(self._batches, None)):
            self._rest = batch[left:]
            digest = self._digest.add(batch[:left])
            left -= len(batch) - len(self._rest)
        if begin.digest and digest != begin.digest:
            raise ValueError(
                f"shard_loader: the {begin.samples} samples before the saved position are not "
                "those of the run that was saved: the sampler gives another order, so some samples "
                "would come twice and others never. The order follows from the generator of the "
                "loader or of its sampler (an attribute `generator`), or the sampler gives the "
                "same epochs in each run"
            )
