"""What a call gives, without computing it: the function runs once on tensors without data of the
global shapes.

Those are on torch's ``meta`` device where that says all, as its kernels are C++. Where it refuses,
or something may depend on the device, on data or on autocast, they are fakes, which take several
times as long, and torch's compiler to be imported.

Ranks outside a mesh know a call by this alone. Besides shapes and dtypes it says which arguments
each result depends on (so that gradients find their way), whether the call draws random numbers
(which all ranks count), and what it views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from types import FunctionType
from typing import Any, NamedTuple

import torch

from disttensor.autograd.graph import nodes_of
from disttensor.cache import Cache
from disttensor.errors import name_of
from disttensor.pytree import collect, rebuild, substitute
from disttensor.torch_private import DataDependentOutput as DataDependent
from disttensor.torch_private import (
    DynamicOutputShape,
    TorchDispatchMode,
    fake_mode,
    no_dispatch,
    storage_id,
)

__all__ = ["DataDependent", "Dynamic", "Found", "Out", "dynamic", "found"]

Tensor = torch.Tensor


class Dynamic(Exception):
    """The shape of the result depends on data."""


class Out(NamedTuple):
    """A tensor of the result. ``sources``: the tensor arguments it depends on, by number; ``same``:
    it is that argument itself; ``viewed``: it shares the memory of that argument."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    sources: tuple[int, ...]
    same: int | None
    viewed: int | None


class Found(NamedTuple):
    """``result``: what the call returns, with an Out for each tensor, which ``outs`` lists in
    order."""

    result: Any
    outs: list[Out]
    draws: bool


class _Seeded(TorchDispatchMode):
    """Notes whether anything draws random numbers. ``alone``: modes below it see nothing."""

    drew = False

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.around: Any = no_dispatch if alone else nullcontext

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, to tell that to leave this alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        with self.around():
            return func(*args, **(kwargs or {}))


_DYNAMIC = (
    "nonzero", "argwhere", "where", "masked_select", "unique", "bincount", "repeat_interleave",
    "one_hot", "combinations",
)  # fmt: skip
_MASKS = (torch.bool, torch.uint8)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def found(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Found:
    """Run ``func`` on fakes of the tensors in ``args`` and ``kwargs`` (anything with shape, dtype
    and device).

    Raises Dynamic where the shape depends on data, and what the function raises for such arguments.
    What it is for torch's own functions is remembered: each mesh asks for the same.
    """
    try:
        key = func, _key(args), _key(kwargs), *_around()
    except _NoKey:
        return _find(func, args, kwargs)
    known = _known.get(key) if _is_torch(func) else None
    if known is None:
        known = _find(func, args, kwargs)
        if _is_torch(func):
            _known[key] = known
    return known


class _NoKey(Exception):
    """An argument whose value may matter in other ways."""


_known: Cache[Any, Found] = Cache(4096, lasting=True)
_CONSTANTS = frozenset({
    int, float, complex, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device,
    torch.layout, torch.memory_format,
})  # fmt: skip


def _key(x: Any) -> Any:
    kind = type(x)
    if kind in _CONSTANTS:
        return kind, x
    if isinstance(x, Tensor):
        return Tensor, tuple(x.shape), x.dtype, x.device
    if kind in (list, tuple, torch.Size):
        return kind, tuple([_key(e) for e in x])
    if kind is slice:
        return kind, _key((x.start, x.stop, x.step))
    if kind is dict:
        return kind, tuple([(k, _key(v)) for k, v in x.items()])
    raise _NoKey


def _is_torch(func: Any) -> bool:
    """No function of ours, which may know a mesh."""
    module = getattr(func, "__module__", None)
    return module is None or module.partition(".")[0] == "torch"


def _around() -> tuple[Any, ...]:
    """What else dtypes depend on."""
    casts = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    ]
    return torch.get_default_dtype(), *casts


