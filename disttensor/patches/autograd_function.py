"""Custom autograd functions on DistTensors: refused with a way out.

They differentiate what they are given, and the wrapper is in no graph: the gradient would be lost
without a word.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from disttensor.errors import CustomFunctionError, user_line
from disttensor.tensor.dist_tensor import DistTensor

# As the class holds it, not bound to a class yet: a classmethod written in Python up to torch 2.13,
# one written in C since.
_plain_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if (
        DistTensor in map(type, args)
        and torch.is_grad_enabled()
        and cls.__name__ != "_NoopSaveInputs"
    ):
        if cls is CheckpointFunction:
            raise CustomFunctionError(
                f"checkpoint at {user_line()}: the reentrant variant is a custom autograd function "
                "and would cut the graph of a DistTensor; call checkpoint(..., "
                "use_reentrant=False)"
            )
        if any(type(a) is DistTensor and a.local.requires_grad for a in args):
            raise CustomFunctionError(
                f"{cls.__name__}.apply at {user_line()}: a custom autograd.Function sees only the "
                "wrapper of a DistTensor and would lose its gradient. Run it on the locals: "
                "local_map(F.apply, in_placements=..., out_placements=...)(x)"
            )
    return _plain_apply.__get__(None, cls)(*args, **kwargs)


torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
