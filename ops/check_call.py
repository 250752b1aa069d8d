"""Checks the arguments of a call on all ranks alike, before anything is sent, by torch itself.

Torch's kernels check a piece, which may be empty on one rank, or whole where the global tensor is
split. So a rank could raise an error that other ranks do not see. ``check_call`` asks torch twice
when a call is planned, with no data and no gradients:

- the function on ``meta`` tensors of the global shapes: shapes, dims, aliasing. It is not asked if
  the letters of the rule say that the call is elementwise.
- the function on tensors with one element along each dim that may be split: dtypes. Kernels for
  ``meta`` accept other dtypes than the kernels of the device, and a kernel without an element
  accepts all dtypes. A call that draws random numbers draws them here too, because only the kernel
  checks their range. The generators are restored.

A rule's own function has the answer of the torch function that it replaces.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from disttensor.pytree import collect, substitute
from disttensor.torch_private import (
    autocast_is_on,
    no_dispatch,
    no_function_mode,
    storage_id,
)
from ops.answer import (
    KNOWN,
    Bare,
    DrawDetector,
    default_generator,
    is_torch,
    key_of_call,
    owners_of,
    surroundings,
)
from ops.empty_pieces import ANYWHERE
from ops.factors import Arg, Factors

Tensor = torch.Tensor
Function = Callable[..., Any]

_REFUSALS = {RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError}
_NO_ANSWER = re.compile(
    "meta (tensor|backend|device|kernel)|'meta|on meta|register_meta|fake|generator|cuda"
    "|data-dependent|mutable_data",
    re.IGNORECASE,
)
_OF_KERNELS = re.compile(  # errors that no kernel for ``meta`` raises, or not in these cases
    "not implemented for|scalar type|dtype|can't be cast|result type|floating point|boolean|complex"
    "|multiple times|non-zero size|used as indices|bool input"
)
_META = torch.device("meta")
_MOST = 1 << 16  # elements of the tensors of the second question


class Shared(NamedTuple):
    """``shapes`` and ``dtypes`` of the results (without autocast); ``views``: for each result the
    number of the tensor argument whose memory it shares, or None."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    views: tuple[int | None, ...]


class _Draws(DrawDetector):
    """Restores torch's generator of the device after a call that draws from it. ``drawing``: a
    kernel that draws runs, or has raised an error."""

    drawing = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(alone=True)
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.drawing = False
        return out

    def draw(self) -> None:
        if not self.drew:
            self.generator = default_generator(self.device)
            with no_dispatch():
                self.state = self.generator.get_state()
        self.drew = self.drawing = True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.drew:
            self.generator.set_state(self.state)


def check_call(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], factors: Factors | None = None,
    device: str = "cpu",
) -> Shared | None:  # fmt: skip
    """Raises torch's error if torch refuses such a call. Returns None if torch cannot say without
    the data, or if the function is not torch's.

    Args:
        args, kwargs: with an Arg for each tensor.
        factors: of the call; None: the rule does not cover it, or has raised an error.
        device: the type of the device of the mesh.
    """
    if not is_torch(func) or _is_private(func):
        return None
    tensors: list[Arg] = collect((args, kwargs), [], Arg)
    dtypes = [x.dtype for x in tensors]
    # without elements, kernels of the device can be asked about the global shapes
    empty = factors is None and None not in dtypes and {0 in x.shape for x in tensors} == {True}
    all_told = empty or (factors is not None and _is_elementwise(factors))
    found = None if all_told else shared_without_data(func, args, kwargs, tensors)
    own = factors is not None and factors.local is not None and factors.local not in ANYWHERE
    if None in dtypes or (own and len({d for d in dtypes if d.is_floating_point}) > 1):
        return found  # the rule's own function may join the dtypes
    small = [
        Bare(shape, dtype, torch.device(device), None)
        for shape, dtype in zip(_one_element(factors, tensors), dtypes, strict=True)
    ]
    of_one = _asked(func, args, kwargs, small, surroundings(), _ones if all_told else _indices)
    return found or of_one


def shared_without_data(
    func: Function, args: Sequence[Any], kwargs: Any, tensors: Sequence[Arg] | None = None
) -> Shared | None:
    """Returns the answer of torch for tensors on ``meta``. Raises torch's error. Autocast, which
    joins dtypes, does not see these tensors: they have one dtype instead. ``tensors``: the Args of
    the call, if they are at hand."""
    casts, whole = autocast_is_on(), []
    for x in collect((args, kwargs), [], Arg) if tensors is None else tensors:
        dtype = x.dtype or torch.float32
        dtype = torch.float32 if casts and dtype.is_floating_point else dtype
        whole.append(Bare(x.shape, dtype, _META, None))
    return _asked(func, args, kwargs, whole, torch.get_default_dtype(), _empty)


