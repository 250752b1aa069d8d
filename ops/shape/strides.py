"""Strides: infers global strides from the strides of a piece, and copies if one process would copy.

For torch, a dim with one row or none may have any stride. So a transposed or sliced piece may count
as contiguous on a rank although the global tensor is not. ``contiguous`` and ``reshape`` would then
return the memory of their input itself, a write to the result would reach the input, and functions
that read strides and offsets would fail on this rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.cache import Cache
from disttensor.core.layout import is_dense
from disttensor.torch_private import is_view

Local = Callable[..., Any]


def own_memory(call: Any, run: Local, always: bool = False) -> Local:
    """Makes ``run`` return its input's memory only if that could be so for the global tensor.

    ``always``: ``run`` is ``contiguous``, which returns its input itself or a copy; otherwise a
    reshape."""
    shape, piece = tuple(call.inputs[0].shape), tuple(call.inputs[0].local_shape)
    if not any(n <= 1 and n < size for n, size in zip(piece, shape, strict=True)):
        return run
    target = tuple(call.outputs[0].shape)
    known = Cache[Any, bool](16, lasting=True)

    def shared(input: torch.Tensor) -> bool:
        key = input.stride(), input.untyped_storage().nbytes()  # decide the answer
        answer = known.get(key)
        if answer is None:
            answer = is_dense(input, shape) or (target == shape and not always)
            answer = answer or (not always and reshapes(_spread(key[0], piece, shape)))
            known[key] = answer
        return answer

    def reshapes(strides: tuple[int, ...]) -> bool:
        return is_view(torch.empty_strided(shape, strides, device="meta").reshape(target))

    def checked(input: torch.Tensor, *args: Any, **words: Any) -> torch.Tensor:
        out: torch.Tensor = run(input, *args, **words)
        if (out is input or is_view(out)) and not shared(input):
            return out.clone(memory_format=torch.contiguous_format)
        return out

    def separate(input: torch.Tensor, *args: Any, **words: Any) -> torch.Tensor:
        out: torch.Tensor = run(input, *args, **words)
        return out.clone(memory_format=torch.contiguous_format)

    # for a program that is recorded for tensors of the same strides
    checked.decided = lambda input: run if shared(input) else separate  # type: ignore[attr-defined]
    return checked


def _spread(strides: Sequence[int], piece: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a global tensor whose dims have the order and the gaps of the piece's
    dims."""
    out = [0] * len(shape)
    here = there = 1  # the next stride of a dense piece, and of the whole
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], piece[d] > 1, -d)):
        if strides[d] or shape[d] <= 1:
            gap = max(0, strides[d] - here)
            out[d] = there + gap
            here, there = (here + gap) * max(1, piece[d]), out[d] * max(1, shape[d])
    return tuple(out)
