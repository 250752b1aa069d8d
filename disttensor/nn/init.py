"""torch.nn.init on DistTensors, where running its Python body on them would be wrong, slow or
different per mesh.

Most of nn.init fills in place and needs nothing. The rest is answered here: functions that ask for
an override by way of ``torch.overrides``, and two that do not ask (``disttensor.patches``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from disttensor.dispatch.resolve import handler
from disttensor.layout import Layout
from disttensor.meta import infer
from disttensor.random import state
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.torch_private import correct_fan

Tensor = torch.Tensor
_init: Any = nn.init


@handler(_init.uniform_)
def uniform_(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


@handler(_init.normal_)
def normal_(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


@handler(_init.constant_)
def constant_(tensor: Any, val: float) -> Any:
    with torch.no_grad():
        return tensor.fill_(val)


@handler(_init.kaiming_uniform_)
def kaiming_uniform_(
    tensor: Any,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Any = None,
) -> Any:
    if 0 in tensor.shape:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=2)
        return tensor
    std = _init.calculate_gain(nonlinearity, a) / math.sqrt(correct_fan(tensor, mode))
    bound = math.sqrt(3.0) * std
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)


def on_the_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """``sparse_`` on a plain tensor of the global shape, seeded alike on all ranks, of which each
    keeps its piece: torch draws the rows of zeros from its own generator. Peak memory is the full
    tensor."""

    @wraps(original)
    def sparse_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DistTensor):
            return original(tensor, *args, **kwargs)
        if not tensor.is_initialized:
            if infer.found(original, (tensor, *args), kwargs).draws:
                state.draw(tensor.spec.mesh, "fast")
            return tensor
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            with state.forked(tensor.spec.mesh):
                original(full, *args, **kwargs)
            tensor.copy_(full)
        return tensor

    return sparse_


def by_position(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_no_grad_trunc_normal_`` as one draw by position: torch samples again while a number is
    out of bounds, which a rank without a piece cannot see."""

    @wraps(original)
    def trunc_normal_(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        if not isinstance(tensor, DistTensor):
            return original(tensor, mean, std, a, b, generator)
        spec = tensor.spec
        this = state.draw(spec.mesh, "invariant", generator)
        if not tensor.is_initialized:
            return tensor
        numbers = this.numbers(
            "truncated_normal", spec, spec.dtype, tensor.local.device,
            mean=mean, std=std, low=a, high=b,
        )  # fmt: skip
        with torch.no_grad():
            return tensor.copy_(wrap(numbers, spec.with_layout(Layout(spec.layout.dims))))

    return trunc_normal_
