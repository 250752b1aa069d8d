"""Simulates a training step of thousands of ranks in one process: their memory, communication,
computation and time.

``simulate`` runs the program as a few of the ranks, one after the other, on tensors without
data. A recorder below the engine records each of them; the engine is not changed.
"""

import sys
import types
import warnings
from typing import Any

from disttensor.simulate import devices
from disttensor.simulate.plan_strategy import plan_strategy
from disttensor.simulate.run import simulate

__all__ = ["devices", "plan_strategy", "simulate"]


class _Package(types.ModuleType):
    """This package, which can be called as the function ``dt.simulate`` of 0.1 until 0.3."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            "disttensor.simulate(...) has moved: from disttensor.simulate import simulate; "
            "removed in 0.3",
            DeprecationWarning, stacklevel=2,
        )  # fmt: skip
        return simulate(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
