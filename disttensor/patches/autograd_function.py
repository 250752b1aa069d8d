"""Custom autograd functions on DistTensors: refused with a way out.

They differentiate what they are given, and the wrapper is in no graph: the gradient would be lost
without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from disttensor.errors import CustomFunctionError, user_line
from disttensor.tensor.dist_tensor import DistTensor


def refusing(original: Any) -> Any:
    """``Function.apply``, as the class holds it: a classmethod, in C since torch 2.14."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if DistTensor in map(type, args) and torch.is_grad_enabled():
            _refuse(cls, args)
        return original.__get__(None, cls)(*args, **kwargs)

    # By its file torch.compile knows that ``torch.compile(F.apply)`` is a custom function's call.
    apply.__code__ = apply.__code__.replace(co_filename=torch.autograd.function.__file__)
    return classmethod(apply)


def _refuse(function: Any, args: tuple[Any, ...]) -> None:
    if function is CheckpointFunction:
        raise CustomFunctionError(
            f"checkpoint at {user_line()}: the reentrant variant is a custom autograd function and "
            "would cut the graph of a DistTensor; call checkpoint(..., use_reentrant=False)"
        )
    if any(type(a) is DistTensor and a.local.requires_grad for a in args):
        raise CustomFunctionError(
            f"{function.__name__}.apply at {user_line()}: a custom autograd.Function sees only the "
            "wrapper of a DistTensor and would lose its gradient. Run it on the locals: "
            "local_map(F.apply, in_placements=..., out_placements=...)(x)"
        )
