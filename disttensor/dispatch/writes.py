"""After a write: uses of the old value are invalidated, and views of copies are written back."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.versions import INFERENCE
from disttensor.torch_private import schemas_of

Function = Callable[..., Any]


@lru_cache(maxsize=1024)
def is_untracked(func: Function) -> bool:
    """Returns True if autograd may not count what ``func`` writes: torch's fused kernels do not,
    and any operator or function that is not torch's own may not."""
    ours = (getattr(func, "__module__", None) or "torch").startswith("torch")
    fused = getattr(func, "__name__", "").startswith(("_fused_", "_amp_"))
    return fused or bool(schemas_of(func)) or not ours


def written(x: DistTensor) -> None:
    """The local of ``x`` has been written to: its uses before this are of the old value."""
    if x._grad_state is not None or x._reduced is not None or views.LIVE or INFERENCE:
        x.forget_uses()
    if x._view_state is not None:
        views.write_back(x)
