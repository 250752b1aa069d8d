"""Torch's answer about a call: the results of a function, or its error, without the data.

``answer`` runs the function once on tensors without data, of the global shapes. It finds shapes,
dtypes and strides, the arguments on which each result depends (for gradients), the arguments whose
memory it shares, and whether the call draws random numbers, which all ranks count. A rank off the
mesh has no other information about a call, and a rank with an empty piece has no other way to see
what torch does with the global tensor.

The tensors are on torch's ``meta`` device if that suffices, as its kernels are C++. Fake tensors
are used if that raises an error, or if the result may depend on the device, on data or on autocast.
They take several times as long and import torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch

from disttensor.cache import Cache
from disttensor.errors import name_of
from disttensor.graph_nodes import nodes_of
from disttensor.pytree import Uncacheable, collect, key_of_contents, rebuild, substitute
from disttensor.torch_private import (
    DataDependentOutput,
    DynamicOutputShape,
    TorchDispatchMode,
    fake_mode,
    no_dispatch,
    storage_id,
)
from ops.factors import Arg

Tensor = torch.Tensor
KNOWN: Cache[Any, Any] = Cache(16384, lasting=True)  # key of a question -> the answer


class Dynamic(Exception):
    """Raised if the shape of the result depends on data."""


class TensorResult(NamedTuple):
    """A tensor of the result.

    sources  numbers of the tensor arguments on which it depends differentiably.
    same     number of the argument that it is; None: it is a new tensor.
    viewed   number of the argument whose memory it shares, or None.
    strides  None: it is contiguous.
    """

    number: int
    shape: torch.Size
    dtype: torch.dtype
    sources: tuple[int, ...]
    same: int | None
    viewed: int | None
    strides: tuple[int, ...] | None


class CallMetadata(NamedTuple):
    """``result``: the return value of the call, with a TensorResult for each tensor;
    ``outs``: these in order."""

    result: Any
    outs: list[TensorResult]
    draws: bool


class Bare(NamedTuple):
    """The facts about a tensor argument on which an answer depends. ``strides``: None: it is
    contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None


TENSORS: Any = (Tensor, Arg, Bare)


class DrawDetector(TorchDispatchMode):
    """Detects whether a call draws random numbers. ``alone``: modes below it are disabled."""

    drew = False

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.around: Any = no_dispatch if alone else nullcontext

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: else torch would import its compiler, to disable it for this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draw()
        with self.around():
            return func(*args, **(kwargs or {}))

    def draw(self) -> None:
        """Is called before a call draws."""
        self.drew = True


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator from which torch draws on this device."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


_DYNAMIC = (
    "nonzero", "argwhere", "where", "masked_select", "unique", "bincount", "repeat_interleave",
    "one_hot", "combinations",
)  # fmt: skip
_MASKS = (torch.bool, torch.uint8)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def answer(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> CallMetadata:
    """Returns the results of a call. Tensors among the arguments are Args, or tensors with or
    without data.

    Raises Dynamic if a shape depends on data, and the errors of ``func``. Answers of functions of
    torch are kept: each mesh needs the same. Functions of others are asked each time.
    """
    args, kwargs = substitute((tuple(args), kwargs), bare, TENSORS)
    key = key_of_call(func, args, kwargs, collect((args, kwargs), [], Bare), surroundings())
    known: CallMetadata | None = None if key is None else KNOWN.get(key)
    if known is None:
        known = _find(func, args, kwargs)
        if key is not None:
            KNOWN[key] = known
    return known


def bare(x: Any) -> Bare:
    """Returns the facts about a tensor or an Arg. A tensor off the mesh keeps its strides in the
    state of its views."""
    if isinstance(x, Bare):
        return x
    state = getattr(x, "_view_state", None)
    device = getattr(x, "device", _CPU)
    return Bare(
        tuple(x.shape), x.dtype or torch.float32, device, None if state is None else state.strides
    )


_CPU = torch.device("cpu")


def key_of_call(func: Any, args: Any, kwargs: Any, tensors: Sequence[Bare], around: Any) -> Any:
    """Returns the key of an answer about a call with these tensors in place of its Args or Bares;
    None if it must not be kept."""
    if not is_torch(func):
        return None
    each = iter(tensors)
    try:
        return func, key_of_contents((args, kwargs), lambda _: next(each), (Arg, Bare)), around
    except Uncacheable:
        return None


def is_torch(func: Any) -> bool:
    """Returns False for functions of this package or of users, which may depend on a mesh."""
    module = getattr(func, "__module__", None)
    return module is None or module.partition(".")[0] == "torch"


def surroundings() -> tuple[Any, ...]:
    """Returns the settings of torch on which dtypes depend: the default dtype, and the dtype of
    autocast of each device (None: it is off)."""
    casts = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    ]
    return torch.get_default_dtype(), *casts


