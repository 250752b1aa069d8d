"""Modules of transformers that hold all experts of a layer in a few tensors, run by
``dispatch_tokens``.

The decorator ``use_experts_implementation`` of transformers makes their class. It sets attributes
that describe the layout of the tensors; these attributes identify such a module, whatever its class
is. The implementation that a configuration names (eager, batched_mm, grouped_mm) is ignored,
because all compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disttensor.experts.dispatch_tokens import DispatchedTokens, combine_tokens, dispatch_tokens
from disttensor.experts.grouped_product import grouped_product
from disttensor.trace.instance_forward import InstanceForward

Tensor = torch.Tensor
_FLAGS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


def is_experts(module: nn.Module) -> bool:
    """Returns True if the module holds experts in the form of transformers."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS):
        return False
    if module.has_post_expert_norm or not callable(getattr(module, "_apply_gate", None)):
        return False
    return all(isinstance(getattr(module, name, None), Tensor) for name in _names(module))


def _names(module: Any) -> list[str]:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [first, "down_proj"]
    return weights + [f"{name}_bias" for name in weights] if module.has_bias else weights


def attach(module: nn.Module) -> None:
    """Replaces the forward of the experts in ``module``."""
    for m in module.modules():
        if "forward" not in m.__dict__ and is_experts(m):
            ExpertsForward(m).put()


class ExpertsForward(InstanceForward):
    """The ``forward`` of one such module: hidden states [t, d], indices and weights [t, k] -> [t,
    d]. ``dispatched``: of the last call, for ``expert_load``."""

    def __init__(self, module: nn.Module) -> None:
        self.__setstate__({"module": module})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module: Any = state["module"]
        self.dispatched: DispatchedTokens | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 3:
            args = self.__signature__.bind(*args, **kwargs).args
        tokens, indices, weights = args
        module = self.module
        parameters = [getattr(module, name) for name in _names(module)]
        sent = dispatch_tokens(tokens, indices, parameters[0].shape[0])
        out = combine_tokens(sent.apply(self.compute, *parameters), weights)
        self.dispatched = sent
        return out

    def compute(self, rows: Tensor, counts: list[int], *parameters: Tensor) -> Tensor:
        """Computes the results of the experts of this rank for their rows."""
        module = self.module
        turned = not module.is_transposed
        up, down, *biases = parameters
        hidden = grouped_product(rows, up, counts, turned)
        if biases:
            repeats = torch.tensor(counts, device=rows.device)
            biases = [bias.repeat_interleave(repeats, 0, output_size=len(rows)) for bias in biases]
            hidden = hidden + biases[0]
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        out = grouped_product(hidden, down, counts, turned)
        return out + biases[1] if biases else out
