"""Replacements of two functions of torch.nn.init that would draw other numbers on DistTensors than
in one process. ``disttensor.patches`` installs them.

All other functions of torch.nn.init run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from disttensor.core.layout import Layout
from disttensor.random import draws
from disttensor.random.distributions import check_truncated_normal
from disttensor.tensor.dist_tensor import DistTensor, wrap
from ops.answer import answer


def wrap_sparse(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``sparse_`` on a regular tensor of the global shape with the same seed on all ranks, and
    keeps this rank's piece, because torch draws the rows of zeros from its own generator. Peak
    memory is the full tensor."""

    @wraps(original)
    def sparse_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DistTensor):
            return original(tensor, *args, **kwargs)
        if not tensor.is_initialized:
            if answer(original, (tensor, *args), kwargs).draws:
                draws.draw(tensor.spec.mesh, "fast")
            if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
                with torch.random.fork_rng([]):  # the generator goes on as on the mesh
                    original(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs)
            return tensor
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            with draws.fork_generators(tensor.spec.mesh):
                original(full, *args, **kwargs)
            tensor.copy_(full)
        return tensor

    return sparse_


def wrap_trunc_normal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs ``_no_grad_trunc_normal_`` as one draw by position: torch samples again while a number
    is out of bounds, and a rank without a piece does not have the numbers."""

    @wraps(original)
    def trunc_normal_(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        if not isinstance(tensor, DistTensor):
            return original(tensor, mean, std, a, b, generator)
        spec = tensor.spec
        check_truncated_normal(spec.dtype, std, a, b)
        this = draws.draw(spec.mesh, "invariant", generator)
        if not tensor.is_initialized:
            return tensor
        spec = spec.with_layout(Layout(spec.layout.dims, custom=spec.layout.custom))
        numbers = this.numbers(
            "truncated_normal", spec, spec.dtype, tensor.local.device,
            mean=mean, std=std, low=a, high=b,
        )  # fmt: skip
        with torch.no_grad():
            return tensor.copy_(wrap(numbers, spec))

    return trunc_normal_
