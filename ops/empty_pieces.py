"""Empty pieces (of 5 over 4 ranks the last has nothing) for functions that do not take empty
tensors."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.local import LocalCall


def is_empty(call: LocalCall) -> bool:
    """Has this rank nothing of an argument or a result that is not empty as a whole?"""
    pieces = (*call.inputs, *call.outputs)
    return any(0 in p.local_shape and 0 not in p.shape for p in pieces)


def zero_of(*values: Any) -> Tensor:
    """0 in the autograd graph of all the tensors, also in lists: a rank with nothing takes part in
    the backward too."""
    lists = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    tensors = [v for v in itertools.chain(*lists) if isinstance(v, Tensor)]
    parts = [t.reshape(-1)[:0].sum() for t in tensors if t.requires_grad]
    return sum(parts[1:], parts[0]) if parts else tensors[0].new_zeros(())


def zeros_if_empty(call: LocalCall) -> Any:
    """The torch function; on a rank with nothing zeros of the results' shapes, in the types that it
    gives."""
    if not is_empty(call):
        return call.func

    def zeros(*args: Any, **kwargs: Any) -> Any:
        pieces = iter(call.inputs)

        def whole(value: Any) -> Any:
            if isinstance(value, Tensor):
                made = torch.empty(next(pieces).shape, dtype=value.dtype, device="meta")
                return made.requires_grad_(value.requires_grad)
            return type(value)(map(whole, value)) if type(value) in (list, tuple) else value

        wholes = [whole(a) for a in args]  # the pieces of the arguments come before those by name
        given = call.func(*wholes, **{k: whole(v) for k, v in kwargs.items()})
        results = [given] if isinstance(given, Tensor) else given
        zero = zero_of(*args, *kwargs.values())
        made = [
            (zero if t.requires_grad else zero.detach()).to(t.dtype).expand(p.local_shape).clone()
            for t, p in zip(results, call.outputs, strict=True)
        ]
        return made[0] if isinstance(given, Tensor) else type(given)(made)

    return zeros


def padded_if_empty(call: LocalCall) -> Any:
    """The torch function; an empty piece is given a row of ones, which is cut off again: so its
    graph is that of the other ranks, to every order."""
    if not is_empty(call):
        return call.func
    kept = tuple(slice(0, n) for n in call.outputs[0].local_shape)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        words = {k: grown(v) for k, v in kwargs.items()}
        return call.func(*[grown(a) for a in args], **words)[kept]

    return run


def grown(x: Any) -> Any:
    """A tensor's dims of size 0 as dims of size 1, filled with ones."""
    if not isinstance(x, Tensor) or x.numel():
        return x
    return F.pad(x, [n for size in reversed(x.shape) for n in (0, int(not size))], value=1.0)


def bias_if_empty(call: LocalCall, bias_dim: int = -1) -> Any:
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