def _find(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Found:
    tensors = collect((tuple(args), kwargs), [])
    every = [i for i, t in enumerate(tensors) if t.dtype.is_floating_point or t.dtype.is_complex]
    if _on_meta(func, args, kwargs, tensors):
        with suppress(Exception):  # no such kernel, or an error: fakes say which
            known = _run(func, args, kwargs, every, on_meta=True)
            if not known.draws:  # by which kernels, is the device's own
                return known
    try:
        return _run(func, args, kwargs, every)
    except DataDependent:
        if named_dynamic(func) or by_mask(func, args):  # asks for it to know the shape, as one_hot
            raise Dynamic(name_of(func)) from None
        raise
    except Dynamic:
        raise
    except (
        Exception
    ):  # it refuses some that require grad (running statistics), or all: then it gives none that do
        bare = _run(func, args, kwargs, ())
        taken = [i for i in every if _takes(func, args, kwargs, i)]
        return _run(func, args, kwargs, taken) if taken else bare


def _on_meta(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]
) -> bool:
    """Do tensors on the ``meta`` device say all, unless there is an error?"""
    values = (*args, *kwargs.values())
    return (
        bool(tensors)
        and _makes_nothing(func)
        and not named_dynamic(func)
        and not by_mask(func, args)
        and all(t.device == tensors[0].device for t in tensors)
        and not any(isinstance(v, (torch.device, str)) for v in values)
        and _around()[1:] == (None, None)
    )


def _makes_nothing(func: Any) -> bool:
    """Does it make tensors from its arguments alone? What torch has written in Python may make some
    on the default device, and draw there, as ``nn.init`` does."""
    if isinstance(func, FunctionType):
        return func.__module__ == "torch.nn.functional"
    return _is_torch(func)


class _Other(Exception):
    """The result is not of tensors alone: it may be about the device."""


def _takes(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], i: int) -> bool:
    """Can tensor ``i`` require grad?"""
    try:
        _run(func, args, kwargs, (i,))
    except Exception:
        return False
    return True


def _hidden() -> Any:
    """Hooks of a checkpoint around this call are not for what the fakes save."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def _run(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], needing: Sequence[int],
    on_meta: bool = False,
) -> Found:  # fmt: skip
    """``needing``: the tensors that require grad, by number."""
    seeded = _Seeded(alone=on_meta)
    leaves: list[Tensor] = []
    fakes: list[Tensor] = []

    def fake(t: Tensor) -> Any:
        with no_dispatch() if on_meta else nullcontext():
            device = "meta" if on_meta else t.device
            leaf = torch.empty(tuple(t.shape), dtype=t.dtype, device=device)
        differentiable = len(leaves) in needing
        leaves.append(leaf.requires_grad_(differentiable))
        number = leaves[1:] and t.ndim == 0 and func in _INDEXING
        if number and not t.dtype.is_floating_point and t.dtype not in _MASKS:
            fakes.append(leaf)
            return 0  # torch would ask for the number, on which nothing here depends
        fakes.append(leaf.clone() if differentiable else leaf)  # not a leaf: it may be written to
        return fakes[-1]

    try:
        mode = nullcontext() if on_meta else fake_mode()
        with (
            mode,
            seeded,
            torch.inference_mode(False),  # there nothing shows what the result depends on
            torch.set_grad_enabled(bool(needing)),
            _hidden(),
        ):
            call = substitute(tuple(args), fake), substitute(dict(kwargs), fake)
            result = func(*call[0], **call[1])
    except DynamicOutputShape:
        raise Dynamic(name_of(func)) from None
    outs: list[Out] = []
    owners = {storage_id(t.untyped_storage()): i for i, t in reversed(list(enumerate(fakes)))}

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            same = next((i for i, t in enumerate(fakes) if t is value), None)
            if any(not isinstance(n, int) for n in value.shape):
                raise Dynamic(name_of(func))
            outs.append(
                Out(
                    len(outs),
                    value.shape,
                    value.dtype,
                    _reached(value, leaves),
                    same,
                    owners.get(storage_id(value.untyped_storage())),
                )
            )
            return outs[-1]
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return rebuild(value, [describe(v) for v in value])
        if on_meta and value is not None:
            raise _Other
        return value

    return Found(describe(result), outs, seeded.drew)


def _reached(value: Tensor, leaves: list[Tensor]) -> tuple[int, ...]:
    """The numbers of the leaves from which ``value`` was made differentiably."""
    found = {id(getattr(node, "variable", None)) for node in nodes_of([value])}
    return tuple(i for i, leaf in enumerate(leaves) if id(leaf) in found)


def named_dynamic(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "").strip("_").startswith(_DYNAMIC)


def by_mask(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Does it take what a mask shows?"""
    name = getattr(func, "__name__", "").strip("_")
    return name == "getitem" and any(t.dtype in _MASKS for t in collect(args[1:], []))


def dynamic(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> bool:
    """Does the shape of the result depend on data? Only functions of such names are asked: a run
    costs time."""
    if not by_mask(func, args) and not named_dynamic(func):
        return False
    try:
        found(func, args, kwargs or {})
    except Dynamic:
        return True
    except Exception:
        return False
    return False
