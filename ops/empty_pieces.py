"""Runs functions that do not accept empty tensors on ranks with empty pieces (with 5 rows over 4
ranks the piece of the last rank is empty)."""

from __future__ import annotations

import itertools
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from disttensor.pytree import collect, substitute
from disttensor.torch_private import autocast_is_on
from ops.answer import Bare, CallMetadata, TensorResult, answer
from ops.local import LocalCall


def is_empty(call: LocalCall) -> bool:
    """Returns True if a piece on this rank is empty along a dim whose global size is not 0."""
    pieces = (*call.inputs, *call.outputs)
    return any(s and not n for p in pieces for n, s in zip(p.local_shape, p.shape, strict=True))


def zero_of(*values: Any) -> Tensor:
    """Returns 0 in the autograd graph of all the tensors, also of tensors in lists. So a rank with
    an empty piece takes part in the backward too, and saves a tensor for it, and a checkpointed
    region is recomputed on all ranks."""
    lists = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    tensors = [v for v in itertools.chain(*lists) if isinstance(v, Tensor)]
    parts = [t.reshape(-1)[:0].sum() for t in tensors if t.requires_grad]
    zero = tensors[0].new_zeros(())
    return sum(parts[1:], parts[0]) * zero if parts else zero


def answer_of_whole(call: LocalCall, args: Any, kwargs: Any) -> CallMetadata:
    """Returns torch's answer about the global call; ``args`` and ``kwargs`` are those of a piece.
    It depends on autocast, whose dtypes may depend on sizes."""
    pieces = iter(call.inputs)

    def whole(x: Tensor) -> Bare:
        return Bare(tuple(next(pieces).shape), x.dtype, x.device, None)

    return answer(call.func, *substitute((tuple(args), kwargs), whole))


def in_dtype_of_whole(call: LocalCall) -> Any:
    """Returns the torch function with its one result in the dtype that the global call would have.
    For functions whose dtype under autocast depends on sizes."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = call.func(*args, **kwargs)
        return (
            out.to(answer_of_whole(call, args, kwargs).outs[0].dtype) if autocast_is_on() else out
        )

    return run


def zeros_if_empty(call: LocalCall) -> Any:
    """Returns the torch function; on a rank with an empty piece, a function that returns zeros with
    the shapes and types of the results. Only where torch's first gradient has no graph of the
    inputs, or there is none: else use ``padded_if_empty``."""
    if not is_empty(call):
        return call.func

    def zeros(*args: Any, **kwargs: Any) -> Any:
        found = answer_of_whole(call, args, kwargs)
        tensors, zero = collect((args, kwargs), []), zero_of(*args, *kwargs.values())

        def made(out: TensorResult) -> Tensor:
            grad = any(tensors[i].requires_grad for i in out.sources)
            own = zero if grad else zero.detach()
            return own.to(out.dtype).expand(call.outputs[out.number].local_shape).clone()

        return substitute(found.result, made, TensorResult)

    return zeros


def padded_if_empty(call: LocalCall, value: float = 1.0) -> Any:
    """Returns the torch function; an empty piece is padded with a row of ``value``, which is cut
    off from the results. So its graph is the same as on other ranks, for gradients of every order.
    Where the function sums over a dim that may be empty, ``value`` has to be 0."""
    if not is_empty(call):
        return call.func

    def run(*args: Any, **kwargs: Any) -> Any:
        words = {k: grown(v, value) for k, v in kwargs.items()}
        shapes = iter([piece.local_shape for piece in call.outputs])
        out = call.func(*[grown(a, value) for a in args], **words)
        return substitute(out, lambda t: t[tuple(slice(0, n) for n in next(shapes))])

    return run


def grown(x: Any, value: float = 1.0) -> Any:
    """Pads dims of size 0 to size 1, filled with ``value``."""
    if not isinstance(x, Tensor) or x.numel():
        return x
    return F.pad(x, [n for size in reversed(x.shape) for n in (0, int(not size))], value=value)


ANYWHERE = (zeros_if_empty, padded_if_empty)  # independent of the position of a piece
