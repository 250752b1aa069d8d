"""Counts the forwards on the stack. Hooks after a forward are not called if a KeyboardInterrupt
ends it, or if its micro-batch is abandoned."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from disttensor.torch_private import module_call


def calls_on_stack(module: nn.Module | None) -> int:
    """Returns the number of running calls of ``module``, in all threads."""
    count = 0
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code is module_call.__code__:
                count += frame.f_locals["self"] is module
            frame = frame.f_back
    return count
