"""What an in-place call writes to, and what follows from it: uses of the old value are forgotten,
views of copies are written back, writes that autograd does not see are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from disttensor.dispatch.resolve import Plan
from disttensor.pytree import collect
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.versions import INFERENCE, count
from disttensor.torch_private import schemas_of

Function = Callable[..., Any]


def targets(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> list[DistTensor]:
    """What an in-place call writes to, less plain tensors that take DistTensors in."""
    tensors: list[Any] = collect((args, kwargs), [])
    return [tensors[i] for i in plan.factors.targets if type(tensors[i]) is DistTensor]


@lru_cache(maxsize=1024)
def uncounted(func: Function) -> bool:
    """May autograd not count what ``func`` writes? That is so of torch's fused kernels, and may be
    of any operator or function that is not torch's own."""
    ours = (getattr(func, "__module__", None) or "torch").startswith("torch")
    fused = getattr(func, "__name__", "").startswith(("_fused_", "_amp_"))
    return fused or bool(schemas_of(func)) or not ours


def counting(plan: Plan, local_fn: Function) -> Function:
    """``local_fn``, of an in-place call whose writes autograd does not count."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = local_fn(*args, **kwargs)
        locals_ = collect((args, kwargs), [])
        count(*[locals_[i] for i in plan.factors.targets])
        return out

    return run


def written(x: DistTensor) -> None:
    """The local of ``x`` has been written to: its uses before this are of the old value."""
    if x._grad_state is not None or x._reduced is not None or views.LIVE or INFERENCE:
        x.forget_uses()
    if x._view_state is not None:
        views.write_back(x)