def _asked(
    func: Function, args: Any, kwargs: Any, tensors: Sequence[Bare], around: Any,
    make: Callable[[Bare], Tensor],
) -> Shared | None:  # fmt: skip
    """Returns the answer of torch for ``make(x)`` of each of ``tensors`` in place of the Args."""
    key = key_of_call(func, args, kwargs, tensors, (make, around))
    if key is not None and key in KNOWN:
        known: Shared | None = KNOWN[key]
        return known
    with (
        no_function_mode(), torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings()
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # the call itself warns
        with no_dispatch():
            given = [make(x) for x in tensors]
            each = iter(given)
            args, kwargs = substitute((args, kwargs), lambda _: next(each), Arg)
            args = [_other_generator(x) for x in args]
            kwargs = {name: _other_generator(x) for name, x in kwargs.items()}
        draws = _Draws(given[0].device if given else torch.device("cpu"))
        try:
            with no_dispatch() if make is _empty else draws:
                out = func(*args, **kwargs)
            found = _shared(out, given)
        except Exception as error:
            text = re.sub(r"torch\.Meta(\w+)Type", r"torch.\1Tensor", str(error))
            told = type(error) in _REFUSALS and text and not _NO_ANSWER.search(text)
            of_number = draws.drawing and len(given) == 1  # and not of other data
            of_kernel = of_number or _OF_KERNELS.search(text) is not None
            if told and (make is _ones or of_kernel is (make is _indices)):
                # functions for ``meta`` assert what kernels check
                kind = RuntimeError if type(error) is AssertionError else type(error)
                raise kind(text) from None
            found = None
    if key is not None:
        KNOWN[key] = found
    return found


def _shared(out: Any, given: list[Tensor]) -> Shared:
    results = collect(out, [])
    owners = owners_of(given)
    return Shared(
        tuple([tuple(t.shape) for t in results]),
        tuple([t.dtype for t in results]),
        tuple([owners.get(storage_id(t.untyped_storage())) for t in results]),
    )


def _other_generator(x: Any) -> Any:
    """Returns another generator in place of one, so that the user's does not move."""
    # not isinstance, which torch answers in Python, so that Dynamo compiles it
    return torch.Generator(x.device) if type(x) is torch.Generator else x


def _empty(x: Bare) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _ones(x: Bare) -> Tensor:
    """Returns a tensor of values that elementwise functions accept."""
    return torch.full(x.shape, 1.0, device=x.device).to(x.dtype)


def _indices(x: Bare) -> Tensor:
    """Returns a tensor of values that most functions accept: 1, and index 0."""
    inexact = x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool
    return torch.full(x.shape, 1.0 if inexact else 0.0, device=x.device).to(x.dtype)


def _is_private(func: Function) -> bool:
    """Returns True for functions of which torch promises nothing: their ``meta`` kernels may accept
    less than others."""
    name = getattr(func, "__name__", "_")
    return name.startswith("_") and not name.endswith("__")


def _is_elementwise(f: Factors) -> bool:
    """Returns True if the letters say that the tensors are broadcast, and no letter is treated in a
    way of its own: the shapes are right if the rule has raised no error."""
    if f.local or f.reduced or f.unsplittable or f.shapes or f.per_item or not f.outputs:
        return False
    n = len(f.outputs[0])
    every = tuple(range(n))
    return all(dims == every for dims in f.outputs) and all(
        x is None or x == d for dims in f.inputs for d, x in enumerate(dims, n - len(dims))
    )


def _one_element(f: Factors | None, tensors: Sequence[Arg]) -> list[tuple[int, ...]]:
    """Returns shapes of small tensors of the same call: one element along each dim that may be
    split. If the tensors would be large, 12 elements along each other dim of matrices, which 3 and
    4 gates divide (torch's GRU does not check them), and one along each dim of others."""
    shapes = [t.shape for t in tensors]
    if f is not None:
        whole = {None, *f.unsplittable}
        shapes = [
            tuple([n if x in whole else min(n, 1) for x, n in zip(dims, t.shape, strict=True)])
            for dims, t in zip(f.inputs, tensors, strict=True)
        ]
    if sum(map(math.prod, shapes)) > _MOST:
        most = [12 if f is not None and t.ndim < 3 else 1 for t in tensors]
        shapes = [tuple([min(n, m) for n in s]) for s, m in zip(shapes, most, strict=True)]
    return shapes
