"""What runs here: versions, and which code carries out calls."""

from __future__ import annotations

import platform

import torch

from disttensor import versions
from disttensor.dispatch import native


def info() -> dict[str, str]:
    """The versions of disttensor, torch and Python, and what carries out warm calls of DistTensors:
    "C", or "Python" and why it is not C (see ``disttensor/dispatch/native.py``).

    >>> list(dt.info())
    ['disttensor', 'torch', 'python', 'dispatch']
    """
    return {
        "disttensor": versions.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dispatch": native.active(),
    }
