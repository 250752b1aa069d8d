"""Invalidates uses of the old value after a write, writes views of copies back, and explains the
error of a write to a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from disttensor import observe
from disttensor.comm import lone_failure
from disttensor.errors import name_of, name_parameter, user_line
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.uses import invalidate
from disttensor.torch_private import schemas_of

Function = Callable[..., Any]
LEAF = "leaf Variable that requires grad is being used in an in-place operation."


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


def note_error(error: BaseException, planned: Any, target: Any = None) -> None:
    """Notes that a call raised on this rank. ``target``: its first argument, whose name torch's
    error for a write to a leaf gets."""
    text = str(error)
    if type(error) is RuntimeError and text.endswith(LEAF) and isinstance(target, DistTensor):
        base = getattr(target.local, "_base", None)
        error.args = (
            f"{text} {name_of(planned.func)} at {user_line()} writes to "
            f"{name_parameter(target, base) or target.spec}. Write inside of `with "
            "torch.no_grad():`, which autograd does not see, or to a result: x.clone()",
        )
    lone_failure.note_error(error, planned)


def first_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the first argument, which a call in place writes."""
    return args[0] if args else next(iter(kwargs.values()))
