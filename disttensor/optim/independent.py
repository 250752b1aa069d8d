"""Checks that an optimizer updates each owned parameter from its own gradient, value and state.

A rank has only the parameters that it owns. So a norm over all gradients, as of LAMB, would be a
norm over other parameters on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from disttensor.errors import name_parameter
from disttensor.pytree import collect, substitute
from disttensor.tensor.dist_tensor import local_of
from disttensor.torch_private import StorageWeakRef, TorchDispatchMode, storage_id

Tensor = torch.Tensor
Sources = frozenset[int]  # the numbers of the parameters that a tensor was computed from


class RefuseMixing(TorchDispatchMode):
    """Raises RuntimeError if a tensor is computed from an owned parameter and another parameter.

    ``owned``: the tensors of each owned parameter: itself, its gradient and state. ``others``: the
    locals of parameters without an owner, which may be combined with each other. Results of
    ``item`` are followed through Python's arithmetic, and numbers that are read otherwise are not.
    """

    def __init__(self, owned: Sequence[tuple[Tensor, list[Tensor]]], others: list[Tensor]) -> None:
        super().__init__()
        self.owned, self.contexts = owned, ExitStack()
        # Storage -> first byte, last byte and source of the parts of it. A weak reference keeps the
        # number of a storage unique.
        self.parts: dict[int, tuple[StorageWeakRef, set[tuple[int, int, int]]]] = {}
        for i, tensors in enumerate([*(held for _, held in owned), others]):
            for x in tensors:
                self.add(x, frozenset({i}))

    def __enter__(self) -> Any:
        # Compiled functions run uncompiled: Dynamo refuses modes.
        self.contexts.enter_context(torch.compiler.set_stance("force_eager"))
        self.contexts.enter_context(_FollowNumbers(self))
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.contexts.close()
        self.owned, self.parts = (), {}  # a number that the optimizer keeps may refer to this

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        results = [out, *(given[name] for name in written if name in given)]
        columns = [x for x in (*given.values(), *results) if isinstance(x, (list, tuple))]
        if columns and ("_foreach_" in func.name() or "_fused_" in func.name()):
            single = [x for x in given.values() if isinstance(x, Tensor)]
            for i in range(max(map(len, columns))):  # element by element of lists
                self.call(func, [*single, *_ith(given.values(), i)], _ith(results, i))
        else:
            self.call(func, collect(given, [], Tensor), collect(results, [], Tensor))
        return out

    def call(self, func: Any, given: list[Tensor], results: list[Tensor]) -> None:
        """Takes notice of a call: its results come from the sources of its arguments."""
        sources = self.union(func, map(self.of, given))
        for x in results:
            self.add(x, sources)

    def union(self, func: Any, sources: Iterable[Sources]) -> Sources:
        """Returns the union of the sources of the arguments of ``func``, at most one."""
        together = frozenset[int]().union(*sources)
        if len(together) > 1:
            names = [self.name(i) for i in sorted(together)[:2]]
            raise RuntimeError(
                f"{func} combines {' and '.join(names)}. A rank has only the parameters that it "
                "owns, so the result would differ between ranks. Use this optimizer without "
                "dt.optim.own: it is correct then, and each rank gathers each matrix"
            )
        return together

    def of(self, x: Tensor) -> Sources:
        """Returns the parameters from which elements in the memory of x were computed."""
        if x.layout is not torch.strided or not x.numel():
            return frozenset()
        first, last = _memory(x)
        _, parts = self.parts.get(storage_id(x.untyped_storage()), (None, ()))
        return frozenset(source for a, b, source in parts if a <= last and first <= b)

    def add(self, x: Tensor, sources: Sources) -> None:
        if not sources or x.layout is not torch.strided or not x.numel():
            return
        storage = x.untyped_storage()
        _, parts = self.parts.setdefault(storage_id(storage), (StorageWeakRef(storage), set()))
        parts |= {(*_memory(x), source) for source in sources}

    def name(self, i: int) -> str:
        if i == len(self.owned):
            return "a parameter without an owner"
        p = self.owned[i][0]
        name = name_parameter(p)
        return f"{name or 'a parameter'} of shape {tuple(p.shape)}"


class _Number(float):
    """A float that was computed from tensors, with their sources. It is an ordinary float after the
    step."""

    __slots__ = ("check", "sources")
    check: RefuseMixing
    sources: Sources


def _number(value: float, check: RefuseMixing, sources: Sources) -> float:
    if not sources:
        return value
    out = _Number(value)
    out.check, out.sources = check, sources
    return out


def _follow(name: str) -> Callable[..., Any]:
    operator = getattr(float, name)

    def run(self: _Number, *others: Any) -> Any:
        result = operator(self, *others)
        if type(result) is not float or not self.check.owned:
            return result  # NotImplemented, or a number from an earlier step
        held = [self, *(x for x in others if isinstance(x, _Number))]
        sources = self.check.union(f"float.{name}", [x.sources for x in held])
        return _number(result, self.check, sources)

    return run


for _name in "add sub mul truediv pow neg abs radd rsub rmul rtruediv rpow".split():  # noqa: SIM905
    setattr(_Number, f"__{_name}__", _follow(f"__{_name}__"))


def plain_numbers(value: Any) -> Any:
    """Returns the same structure with regular floats."""
    return substitute(value, lambda x: float(x), _Number)


class _FollowNumbers(TorchFunctionMode):
    """Gives a result of ``item`` the sources of its tensor, and a tensor the sources of the numbers
    from which it was computed."""

    def __init__(self, check: RefuseMixing) -> None:
        super().__init__()
        self.check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is Tensor.item and type(out) is float:
            return _number(out, self.check, self.check.of(local_of(args[0])))
        numbers = [x.sources for x in (*args, *(kwargs or {}).values()) if isinstance(x, _Number)]
        if numbers:
            for x in map(local_of, collect(out, [], Tensor)):
                self.check.add(x, self.check.union(func, [*numbers, self.check.of(x)]))
        return out


def _memory(x: Tensor) -> tuple[int, int]:
    """Returns the first and the last byte of x in its storage."""
    first = x.storage_offset() * x.itemsize
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return int(first), int(first + (last + 1) * x.itemsize - 1)


def _ith(values: Iterable[Any], i: int) -> list[Tensor]:
    """Returns the i-th elements of the lists among ``values``."""
    ith = [x[i] for x in values if isinstance(x, (list, tuple)) and i < len(x)]
    return collect(ith, [], Tensor)
