"""Empty pieces (of 5 over 4 ranks the last has nothing) for functions that do not take empty
tensors."""

from __future__ import annotations

from typing import Any

import torch

from ops.local import Call


def is_empty(call: Call) -> bool:
    """Has this rank nothing of an argument or a result that is not empty as a whole?"""
    pieces = (*call.inputs, *call.outputs)
    return any(0 in p.local_shape and 0 not in p.shape for p in pieces)


def zero_of(*values: Any) -> torch.Tensor:
    """0 in the autograd graph of all the tensors: a rank with nothing takes part in the backward
    too."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    parts = [t.reshape(-1)[:0].sum() for t in tensors if t.requires_grad]
    return sum(parts[1:], parts[0]) if parts else tensors[0].new_zeros(())


def or_zeros(call: Call, bias_dim: int = -1) -> Any:
    """The torch function; on a rank with an empty piece zeros of the result's shape. For functions
    with one result that are products, plus a ``bias`` along a dim of the result."""
    if not is_empty(call):
        return call.func
    shape = call.outputs[0].local_shape
    along = [1] * len(shape)

    def zeros(first: Any, second: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
        out = zero_of(first, second, *rest, *kwargs.values()).expand(shape).clone()
        tensors = [v for v in (*rest, kwargs.get("bias")) if isinstance(v, torch.Tensor)]
        for bias in tensors:
            if bias.ndim == 1:
                along[bias_dim] = bias.numel()
                out = out + bias.view(along)
        return out

    return zeros
