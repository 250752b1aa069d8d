"""torch.nn.init on DistTensors, where running its Python body on them would be wrong, slow or
different per mesh.

Most of nn.init fills in place and needs nothing. The rest is answered here: functions that ask for
an override by way of ``torch.overrides``, and three that do not ask, which are replaced in
torch.nn.init (for plain tensors nothing changes).
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


def trunc_normal_(
    tensor: DistTensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> DistTensor:
    """One draw by position, in place of torch's rejection sampling in a loop that depends on the
    data."""
    spec = tensor.spec
    this = state.draw(spec.mesh, "invariant", generator)
    if not tensor.is_initialized:
        return tensor
    numbers = this.numbers(
        "truncated_normal",
        spec,
        spec.dtype,
        tensor.local.device,
        mean=mean,
        std=std,
        low=a,
        high=b,
    )
    with torch.no_grad():
        return tensor.copy_(wrap(numbers, spec.with_layout(Layout(spec.layout.dims))))  # type: ignore[return-value]


def on_full(body: Callable[..., Tensor]) -> Callable[..., DistTensor]:
    """Every rank runs ``body`` on a plain tensor of the global shape, seeded alike, and keeps its
    piece. For functions that need the whole (a QR): peak memory is the full tensor."""

    def run(tensor: DistTensor, *args: Any, **kwargs: Any) -> DistTensor:
        spec = tensor.spec
        if not tensor.is_initialized:
            if infer.found(body, (tensor, *args), kwargs).draws:
                state.draw(spec.mesh, "fast")
            return tensor
        full = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.local.device)
        with torch.no_grad():
            with state.forked(spec.mesh):
                body(full, *args, **kwargs)
            tensor.copy_(full)
        return tensor

    return run


def replace(name: str, answer: Callable[..., Any]) -> None:
    """``torch.nn.init.name`` gives DistTensors to ``answer``."""
    original = getattr(_init, name)

    @wraps(original)
    def either(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return (answer if isinstance(tensor, DistTensor) else original)(tensor, *args, **kwargs)

    setattr(_init, name, either)


replace("_no_grad_trunc_normal_", trunc_normal_)
for _name in ("orthogonal_", "sparse_", "dirac_", "eye_"):
    replace(_name, on_full(getattr(_init, _name)))