def _find(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> CallMetadata:
    tensors = collect((args, kwargs), [], Bare)
    every = [i for i, t in enumerate(tensors) if t.dtype.is_floating_point or t.dtype.is_complex]
    if _on_meta(func, args, kwargs, tensors):
        with suppress(Exception):  # no such kernel, or an error: fakes show which
            known = _run(func, args, kwargs, every, on_meta=True)
            if not known.draws:  # the device decides which kernels draw
                return known
    try:
        return _run(func, args, kwargs, every)
    except DataDependentOutput:
        if named_dynamic(func, args):  # reads data for the shape, as one_hot
            raise Dynamic(name_of(func)) from None
        raise
    except Dynamic:
        raise
    except Exception:
        # some inputs must not require grad (running statistics), or none may: no result does then
        alone = _run(func, args, kwargs, ())
        taken = [i for i in every if _takes(func, args, kwargs, i)]
        return _run(func, args, kwargs, taken) if taken else alone


def _on_meta(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Bare]
) -> bool:
    """Returns True if tensors on the ``meta`` device suffice, unless they raise an error."""
    values = (*args, *kwargs.values())
    return (
        bool(tensors)
        and _makes_nothing(func)
        and not named_dynamic(func, args)
        and all(t.device == tensors[0].device for t in tensors)
        and not any(isinstance(v, (torch.device, str)) for v in values)
        and surroundings()[1:] == (None, None)
    )


def _makes_nothing(func: Any) -> bool:
    """Returns True if ``func`` makes tensors from its arguments alone. Python functions of torch
    may make some on the default device, and draw there, as ``nn.init`` does."""
    if isinstance(func, FunctionType):
        return func.__module__ == "torch.nn.functional"
    return is_torch(func)


class _Other(Exception):
    """Raised for a result with other values than tensors: it may depend on the device."""


def _takes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], i: int) -> bool:
    """Returns True if tensor ``i`` may require grad."""
    try:
        _run(func, args, kwargs, (i,))
    except Exception:
        return False
    return True


def _hidden() -> Any:
    """Disables hooks of a checkpoint around this call for tensors that the fakes save."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _run(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], needing: Sequence[int],
    on_meta: bool = False,
) -> CallMetadata:  # fmt: skip
    """Runs ``func`` on fakes. ``needing``: the numbers of the tensors that require grad."""
    seeded = DrawDetector(alone=on_meta)
    leaves: list[Tensor] = []
    fakes: list[Tensor] = []

    def fake(t: Bare) -> Any:
        with no_dispatch() if on_meta else nullcontext():
            leaf = without_data(t, "meta" if on_meta else t.device)
        differentiable = len(leaves) in needing
        leaves.append(leaf.requires_grad_(differentiable))
        number = leaves[1:] and not t.shape and func in _INDEXING
        if number and not t.dtype.is_floating_point and t.dtype not in _MASKS:
            fakes.append(leaf)
            return 0  # torch would read the number, on which the metadata does not depend
        x = leaf.clone() if differentiable else leaf  # not a leaf: it may be written to
        fakes.append(x if t.strides is None else x.as_strided(t.shape, t.strides))
        return fakes[-1]

    try:
        mode = nullcontext() if on_meta else fake_mode()
        with (
            mode,
            seeded,
            torch.inference_mode(False),  # inference mode would hide the dependencies
            torch.set_grad_enabled(bool(needing)),
            _hidden(),
        ):
            call = substitute((tuple(args), kwargs), fake, Bare)
            result = func(*call[0], **call[1])
    except DynamicOutputShape:
        raise Dynamic(name_of(func)) from None
    outs: list[TensorResult] = []
    owners = owners_of(fakes)

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            same = next((i for i, t in enumerate(fakes) if t is value), None)
            if any(not isinstance(n, int) for n in value.shape):
                raise Dynamic(name_of(func))
            outs.append(
                TensorResult(
                    len(outs),
                    value.shape,
                    value.dtype,
                    _reached(value, leaves),
                    same,
                    owners.get(storage_id(value.untyped_storage())),
                    None if value.is_contiguous() else value.stride(),
                )
            )
            return outs[-1]
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return rebuild(value, [describe(v) for v in value])
        if on_meta and value is not None:
            raise _Other
        return value

    return CallMetadata(describe(result), outs, seeded.drew)


def owners_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Returns the number of the first tensor that has a memory, by the storage."""
    return {storage_id(t.untyped_storage()): i for i, t in reversed(list(enumerate(tensors)))}


def without_data(x: Bare, device: Any) -> Tensor:
    """Returns the memory of a tensor without data, on ``meta`` or inside of a fake mode. With
    strides it is flat."""
    shape: Any = x.shape
    if x.strides is not None:
        shape = 1 + sum(n * max(0, s - 1) for n, s in zip(x.strides, x.shape, strict=True))
    return torch.empty(shape, dtype=x.dtype, device=device)


def _reached(value: Tensor, leaves: list[Tensor]) -> tuple[int, ...]:
    """Returns the numbers of the leaves from which ``value`` was made differentiably."""
    found = {id(getattr(node, "variable", None)) for node in nodes_of([value])}
    return tuple(i for i, leaf in enumerate(leaves) if id(leaf) in found)


def named_dynamic(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Returns True if the name says that shapes may depend on data, or if it indexes with a
    mask."""
    name = getattr(func, "__name__", "").strip("_")
    indices = collect(args[1:], [], TENSORS) if name == "getitem" else ()
    return name.startswith(_DYNAMIC) or any(t.dtype in _MASKS for t in indices)


def is_dynamic(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> bool:
    """Returns True if the shape of the result depends on data, as a rank off the mesh finds."""
    try:
        answer(func, args, kwargs or {})
    except Dynamic:
        return True
    except Exception:
        return False
    return False
