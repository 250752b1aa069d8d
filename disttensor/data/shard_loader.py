"""shard_loader: a DataLoader of global batches, of which each rank loads its own samples only.

Every rank iterates over the *indices* of all batches, which is cheap, and loads the samples of its
piece. The ranks compare the order, shape, dtype and structure of each batch, and the values of
replicas, in one exchange of a few bytes; a rank without samples gets these facts from the others.
An error of one rank is raised on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from disttensor.checks import check_bool
from disttensor.comm.groups import world_group
from disttensor.data.batch import (
    PURPOSE,
    BatchFormat,
    Digests,
    Placed,
    exchange,
    replica_digests,
)
from disttensor.data.entries import (
    Places,
    entries,
    first_part,
    is_first_replica,
    loads_everything,
    replica_axes,
)
from disttensor.data.order import BatchRows, LoaderPosition, Order, digest_of
from disttensor.pytree import Path, map_paths

_KEPT = (
    "dataset", "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn",
    "prefetch_factor", "multiprocessing_context", "generator", "persistent_workers",
)  # fmt: skip


def shard_loader(
    loader: Any, mesh: Any, placements: Any, *, load_once: bool = False
) -> ShardedLoader:
    """Converts ``loader``, a torch DataLoader of global batches, to a loader of DistTensors.

    Each rank loads the samples of its own piece of dim 0; ranks outside the mesh load none. Batches
    and their order are the same as in one process with the same seed, including the last batch and
    ``drop_last``. Batches may be tensors, or dicts, lists and tuples of tensors. ``mesh`` and
    ``placements`` apply to all tensors, or are dicts or tuples with a value for each entry of a
    batch: ``(stages[0], stages[-1])``. An entry that ``collate_fn`` computes from all samples of a
    rank, as a count of tokens, has ``Partial("sum")`` (or "max", "min") on the axes that split the
    batch. All ranks of the world iterate together. ``state_dict`` holds the position in samples,
    and can be loaded on any mesh.

    Ranks that hold the same samples each load them, and compare a digest of the values.
    ``load_once``: the first of these ranks loads the samples, and sends them to the others. It is
    for datasets that are slow, or that draw random numbers of their process.

    Raises TypeError for a loader without indices (an IterableDataset, ``batch_size=None``),
    ValueError for placements that do not split dim 0.

    >>> samples = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    >>> loader = torch.utils.data.DataLoader(samples, batch_size=4)
    >>> loader = dt.shard_loader(loader, mesh, [dt.Shard(0), dt.Replicate()])
    >>> [(x.tolist(), y.shape[0]) for x, y in loader][-1]
    ([8.0, 9.0], 2)
    """
    return ShardedLoader(loader, mesh, placements, load_once)


class ShardedLoader:
    """The result of ``shard_loader``: an iterable with ``len`` and ``state_dict``. Other
    attributes (``dataset``, ``batch_size``, ``sampler``) are read from the DataLoader."""

    def __init__(self, loader: Any, mesh: Any, placements: Any, load_once: bool) -> None:
        by_index = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        if not by_index or isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                "shard_loader: loader: a torch DataLoader that batches by index is expected; this "
                f"{type(loader).__name__} does not: samples of an IterableDataset, or with "
                "batch_size=None, have no index, by which a rank would pick its own. Give whole "
                "batches to dt.shard_tensor, which costs loading them on every rank"
            )
        self.loader = loader
        check_bool("shard_loader: load_once", load_once)
        self.load_once = load_once
        self.places = entries(mesh, placements)
        self._orders = _Orders([
            place for place in self.places.values()
            if place[0].coordinate is not None and (not load_once or is_first_replica(*place))
        ])  # fmt: skip
        kept = {name: getattr(loader, name) for name in _KEPT}
        if not self._orders.places:  # this rank loads nothing
            kept |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
            kept |= {"timeout": 0, "multiprocessing_context": None}
        self._local: Any = DataLoader(batch_sampler=self._orders, **kept)
        world_group(PURPOSE)  # made here: later a thread may load while the program makes groups
        for place in self.places.values():
            if load_once and place[0].coordinate is not None and (axes := replica_axes(*place)):
                place[0].group(axes, PURPOSE)
        self._running: WeakValueDictionary[int, _Epoch] = WeakValueDictionary()
        everywhere = all(loads_everything(*place) for place in self.places.values())
        self._draws_alike = everywhere and not load_once  # all ranks, with the same random numbers
        self._piece, self._seed = first_part(self._orders.places), 0
        self._epochs, self._last = 0, ""  # epochs that have begun; digest of the last complete one
        self._position = LoaderPosition()
        self._resumed: LoaderPosition | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        generators, before = _generators(self.loader), torch.get_rng_state()
        seeds_workers = not (self.loader.persistent_workers and self._epochs)
        begin, self._resumed = self._resumed or LoaderPosition(), None
        if not begin.inside:
            begin = replace(begin, seeds_workers=seeds_workers)
        epoch = _Epoch(self, replace(begin, inside=True, epochs=self._epochs, last=self._last))
        try:
            if begin.last:
                self._repeat_epochs(begin)
            if begin.inside:
                _set_states(generators, begin.generators)
            epoch.position.generators = [generator.get_state() for generator in generators]
            epoch.order = self._orders.newest = self._new_order(begin)
            epoch.seed = self._seed
            epoch.batches = iter(self._local)
            with contextlib.suppress(StopIteration):
                epoch.order.start()  # the sampler draws the seed of the order, as in one process
        except Exception as error:  # raised by the first batch, on all ranks
            epoch.error = error
        if begin.inside:
            _set_states(generators, begin.later)
            torch.set_rng_state(before)  # the script's own random numbers continue
        if epoch.error is None:
            self._running[self._epochs] = epoch
            self._position = epoch.position
        self._epochs += 1
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: the number of samples of this epoch so far, a digest of their
        indices, and the state of the order. It is the position of the iterator that has not ended,
        also if a loop inside of its loop was left. Raises RuntimeError if the program holds two."""
        states = [generator.get_state() for generator in _generators(self.loader)]
        held = [epoch.position for epoch in self._running.values()]
        if len(held) > 1:
            raise RuntimeError(
                f"shard_loader: state_dict: {len(held)} iterators of this loader have not ended, "
                f"after {', '.join(str(p.samples) for p in held)} samples, and one position is "
                "saved: delete the iterators that the run does not continue (`del batches`), or "
                "give another loop a loader of its own"
            )
        at = held[0] if held else self._position
        if not at.inside:
            at = LoaderPosition(generators=states, epochs=self._epochs, last=self._last)
        elif self._epochs > at.epochs + 1:
            at = replace(at, later=states)
        return {**asdict(at), "of": self._size()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the samples of the state: on any mesh, with batches of any size. Raises
        ValueError for the state of other data; the next epoch raises it for another order."""
        size, generators = self._size(), _generators(self.loader)
        if (state["of"], len(state["generators"])) != (size, len(generators)):
            raise ValueError(
                f"shard_loader: this state is a position among {state['of']} samples with "
                f"{len(state['generators'])} generators, and the loader has {size} with "
                f"{len(generators)}: give it the data that were saved"
            )
        known = {"inside": state["samples"] > 0, **state}  # earlier versions saved less
        known = {f.name: known[f.name] for f in fields(LoaderPosition) if f.name in known}
        at = self._position = self._resumed = LoaderPosition(**known)
        self._epochs, self._last = at.epochs, at.last
        self._running.clear()
        if not at.inside:
            _set_states(generators, at.generators)

    def _size(self) -> int:
        return len(self.loader.dataset) if hasattr(self.loader.dataset, "__len__") else -1

    def _new_order(self, begin: LoaderPosition) -> Order:
        """Returns the order of an epoch. Calls the sampler and draws as torch does in one process,
        on each rank alike: a rank that loads nothing has no workers, and the workers of a run that
        continues have started later."""
        loader = self.loader
        order = Order(loader.batch_sampler, self._orders.places, begin)
        generator = loader.generator or torch.default_generator
        self._local.generator = own = generator.clone_state()
        seed = torch.empty((), dtype=torch.int64).random_(generator=own.clone_state())
        self._seed = int(seed)
        if self._piece:  # else the workers have the seed of one process
            own.manual_seed((self._seed + self._piece) % 2**63)
        if begin.seeds_workers:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            if loader.num_workers:  # torch calls the sampler again
                order = Order(loader.batch_sampler, self._orders.places, begin)
        return order

    def _repeat_epochs(self, begin: LoaderPosition) -> None:
        """Iterates over the earlier epochs of a sampler that may have random numbers of its own,
        until the order of the last epoch has come."""
        generators = _generators(self.loader)
        states = [generator.get_state() for generator in generators]
        if all(type(s).__module__.startswith("torch.") for s in _samplers(self.loader)):
            return  # the order follows from the generators
        for _ in range(2 * begin.epochs):  # torch may call the sampler twice
            if digest_of(self.loader.batch_sampler) == begin.last:
                break
        _set_states(generators, states)


class _Epoch(Iterator[Any]):
    """The batches of one epoch. As in torch, ``next`` continues after a batch that raised an
    error."""

    order: Order
    batches: Iterator[Any]

    def __init__(self, loader: ShardedLoader, position: LoaderPosition) -> None:
        self.loader, self.position = loader, position
        self.number, self.ended, self.seed = 0, False, 0
        self.error: Exception | None = None  # of the begin

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        loader, rows = self.loader, BatchRows(0, 0, 0, self.position.digest)
        tensors: dict[Path, torch.Tensor] = {}

        def load() -> tuple[tuple[int, str], Any, Digests]:
            nonlocal rows
            if self.error is not None:
                self.ended = True
                raise self.error
            rows = self.order.next_rows() or rows
            form, digests = None, {}
            if rows.first < rows.stop:
                make = BatchFormat(loader.places, tensors, rows.stop - rows.first)
                with self._random_numbers_of(rows):
                    batch = next(self.batches)
                form = map_paths(batch, make)
                if not loader.load_once:
                    digests = replica_digests(loader.places, tensors, rows)
            return (rows.samples, rows.digest), form, digests

        self.number += 1
        try:
            form = exchange(self.number - 1, load)
        finally:
            self.position.samples += rows.samples
            self.position.digest = rows.digest
            loader._position = self.position
        if not rows.samples:
            self._end()
            raise StopIteration
        return map_paths(form, Placed(loader.places, tensors, rows, loader.load_once))

    @contextlib.contextmanager
    def _random_numbers_of(self, rows: BatchRows) -> Iterator[None]:
        """Seeds torch's generator by the first of these rows, without workers, and restores it: all
        ranks draw alike after they have loaded different samples. Another thread than the main one
        leaves the generator as it is, because the program may draw meanwhile."""
        loader, generator = self.loader, torch.default_generator
        beside = threading.current_thread() is not threading.main_thread()
        if loader._draws_alike or loader.num_workers or beside:
            yield
            return
        before = generator.get_state()
        generator.manual_seed((self.seed + self.position.samples + rows.first) % 2**63)
        try:
            yield
        finally:
            generator.set_state(before)

    def _end(self) -> None:
        self.ended, self.batches = True, iter(())  # ends the workers
        loader = self.loader
        loader._running.pop(self.position.epochs, None)
        loader._last = self.position.digest
        loader._position = LoaderPosition()


def _samplers(loader: Any) -> list[Any]:
    found = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    return [sampler for sampler in found if sampler is not None]


def _generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators that an epoch uses, without duplicates: torch's own, if the loader has
    none."""
    found = [loader.generator or torch.default_generator]
    found += [g for s in _samplers(loader) if (g := getattr(s, "generator", None)) is not None]
    return list({id(g): g for g in found}.values())


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


class _Orders:
    """A batch sampler: gives the ``Order`` of the epoch that begins."""

    newest: Order

    def __init__(self, places: Sequence[Places]) -> None:
        self.places = places

    def __iter__(self) -> Iterator[list[Any]]:
        return self.newest
