"""Compares the records of one process with those of n ranks, in the order of the one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from disttensor.hangs.flight import show_ranks
from disttensor.verification.causes import describe, replicas_apart
from disttensor.verification.fit import Batch, Fit, Pieces, distance, fits, share_batch
from disttensor.verification.records import Entry, Key, Records

Tensor = torch.Tensor
Whole = Callable[[str, str, Pieces], Tensor | None]
_PHASES = {  # words for the tensor of each phase
    "weights": "the initial value of {}",
    "input": "{}",
    "forward": "the output of {}",
    "loss": "the {}",
    "backward": "the gradient of the output of {}",
    "gradient": "the gradient of {} at the optimizer step",
    "norm": "the {} of the gradients",
    "update": "{} after the step",
}
_OF_MODEL = ("weights", "gradient", "norm", "update")  # phases whose tensors have no rows
_ROUNDINGS = 100  # times the measured roundings are no difference
_SHARED = "each rank has a part of the sum, which nothing has added up"


class Difference(NamedTuple):
    """A tensor that differs. error, rounding: relative to its largest element, if known."""

    key: Key
    words: str
    error: float = 0.0
    rounding: float = 0.0

    def __str__(self) -> str:
        step, phase, name, call = self.key
        number = f", call {call + 1}" if call else ""
        size = f" (by {self.error:.2g} of its largest element)" if self.error else ""
        return f"step {step + 1}, {phase}{number}: {_PHASES[phase].format(name)}{size}"


class Comparison:
    """Compares the records ``one`` of one process with those of ``ranks``. ``nudged``: of one
    process with other roundings. ``whole``: as for ``dt.verify``."""

    def __init__(
        self, one: Records, nudged: Records, ranks: Sequence[Records], whole: Whole | None
    ) -> None:
        self.one, self.nudged, self.ranks, self.whole = one, nudged, ranks, whole
        self.batch = Batch([[r] for r in range(len(ranks))])
        self.scale: float | None = None  # of gradients of activations, on ranks with own rows
        self.largest: dict[str, float] = {}  # element, by phase
        self.unreduced: list[Key] = []  # outputs and gradients that are parts of a sum
        self.differences: list[Difference] = []
        self.equal: Counter[str] = Counter()  # tensors, by phase
        self.error = 0.0  # the largest relative error of the equal tensors
        self.uncompared: dict[str, str] = {}  # reasons
        self.drift = ""
        entries = sorted(one.entries.values(), key=lambda entry: entry.order)
        for _, group in groupby(entries, key=lambda entry: entry.order):  # the inputs of a call
            some = list(group)
            self._share([entry.key for entry in some])
            for entry in some:
                self._compare(entry)
        self._count_steps()

    def _share(self, keys: list[Key]) -> None:
        """Finds how the ranks share the inputs of a call."""
        if keys[0][1] == "input" and all(k in r.entries for r in self.ranks for k in keys):
            held = {i: [r.read(k) for k in keys] for i, r in enumerate(self.ranks)}
            placed = any(r.entries[k].place for r in self.ranks for k in keys)
            one: Any = [self.one.read(k) for k in keys]
            self.batch = (None if placed else share_batch(one, held)) or self.batch  # type: ignore[arg-type]

    def _count_steps(self) -> None:
        every = [self.one, *self.ranks]
        last, *others = [
            max((k[0] for k in r.entries if k[1] == "gradient"), default=-1) for r in every
        ]
        if last < 0:
            self._add((0, "update", "the program", 0), "no optimizer makes a step")
        parted = [r for r, n in enumerate(others) if n != last]
        if parted and not self.differences:
            words = (
                f"{show_ranks(parted)} makes {others[parted[0]] + 1} steps, one process {last + 1}"
            )
            self._add((last, "update", "the program", 0), words)

    def _compare(self, entry: Entry) -> None:
        key, one = entry.key, self.one.read(entry.key)
        have = {
            r: records.entries[key]
            for r, records in enumerate(self.ranks)
            if key in records.entries
        }
        held = {r: x for r in have if (x := self.ranks[r].read(key)) is not None}
        missing = [r for r in have if r not in held]
        if not have:
            self._skip(key, "no rank has it")
        elif one is None and any(x.any() for x in held.values()):
            self._add(key, "one process has none")
        elif one is not None and missing and one.any():
            self._add(key, f"{show_ranks(missing)} has none")
        elif one is not None and held:
            self._fit(entry, one, held, have)

    def _fit(self, entry: Entry, one: Tensor, held: Pieces, have: dict[int, Entry]) -> None:
        key, phase = entry.key, entry.key[1]
        size, rounding, bound = self._bound(entry, one)
        best, least = None, torch.inf
        parts = len(self.batch.parts) if phase == "backward" else 1
        # The loss of a rank may be the mean over its rows; the mean of gradients is taken later.
        known = self.scale is not None or parts == 1
        for scale in (self.scale or 1.0,) if known else (1.0, parts, 1 / parts):
            for fit in self._fits(key, one, held, have, scale if parts > 1 else 1.0):
                error = max(fit.errors().values())
                if error <= bound:
                    if parts > 1 and one.any():
                        self.scale = scale
                    self._accept(key, fit, error / size)
                    return
                if error < least and fit.way == "pieces":
                    best, least = fit, error
        if best is not None:
            ranks = [r for r, error in best.errors().items() if error > bound]
            before = self._before(key, ranks, held, have)
            words = describe(best, ranks, bound, before, self.batch, phase in _OF_MODEL)
            words = f"the batches differ: {words}" if phase == "input" else words
            self._add(key, words, least / size, rounding / size)
        elif phase == "input":
            shapes = ", ".join(str(list(x.shape)) for x in held.values())
            words = f"the batches differ: {list(one.shape)} in one process, {shapes} on the ranks"
            self._add(key, words)
        else:
            self._skip(key, "its pieces do not add up by their sizes")

    def _fits(
        self, key: Key, one: Tensor, held: Pieces, have: dict[int, Entry], scale: float = 1.0
    ) -> Iterator[Fit]:
        places, ranks = {r: have[r].place for r in held}, [*range(len(self.ranks))]
        whole = None
        if self.whole is not None and not any(places.values()):
            whole = self.whole(key[2], key[1], held)
        if whole is not None:
            yield Fit("pieces", dict.fromkeys(held, whole), dict.fromkeys(held, one))
            return
        batches = [self.batch, Batch([ranks])]
        if self.batch.rows is None:
            batches.append(Batch([[r] for r in ranks]))
        scaled = {r: x / scale for r, x in held.items()} if scale != 1 else held
        of_model = key[1] in _OF_MODEL
        for fit in fits(one, scaled, places, batches, not of_model):
            if fit.way == "pieces" or not of_model:
                yield fit

    def _before(self, key: Key, ranks: list[int], held: Pieces, have: dict[int, Entry]) -> Pieces:
        """Returns what the ranks should have held a step before, in the nearest layout."""
        step, phase, name, call = key
        old = self.one.read((step - 1, phase, name, call) if step else (0, "weights", name, 0))
        found = () if old is None or phase == "loss" else self._fits(key, old, held, have)
        near = min(
            found, key=lambda fit: sum(fit.errors().get(r, torch.inf) for r in ranks), default=None
        )
        return near.expected if near else {}

    def _bound(self, entry: Entry, one: Tensor) -> tuple[float, float, float]:
        """Returns the largest element, how far other roundings have moved the tensor, and how far
        it may be off."""
        rounds = one.is_floating_point() or one.is_complex()
        if entry.dtype is None or not rounds or not one.numel():
            return 1.0, 0.0, 0.5
        eps, phase = torch.finfo(entry.dtype).eps, entry.key[1]
        size = float(one.abs().nan_to_num(0.0, 0.0).max())
        self.largest[phase] = max(self.largest.get(phase, 0.0), size)
        other = self.nudged.read(entry.key)
        rounding = distance(one, other) if other is not None and other.shape == one.shape else 0.0
        floor = eps**0.6 * size + 10 * eps * self.largest[phase]
        return max(size, 1e-300), rounding, floor + _ROUNDINGS * rounding

    def _accept(self, key: Key, fit: Fit, error: float) -> None:
        _, phase, title, _ = key
        self.equal[phase] += 1
        self.error = max(self.error, error)
        name = title.partition("(")[0].strip()
        if fit.way == "sum" and phase != "loss" and next(iter(fit.actual.values())).numel() > 1:
            self.unreduced.append(key)
        elif phase == "backward":  # later gradients are right, so the sum was taken
            self.unreduced = [k for k in self.unreduced if k[1] != phase]
        elif phase == "forward":  # the module around it is right
            inner = f"{name}." if name else ""
            self.unreduced = [
                k for k in self.unreduced if not k[2].startswith(inner) or k[1] != phase
            ]
        elif phase in _OF_MODEL and not self.drift and (apart := replicas_apart(fit)):
            self.drift = f"replicas differ by roundings: {Difference(key, '')}: {apart}"

    def _add(self, key: Key, words: str, error: float = 0.0, rounding: float = 0.0) -> None:
        if self.unreduced and not self.differences:
            self.differences.append(Difference(self.unreduced[0], _SHARED))
        self.differences.append(Difference(key, words, error, rounding))

    def _skip(self, key: Key, reason: str) -> None:
        title = str(Difference(key, "")).partition(": ")[2]
        self.uncompared.setdefault(f"{key[1]}: {title}", reason)
