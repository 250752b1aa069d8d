"""The key of a call: the facts that its plan depends on.

A key is (function, specs of DistTensors, shape and dtype of regular tensors, constants by type and
value). Floats and generators count by type only, so that a learning rate does not fill the cache;
integers do so if the rule of the function does not read them. The key does not contain the dtype of
a result, which autocast may change: the local result shows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from disttensor.checks import has_own_operators
from disttensor.core.spec import DistSpec
from disttensor.errors import name_of
from disttensor.pytree import Uncacheable
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from ops.registry import RULES

Tensor = torch.Tensor

_BY_VALUE = frozenset(
    {int, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout}
)
_FLOAT = {float}
_NUMBERS = float, complex, np.inexact
_CONSTANT = _BY_VALUE | {DistSpec, torch.Size, bool, float, complex, type(...)}


def reads_integers(func: Any) -> bool:
    """Returns True if a plan of ``func`` depends on the values of integers."""
    rule = RULES.get(func)
    return rule is None or rule.integers


def key_of(value: Any, func: Any = None, floats: bool = False) -> Any:
    """Returns the part of one argument (not a DistTensor) of a call of ``func`` that a plan depends
    on. 1, 1.0 and True have three keys. ``floats``: floats count by value."""
    kind = type(value)
    if kind is int and not reads_integers(func) and value.bit_length() < 60:
        return kind
    if kind in _BY_VALUE:
        return value
    if kind is bool:
        return kind, value
    if kind is float or kind is complex:
        return (kind, value) if floats else kind
    if kind is list or kind is tuple or kind is torch.Size:
        if value and type(value[0]) is float and not floats and set(map(type, value)) == _FLOAT:
            return kind, len(value)
        keys = [v.spec if type(v) is DistTensor else key_of(v, func, floats) for v in value]
        return kind, tuple(keys)
    if isinstance(value, Tensor):
        if isinstance(value, DistTensor):  # still pending
            return wait_for(value).spec
        return kind if has_own_operators(value) else Tensor, value.shape, value.dtype
    if kind is slice:
        return slice, key_of(value.start), key_of(value.stop), key_of(value.step)
    if not floats and isinstance(value, _NUMBERS):  # np.float64 too
        return kind
    if kind is torch.Generator:
        return kind
    if isinstance(value, dict):
        return kind, tuple([(k, key_of(v, func, floats)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):  # a named tuple, torch.return_types
        return kind, tuple([key_of(v, func, floats) for v in value])
    try:
        hash(value)
    except TypeError:
        raise Uncacheable from None
    return kind, value


def depends_on_floats(values: Any) -> bool:
    """Returns True if keys with the values of floats distinguish more calls."""
    try:
        return bool(key_of(values) != key_of(values, floats=True))
    except Uncacheable:
        return True


def meshes_in(key: Any) -> set[Any]:
    """Returns the meshes of the specs in a key."""
    meshes, parts = set(), list(key)
    for part in parts:  # grows in the loop
        if type(part) is DistSpec:
            meshes.add(part.mesh)
        elif type(part) is tuple:
            parts += part
    return meshes


def key_without_sizes(key: Any) -> Any:
    """Returns the key without the sizes of DistTensors, except sizes of 1."""
    return tuple([
        p.kind if type(p) is DistSpec else key_without_sizes(p) if type(p) is tuple else p
        for p in key
    ])  # fmt: skip


def of_no_mesh(func: Any, key: Any) -> bool:
    """Returns True if the key of a call of ``func`` contains DistSpecs and constants only. A value
    that depends on such a key, but not on its meshes, may be kept longer than the meshes."""
    return all(
        of_no_mesh(func, p) if type(p) is tuple
        else type(p) in _CONSTANT or isinstance(p, type) or p is func
        for p in key
    )  # fmt: skip


def describe_call(func: Any, key: Any) -> str:
    """Describes the call of a key, with the same text on all ranks."""
    positional, named = (key[0], key[1:]) if type(key[0]) is tuple else (key, ())
    return name_of(func) + _describe(positional[1:]) + (_describe(named) if named else "")


def _describe(part: Any) -> str:
    if type(part) is tuple:
        if len(part) == 2 and part[0] is bool:
            return str(part[1])
        return f"({', '.join(map(_describe, part))})"
    if type(part) is torch.device:
        return part.type  # the index differs between ranks
    if type(part) in _BY_VALUE or type(part) in (DistSpec, torch.Size):
        return repr(part)
    if isinstance(part, type):
        return part.__name__
    return name_of(part) if callable(part) else type(part).__name__
