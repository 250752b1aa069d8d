"""Invalidates uses of the old value after a write, and writes views of copies back."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from disttensor import observe
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.uses import invalidate
from disttensor.torch_private import schemas_of

Function = Callable[..., Any]


@lru_cache(maxsize=1024)
def is_untracked(func: Function) -> bool:
    """Returns True if autograd may not count the writes of ``func``: it does not count the writes
    of torch's fused kernels, and may not count the writes of functions outside torch."""
    ours = (getattr(func, "__module__", None) or "torch").startswith("torch")
    fused = getattr(func, "__name__", "").startswith(("_fused_", "_amp_"))
    return fused or bool(schemas_of(func)) or not ours


def mark_written(x: DistTensor, tracked: bool = True) -> None:
    """Updates state after a write to the local of ``x``: earlier uses have the old value.
    ``tracked``: autograd has counted the write."""
    if x._uses is not None or x._reduced is not None or views.LIVE:
        invalidate(x)
    if x._view_state is not None:
        views.write_back(x)
    for o in observe.seeing_calls():
        o.write(x, tracked)
