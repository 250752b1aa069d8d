"""Memory that tensors of a module share before they are placed. One tensor under several names
stays one; two tensors of one memory would come apart."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from disttensor.errors import user_line
from disttensor.nn.parameters import slots
from disttensor.pytree import find_tensors, has_attributes, rebuild
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import storage_id

Tensor = torch.Tensor
Found = dict[int, dict[int, tuple[str, str, Tensor]]]  # storage -> id -> kind, name, local
_OF_MODULES = nn.Module().__dict__.keys()


def check_memory(who: str, module: nn.Module, stays: Callable[[Tensor], bool]) -> None:
    """Raises ValueError for two tensors of ``module`` that share memory if one is a parameter, as
    training would change one of them only. Warns about two buffers, and about a view of one of its
    tensors in an attribute. Tensors that ``stays`` accepts are left alone."""
    found: Found = {}
    for name, owner, table, _, value in slots(module):
        kind = "parameter" if table is owner._parameters else "buffer"
        if not stays(value):
            _add(found, kind, name, value)
    for name, value in _held(module):
        _add(found, "attribute", name, value)
    for members in found.values():
        for one, other in itertools.combinations(members.values(), 2):
            kinds = one[0], other[0]
            if kinds == ("attribute", "attribute") or not _overlap(one[2], other[2]):
                continue
            what = (
                f"{who}: the {one[0]} {one[1]!r} and the {other[0]} {other[1]!r} are two tensors "
                "of one memory, and each gets memory of its own: a write to one will not change "
                "the other. "
            )
            if "attribute" in kinds:
                what += "Make the view in the forward, from the parameter or buffer"
            else:
                what += "Make them one tensor (module.a = module.b), or clone one of them"
            if "parameter" in kinds and "attribute" not in kinds:
                raise ValueError(what)
            warnings.warn(f"at {user_line()}: {what}", stacklevel=2)


def _add(found: Found, kind: str, name: str, value: Tensor) -> None:
    local = value.local if isinstance(value, DistTensor) and value.is_initialized else value
    plain = type(local) in (Tensor, nn.Parameter) and local.layout is torch.strided
    if plain:
        members = found.setdefault(storage_id(local.untyped_storage()), {})
        members.setdefault(id(value), (kind, name, local))


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in plain attributes of the module and of those in it, with their names."""
    for prefix, owner in module.named_modules():
        for key, value in owner.__dict__.items():
            if key not in _OF_MODULES:
                name = f"{prefix}.{key}" if prefix else key
                yield from ((name, x) for x in find_tensors(value))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors of one storage have an element in common."""
    spans = []
    for x in (one, other):
        if not x.numel():
            return False
        steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        first = x.storage_offset() * x.itemsize
        spans.append((first, first + (steps + 1) * x.itemsize))
    (begin, end), (start, stop) = spans
    if begin >= stop or start >= end:
        return False
    if one.is_contiguous() or other.is_contiguous() or one.dtype is not other.dtype:
        return True
    marks = torch.zeros(max(end, stop) // one.itemsize, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def replace_held(module: nn.Module, made: Mapping[int, Any]) -> None:
    """Replaces tensors that were placed in plain attributes of the module, or of modules in it, and
    in containers and objects there."""
    seen: set[int] = set()
    for owner in module.modules() if made else ():
        for key, value in [*owner.__dict__.items()]:
            if key not in _OF_MODULES:
                owner.__dict__[key] = _replaced(value, made, seen)


def _replaced(value: Any, made: Mapping[int, Any], seen: set[int]) -> Any:
    """Returns ``value`` with the new tensors: the same object, unless it is a tensor or a tuple."""
    if isinstance(value, Tensor):
        return made.get(id(value), value)
    if isinstance(value, tuple):
        items = [_replaced(x, made, seen) for x in value]
        return value if all(map(operator.is_, items, value)) else rebuild(value, items)
    if id(value) in seen:
        return value
    seen.add(id(value))
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, (list, deque, dict, UserDict)):
        pairs = enumerate(value) if isinstance(value, (list, deque)) else value.items()
        put = value.__setitem__
    elif isinstance(value, set):
        pairs = ((x, x) for x in value if isinstance(x, Tensor))
        put = partial(_exchange, value)
    elif has_attributes(value) or isinstance(value, nn.Module):  # in a list that torch does not see
        pairs, put = vars(value).items(), partial(object.__setattr__, value)
    else:
        return value
    for key, old in [*pairs]:
        new = _replaced(old, made, seen)
        if new is not old:
            put(key, new)
    return value


def _exchange(tensors: set[Any], old: Tensor, new: Tensor) -> None:
    tensors.remove(old)
    tensors.add(new)
