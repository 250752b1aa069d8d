"""Who failed first: a rank that ends with an error leaves word of it, and the errors of those who
waited for it say so.

A rank that waits sees no more than that a neighbour is gone, and the neighbour may have waited
itself. The word is left in the store of the process group, which outlives the rank that failed
unless that rank keeps the store.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from disttensor.torch_private import default_store

_KEY = "disttensor/failed"
_installed: list[Any] = []


def watch() -> None:
    """From now on an uncaught error of this process is told to the others. Once per process, and
    cheap after."""
    if not _installed:
        _installed.append(sys.excepthook)
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if dist.is_initialized() and issubclass(kind, Exception):
        with contextlib.suppress(Exception):  # whatever happens, the error itself is shown
            store = default_store()
            line = traceback.extract_tb(trace)[-1] if trace is not None else None
            where = f" ({line.filename}:{line.lineno})" if line is not None else ""
            text = str(error).splitlines()
            words = f"{kind.__name__}: {text[0] if text else ''}"[:400]
            store.compare_set(_KEY, "", f"rank {dist.get_rank()} failed first: {words}{where}")
    _installed[0](kind, error, trace)


def first() -> str:
    """A sentence about the rank that failed first, where one is known; else an empty text."""
    if not dist.is_initialized():
        return ""
    try:
        store = default_store()
        store.set_timeout(timedelta(seconds=5))
        if not store.check([_KEY]):
            return ""
        return f" {store.get(_KEY).decode()}."
    except Exception:  # the store went with the rank that kept it
        return ""
