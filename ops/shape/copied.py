"""Copies of views: the same elements in separate memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ops.factors import Factors
from ops.local import LocalCall


def copied(seen: Callable[..., Factors]) -> Callable[..., Factors]:
    """Returns the factors of a copy of the view that ``seen`` describes."""

    def factors(*args: Any, **kwargs: Any) -> Factors:
        f = seen(*args, **kwargs)
        inner = f.local

        def local(call: LocalCall) -> Any:
            run = call.func if inner is None else inner(call)
            return lambda *args, **kwargs: _own(run(*args, **kwargs))

        return f.replace(view=False, local=local)

    return factors


def _own(value: Any) -> Any:
    """Tensors in memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return type(value)(map(_own, value))
