"""Refuses to combine a batch of each rank's own with the parameters of a module.

The ranks compare the regular tensors among the arguments of a root module
(``comm/compare_values``). Code on regular tensors may use one that differs; with a DistTensor it
would count as one global value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from disttensor.checks import has_own_operators
from disttensor.comm.compare_values import compare_values
from disttensor.comm.groups import Group
from disttensor.errors import MismatchError
from disttensor.pytree import collect, find_tensors, has_attributes, map_paths
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import has_data, storage_id

Tensor = torch.Tensor


def compare_arguments(who: str, arguments: Any, group: Group) -> RefuseOwn | None:
    """Returns the mode for a forward with these arguments if the ranks have other values of some
    regular tensors in them, else None. All ranks of the group make the call."""
    parts: list[Any] = []
    map_paths(arguments, lambda x, _: parts.append(x))
    others = [x for x in parts if not isinstance(x, DistTensor)]
    if not any(isinstance(x, Tensor) or has_attributes(x) for x in others):
        return None  # the arguments have the same classes on all ranks
    found = find_tensors(arguments, attributes=True)
    given = [x for x in found if not isinstance(x, DistTensor)]
    if not all(has_data(x) or has_own_operators(x) for x in given):
        return None  # a tracer or a transform runs
    texts = compare_values(who, given, group)
    return RefuseOwn(given, texts) if any(texts) else None


class RefuseOwn(TorchFunctionMode):
    """Raises MismatchError for a call that takes one of ``tensors`` with an error in ``texts``, or
    a tensor that was made of one, together with a DistTensor."""

    def __init__(self, tensors: Sequence[Tensor], texts: Sequence[str]) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}
        self.kept: list[Tensor] = []  # so that no other tensor gets their memory
        for x, text in zip(tensors, texts, strict=True):
            if text:
                self._add(x, text)

    def _add(self, x: Any, text: str) -> None:
        if (memory := _memory(x)) is not None:
            self.texts[memory] = text
            self.kept.append(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors: list[Any] = collect((args, kwargs or {}), [])
        found = [self.texts[m] for x in tensors if (m := _memory(x)) in self.texts]
        if found and any(isinstance(x, DistTensor) for x in tensors):
            raise MismatchError(found[0])
        out = func(*args, **(kwargs or {}))
        if found:
            for x in collect((out, args[0]) if func is Tensor.__setitem__ else out, []):
                self._add(x, found[0])
        return out


def _memory(x: Tensor) -> int | None:
    if isinstance(x, DistTensor) or not has_data(x) or x.layout is not torch.strided or x.is_nested:
        return None
    return storage_id(x.untyped_storage())
