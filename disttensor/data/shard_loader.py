"""shard_loader: a DataLoader of global batches, of which each rank loads its own samples only.

Every rank iterates over the *indices* of all batches, which is cheap, and loads the samples of its
piece. The ranks compare the order, and shape, dtype and structure of each batch, in one exchange of
a few bytes; a rank without samples gets them from the others. An error of one rank is raised on all
ranks.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from disttensor.core.layout import Box
from disttensor.data.batch import BatchFormat, Placed, Places, entries, exchange, rows_of
from disttensor.pytree import Path, map_paths

Tensor = torch.Tensor
_KEPT = (
    "dataset", "num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
    "multiprocessing_context", "generator", "persistent_workers",
)  # fmt: skip


def shard_loader(loader: Any, mesh: Any, placements: Any) -> ShardedLoader:
    """Converts ``loader``, a torch DataLoader of global batches, to a loader of DistTensors.

    Each rank loads the samples of its own piece of dim 0; ranks outside the mesh load none. Batches
    and their order are the same as in one process with the same seed, including the last batch and
    ``drop_last``. Batches may be tensors, or dicts, lists and tuples of tensors. ``mesh`` and
    ``placements`` apply to all tensors, or are dicts or tuples with a value for each entry of a
    batch: ``(stages[0], stages[-1])``. An entry that ``collate_fn`` computes from all samples of a
    rank, as a count of tokens, has ``Partial("sum")`` (or "max", "min") on the axes that split the
    batch. All ranks of the world iterate together. ``state_dict`` holds the position in samples,
    and can be loaded on any mesh. Raises TypeError for a loader without indices (an
    IterableDataset, ``batch_size=None``), ValueError for placements that do not split dim 0.

    >>> samples = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    >>> loader = torch.utils.data.DataLoader(samples, batch_size=4)
    >>> loader = dt.shard_loader(loader, mesh, [dt.Shard(0), dt.Replicate()])
    >>> [(x.tolist(), y.shape[0]) for x, y in loader][-1]
    ([8.0, 9.0], 2)
    """
    return ShardedLoader(loader, mesh, placements)


class ShardedLoader:
    """The result of ``shard_loader``: an iterable with ``len`` and ``state_dict``."""

    def __init__(self, loader: Any, mesh: Any, placements: Any) -> None:
        by_index = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        if not by_index or isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                "shard_loader: loader: a torch DataLoader that batches by index is expected; this "
                f"{type(loader).__name__} does not: samples of an IterableDataset, or with "
                "batch_size=None, have no index, by which a rank would pick its own. Give whole "
                "batches to dt.shard_tensor, which costs loading them on every rank"
            )
        self.loader = loader
        self.places = entries(mesh, placements)
        self.pieces = _Pieces(loader.batch_sampler, list(self.places.values()))
        kept = {name: getattr(loader, name) for name in _KEPT}
        if not self.pieces.inside:
            kept |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
            kept |= {"timeout": 0, "multiprocessing_context": None}
        self.local: Any = DataLoader(
            batch_sampler=self.pieces, collate_fn=_Collate(loader.collate_fn), **kept
        )
        self.samples = 0  # given in this epoch
        self.began: list[Tensor] | None = None  # the states of the generators at its begin
        self.resumed = False

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        generators = _generators(self.loader)
        before = torch.get_rng_state()
        if self.resumed and self.began is not None:
            for generator, state in zip(generators, self.began, strict=True):
                generator.set_state(state)
        else:
            self.samples = 0
        self.began = [generator.get_state() for generator in generators]
        self.pieces.skip = self.samples
        batches = iter(self.local)  # draws the seed of the workers first, and then
        self.pieces.start()  # the sampler draws the seed of the order, as in one process
        if self.resumed:  # the script's own random numbers continue
            torch.set_rng_state(before)
        self.resumed = False
        return _Epoch(self, batches)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: the number of samples of this epoch so far, and its order."""
        began = self.began or [generator.get_state() for generator in _generators(self.loader)]
        size = len(self.loader.dataset) if hasattr(self.loader.dataset, "__len__") else -1
        return {"samples": self.samples, "of": size, "generators": [g.clone() for g in began]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the samples of the state: on any mesh, with batches of any size. Raises
        ValueError for the state of other data."""
        mine = self.state_dict()
        if (state["of"], len(state["generators"])) != (mine["of"], len(mine["generators"])):
            raise ValueError(
                f"shard_loader: this state is a position among {state['of']} samples with "
                f"{len(state['generators'])} generators, and the loader has {mine['of']} with "
                f"{len(mine['generators'])}: give it the data that were saved"
            )
        self.samples, self.resumed = int(state["samples"]), True
        self.began = [g.clone() for g in state["generators"]]


class _Epoch(Iterator[Any]):
    """The batches of one epoch. As in torch, ``next`` continues after a batch that raised an
    error."""

    def __init__(self, of: ShardedLoader, batches: Iterator[Any]) -> None:
        self.of, self.batches, self.number, self.ended = of, batches, 0, False

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        of, given = self.of, self.of.pieces.given
        tensors: dict[Path, Tensor] = {}
        count = first = stop = 0

        def load() -> tuple[tuple[int, int], Any]:
            nonlocal count, first, stop
            digest, value, form = 0, None, None
            try:
                value = next(self.batches)
            except StopIteration:
                self.ended = True
            finally:
                if given and not self.ended:
                    count, first, stop, digest = given.popleft()
            if first < stop:
                form = map_paths(value, BatchFormat(of.places, tensors, stop - first))
            return (count, digest), form

        self.number += 1
        try:
            form = exchange(self.number - 1, load)
        finally:
            of.samples += count
        if not count:
            self.ended, of.samples, of.began = True, 0, None
            raise StopIteration
        rows = Box((first,), (stop - first,))
        return map_paths(form, Placed(of.places, tensors, count, rows))


def _generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators that an epoch uses, without duplicates: torch's own, if the loader has
    none."""
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    found = [loader.generator or torch.default_generator]
    found += [g for g in (getattr(s, "generator", None) for s in samplers) if g is not None]
    return list({id(g): g for g in found}.values())


class _Pieces:
    """A batch sampler: the indices of this rank's piece of each global batch of another one.

    ``given``: for each returned batch, (samples of the global batch, the first of this rank and the
    one after its last, a digest of all indices). The first ``skip`` samples are left out.
    """

    def __init__(self, batches: Any, places: Sequence[Places]) -> None:
        self.batches = batches
        self.inside = [p for p in places if p[0].coordinate is not None]
        self.skip = 0
        self.given: deque[tuple[int, int, int, int]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.given.clear()
        self.ahead: deque[list[Any]] = deque()
        self.source = self._left(iter(self.batches))
        return self._pieces()

    def start(self) -> None:
        """Makes the sampler draw the order of the epoch, if it has not yet."""
        if not self.given and not self.ahead:
            self.ahead.extend([batch for batch in [next(self.source, None)] if batch is not None])

    def _left(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        skip = self.skip
        for batch in batches:
            batch = list(batch)
            rest = batch[skip:]
            skip -= len(batch) - len(rest)
            if rest:
                yield rest

    def _pieces(self) -> Iterator[list[Any]]:
        while True:
            batch = self.ahead.popleft() if self.ahead else next(self.source, None)
            if batch is None:
                return
            ranges = [r for r in (rows_of(len(batch), *p) for p in self.inside) if r[0] < r[1]]
            first, stop = (
                min((r[0] for r in ranges), default=0),
                max((r[1] for r in ranges), default=0),
            )
            self.given.append((len(batch), first, stop, zlib.crc32(repr(batch).encode())))
            yield batch[first:stop]


class _Collate:
    """Calls ``collate``, or returns None if there is no sample. It is a class so that workers can
    unpickle it."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else None
