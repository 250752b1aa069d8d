"""One call of an OpInfo on plain tensors: what it gives, how exact that is, and how to run it on
DistTensors."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor

from disttensor import DistTensor
from tests.support import oracle

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they want packages that nothing here needs
    from torch.testing._internal import common_methods_invocations, common_utils
    from torch.testing._internal.opinfo import core

OPS = {op.full_name: op for op in common_methods_invocations.op_db}
FORMS = ("call", "in place", "out=")


def seed(number: int) -> None:
    """All that samples are drawn from. ``torch.manual_seed`` writes the caller's stack down for
    each device that is not there, which takes a hundred times as long."""
    torch.default_generator.manual_seed(number)
    if oracle.DEVICE == "cuda":
        torch.cuda.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def sample_inputs(op: Any, dtype: torch.dtype, most: int, among: int, grad: bool) -> list[Any]:
    """Samples of an OpInfo: at most ``most`` of its first ``among``, from the first to the last.

    torch looks through the whole stack for the unit test that asks for them. There is none."""
    seed(0)
    with (
        mock.patch.object(common_utils, "extract_test_fn", lambda: None),
        mock.patch.object(core, "extract_test_fn", lambda: None),
        mock.patch.object(common_utils, "set_rng_seed", seed),
    ):
        found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), among))
    if len(found) > most:
        found = [found[i * (len(found) - 1) // max(most - 1, 1)] for i in range(most)]
    return found


def generator_states() -> list[bytes]:
    states = [torch.get_rng_state()]
    if oracle.DEVICE == "cuda":
        states.append(torch.cuda.get_rng_state())
    return [state.numpy().tobytes() for state in states]


@dataclass
class Outcome:
    """The results of a run, their full values, and the gradients of its inputs."""

    result: Any
    fulls: list[Any]
    grads: list[Any]


class Call:
    """``func(*args, **kwargs)`` in one of ``FORMS``. Raises what torch raises on plain tensors.

    ends        picks of the result what gradients are asked of
    random      the results depend on the state of the random generator
    """

    def __init__(self, func: Any, given: Any, form: str, ends: Callable[[Any], Any]) -> None:
        self.func, self.given, self.form, self.ends = func, given, form, ends
        self.tensors = oracle.tensors_in(given)
        if form == "in place" and (not self.tensors or self.tensors[0] is not given[0][0]):
            raise TypeError("nothing to write to")
        self.differentiable = form != "out=" and any(t.requires_grad for t in self.tensors)
        self.targets: list[Tensor] = []  # what out= is given
        if form == "out=":
            self.form = "call"
            bare = self.attempt(1)
            self.targets, self.form = [torch.zeros_like(o) for o in bare.fulls], form
        self.outcome = self.attempt(1)
        after = generator_states()
        seed(1)
        drew = generator_states() != after
        self.random = drew and any(self._other(self.attempt(n)) for n in range(2, 10))
        if form == "out=" and not self.random and self._other(bare):
            raise RuntimeError("torch itself gives something else with out=")

    def _other(self, again: Outcome) -> bool:
        """Is this the outcome of other random numbers?"""
        if self.form != "out=" and not same(self.outcome.result, again.result):
            return True
        pairs = zip(dense(self.outcome.fulls), dense(again.fulls), strict=True)
        return not all(close(a, b) for a, b in pairs)

    def attempt(self, number: int, jitter: float = 0.0) -> Outcome:
        """Forward and backward; forward alone where torch cannot differentiate the call."""
        seed(number)
        leaves = [self._leaf(t, jitter) for t in self.tensors]
        targets = [t.clone() for t in self.targets]
        try:
            return self.run(leaves, targets)
        except Exception:
            if not self.differentiable:
                raise
            self.differentiable = False
            return self.attempt(number, jitter)

    def asks(self, t: Tensor) -> bool:
        return t.requires_grad and self.differentiable

    def _leaf(self, t: Tensor, jitter: float) -> Tensor:
        value = t.detach().clone()
        if jitter and value.dtype.is_floating_point and value.layout is torch.strided:
            step = jitter * torch.finfo(value.dtype).eps
            wave = torch.arange(value.numel(), dtype=torch.float64, device=value.device)
            wave = wave.mul(7.3).sin()
            value = (value * (1 + step * wave.view(value.shape))).to(value.dtype)
        return value.requires_grad_(self.asks(t))

    def run(self, leaves: Sequence[Tensor], targets: Sequence[Tensor]) -> Outcome:
        inner = list(leaves)
        if self.form == "in place":
            inner[0] = leaves[0].clone()
        args, kwargs = replace(self.given, iter(inner))
        if targets:
            several = isinstance(self.func(*args, **kwargs), (list, tuple))
            kwargs["out"] = tuple(targets) if several else targets[0]
        result = self.func(*args, **kwargs)
        if self.form == "in place":
            result = inner[0]
        if targets:
            result = list(targets)
        outs = oracle.tensors_in(result)
        if oracle.DEVICE == "cuda":
            torch.cuda.synchronize()  # a copy with non_blocking=True may still run
        fulls = [full_of(o) for o in outs]
        if self.differentiable:
            self._backward(result, dict(zip(map(id, outs), fulls, strict=True)))
        return Outcome(result, [f.detach() for f in fulls], [leaf.grad for leaf in leaves])

    def _backward(self, result: Any, fulls: dict[int, Tensor]) -> None:
        ends = [o for o in oracle.tensors_in(self.ends(result)) if o.requires_grad]
        values = [fulls[id(o)] if id(o) in fulls else full_of(o) for o in ends]
        loss = torch.zeros((), dtype=torch.float64)
        for v, w in zip(values, oracle.weights([v.detach() for v in values]), strict=True):
            part = (v * w).sum()
            loss = loss + (part.real + 0.5 * part.imag if part.is_complex() else part).double()
        if values:
            loss.backward()

    def slack(self) -> Outcome:
        """How far values and gradients move when the inputs change in their last bits."""
        moved = self.attempt(1, jitter=2.5)

        def apart(a: Any, b: Any) -> Any:
            if a is None or b is None or a.shape != b.shape or a.layout is not torch.strided:
                return None
            return (a - b).abs().nan_to_num(0.0) if rounds(a) else None

        pairs = zip(self.outcome.fulls, moved.fulls, strict=True)
        return Outcome(
            None,
            [apart(a, b) for a, b in pairs],
            [apart(a, b) for a, b in zip(self.outcome.grads, moved.grads, strict=True)],
        )


# Values -------------------------------------------------------------------------------------------


def replace(value: Any, new: Iterator[Tensor]) -> Any:
    """The same structure with its tensors replaced in order."""
    if isinstance(value, Tensor):
        return next(new)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [replace(v, new) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return {k: replace(v, new) for k, v in value.items()} if isinstance(value, dict) else value


def full_of(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DistTensor) else t


def dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t if t.layout is torch.strided else t.to_dense() for t in tensors]


def rounds(t: Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def close(got: Tensor, want: Tensor, more: Tensor | None = None) -> bool:
    """Equal up to rounding; in floating types relative to the largest number too."""
    if got.shape != want.shape or not rounds(want):
        return torch.equal(got, want)
    if want.dtype in (torch.bfloat16, torch.float16, torch.complex32):
        unit = 2e-2
    else:
        unit = 1e-9 if want.dtype in (torch.float64, torch.complex128) else 2e-5
    finite = want[want.isfinite()].abs()
    most = max(1.0, float(finite.max())) if finite.numel() else 1.0
    alike = torch.isclose(got, want, rtol=unit, atol=unit * min(most, 1e6), equal_nan=True)
    if more is not None:
        alike |= (got - want).abs() <= more
    return bool(alike.all())


def amount(got: Tensor, want: Tensor) -> str:
    if not rounds(want):
        bad = got != want
    else:
        bad = ~torch.isclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    some = f"{got[bad].flatten()[:3].tolist()}, plain {want[bad].flatten()[:3].tolist()}"
    return f"{int(bad.sum())} of {bad.numel()} differ: {some}"


def structure(value: Any) -> Any:
    """The types of a result, with its tensors and numbers left out."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return (type(value).__name__, *[structure(v) for v in value])
    return type(value).__name__


def same(a: Any, b: Any) -> bool:
    """Are results alike, as far as they are not tensors? NaN is like NaN."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (float, complex)):
        return bool(torch.isclose(torch.tensor(a), torch.tensor(b), rtol=2e-5, equal_nan=True))
    return bool(a == b)
