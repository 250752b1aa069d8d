"""Functions of torch that draw random numbers for regular tensors, and combine them with
DistTensors. No call of theirs has a DistTensor among its arguments while it draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import distributions
from torch.distributions import Distribution

from disttensor.pytree import find_tensors
from disttensor.random.draws import fork_generators
from disttensor.tensor.dist_tensor import DistTensor

# sample and rsample of all distributions, as places of ``change.replace``
SAMPLERS = [
    f"{kind.__module__}:{kind.__name__}.{name}"
    for kind in vars(distributions).values()
    if isinstance(kind, type) and issubclass(kind, Distribution)
    for name in ("sample", "rsample")
    if name in vars(kind)
]


def wrap_draws(original: Callable[..., Any]) -> Callable[..., Any]:
    """Draws the same numbers on all ranks if an argument, or one of its attributes, is a
    DistTensor."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = [t for t in find_tensors((args, kwargs), True) if isinstance(t, DistTensor)]
        if not found:
            return original(*args, **kwargs)
        with fork_generators(found[0].spec.mesh):
            return original(*args, **kwargs)

    return run
