"""Strides: what the strides of a piece say of the whole, and copies where one process would copy.

A dim of which this rank has one row has any stride without consequence, to torch: a transposed
piece may count as contiguous though the whole is not. ``contiguous`` and ``reshape`` would then
give the memory of their input itself, and a write to the result would reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttensor.layout import global_strides
from disttensor.torch_private import is_view

Local = Callable[..., Any]


def apart(call: Any, run: Local, always: bool = False) -> Local:
    """``run`` gives its input's memory only where that could be so for the global tensor.

    ``always``: run is contiguous, which gives its input itself or a copy; else a reshape."""
    shape, piece = tuple(call.inputs[0].shape), tuple(call.inputs[0].local_shape)
    if not any(n <= 1 < size for n, size in zip(piece, shape, strict=True)):
        return run
    target = tuple(call.outputs[0].shape)
    known: dict[
        tuple[int, ...], bool
    ] = {}  # strides of the piece -> would the whole share its memory

    def shared(strides: tuple[int, ...]) -> bool:
        whole = torch.empty_strided(shape, global_strides(strides, piece, shape), device="meta")
        if always:
            return whole.contiguous() is whole
        return target == shape or is_view(whole.reshape(target))

    def checked(input: torch.Tensor, *args: Any, **words: Any) -> torch.Tensor:
        out: torch.Tensor = run(input, *args, **words)
        if out is input or is_view(out):
            strides = input.stride()
            if strides not in known:
                known[strides] = shared(strides)
            return out if known[strides] else out.clone(memory_format=torch.contiguous_format)
        return out

    return checked
