"""The versions of the software, and the code that runs calls."""

from __future__ import annotations

import platform

import torch

from disttensor import versions
from disttensor.dispatch import native


def info() -> dict[str, str]:
    """Returns the versions of disttensor, torch and Python, and the code that runs warm calls of
    DistTensors: "C", or "Python" with a reason (see ``disttensor/dispatch/native.py``).

    >>> list(dt.debugging.info())
    ['disttensor', 'torch', 'python', 'dispatch']
    """
    return {
        "disttensor": versions.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dispatch": native.active(),
    }
