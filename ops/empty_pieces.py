"""Runs functions that do not accept empty tensors on ranks with empty pieces (with 5 rows over 4
ranks the piece of the last rank is empty)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from disttensor.pytree import collect, substitute
from disttensor.torch_private import autocast_is_on, fake_mode
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


class Result(NamedTuple):
    dtype: torch.dtype
    requires_grad: bool


def results_of_whole(call: LocalCall) -> Callable[[Any, Any], tuple[Any, list[Result]]]:
    """Returns a function: ``(args, kwargs)`` of a piece -> (type of the global result, a
    ``Result`` for each tensor in it). It runs the torch function once on tensors of the global
    shapes without data, and once more under autocast, whose dtypes may depend on sizes."""
    known: dict[Any, tuple[Any, list[Result]]] = {}

    def find(args: Any, kwargs: Any) -> tuple[Any, list[Result]]:
        tensors = collect((args, kwargs), [])
        kind = tensors[0].device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = cast, torch.is_grad_enabled(), *[t.requires_grad for t in tensors]
        if key not in known:
            pieces = iter(call.inputs)

            def whole(t: Tensor) -> Tensor:
                made = torch.empty(next(pieces).shape, dtype=t.dtype, device=t.device)
                return made.requires_grad_(t.requires_grad)

            with fake_mode(), saved_tensors_hooks(lambda t: t, lambda t: t):
                given = call.func(*substitute(tuple(args), whole), **substitute(kwargs, whole))
            found = [Result(t.dtype, t.requires_grad) for t in collect(given, [])]
            known[key] = (Tensor if isinstance(given, Tensor) else type(given)), found
        return known[key]

    return find


def in_dtype_of_whole(call: LocalCall) -> Any:
    """Returns the torch function with its one result in the dtype that the global call would have.
    For functions whose dtype under autocast depends on sizes."""
    find = results_of_whole(call)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = call.func(*args, **kwargs)
        return out.to(find(args, kwargs)[1][0].dtype) if autocast_is_on() else out

    return run


def zeros_if_empty(call: LocalCall) -> Any:
    """Returns the torch function; on a rank with an empty piece, a function that returns zeros with
    the shapes and types of the results."""
    if not is_empty(call):
        return call.func
    find = results_of_whole(call)

    def zeros(*args: Any, **kwargs: Any) -> Any:
        kind, results = find(args, kwargs)
        zero = zero_of(*args, *kwargs.values())
        made = [
            (zero if r.requires_grad else zero.detach()).to(r.dtype).expand(p.local_shape).clone()
            for r, p in zip(results, call.outputs, strict=True)
        ]
        return made[0] if kind is Tensor else kind(made)

    return zeros


def padded_if_empty(call: LocalCall) -> Any:
    """Returns the torch function; an empty piece is padded with a row of ones, which is cut off
    from the result. So its graph is the same as on other ranks, for gradients of every order."""
    if not is_empty(call):
        return call.func
    kept = tuple(slice(0, n) for n in call.outputs[0].local_shape)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        words = {k: grown(v) for k, v in kwargs.items()}
        return call.func(*[grown(a) for a in args], **words)[kept]

    return run


def grown(x: Any) -> Any:
    """Pads dims of size 0 to size 1, filled with ones."""
    if not isinstance(x, Tensor) or x.numel():
        return x
    return F.pad(x, [n for size in reversed(x.shape) for n in (0, int(not size))], value=1.0)


def bias_if_empty(call: LocalCall, bias_dim: int = -1) -> Any:
    """Returns the torch function; on a rank with an empty piece, a function that returns zeros of
    the result's shape plus the bias. For products with one result and a ``bias`` along one dim."""
    if not is_empty(call):
        return call.func
    zeros = zeros_if_empty(call)
    along = [1] * len(call.outputs[0].shape)

    def run(first: Any, second: Any, *rest: Any, **kwargs: Any) -> Tensor:
        out: Tensor = zeros(first, second, *rest, **kwargs)
        tensors = [v for v in (*rest, kwargs.get("bias")) if isinstance(v, Tensor)]
        for bias in tensors:
            if bias.ndim == 1:
                along[bias_dim] = bias.numel()
                out = out + bias.to(out.dtype).view(along)
        return out

    return run


ANYWHERE = (zeros_if_empty, padded_if_empty)  # independent of the position of a piece
