"""Who failed first: the first failing rank posts its error to the store of the process group, and
other ranks add it to their own errors.

A rank that waits sees only that a neighbour is gone, and the neighbour may have waited itself. The
store outlives the rank that failed, unless that rank keeps it.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from disttensor.comm.process_group import world_store

_KEY = "failed"
_before: Any = None  # the hook that ours calls in the end


def watch() -> None:
    """From now on an uncaught error of this process is posted for the others. Cheap after the first
    call."""
    global _before
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _hook


def unwatch() -> None:
    """Undo ``watch``, unless somebody has put another hook on top since."""
    global _before
    if sys.excepthook is _hook:
        sys.excepthook, _before = _before, None


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if dist.is_initialized() and issubclass(kind, Exception):
        with contextlib.suppress(Exception):  # whatever happens, the error itself is shown
            store = world_store()
            line = traceback.extract_tb(trace)[-1] if trace is not None else None
            where = f" ({line.filename}:{line.lineno})" if line is not None else ""
            text = str(error).splitlines()
            words = f"{kind.__name__}: {text[0] if text else ''}"[:400]
            store.compare_set(_KEY, "", f"rank {dist.get_rank()} failed first: {words}{where}")
    (_before or sys.__excepthook__)(kind, error, trace)


def first() -> str:
    """A sentence about the rank that failed first, where one is known; else an empty text."""
    if not dist.is_initialized():
        return ""
    try:
        store = world_store()
        store.set_timeout(timedelta(seconds=5))
        if not store.check([_KEY]):
            return ""
        return f" {store.get(_KEY).decode()}."
    except Exception:  # the store went with the rank that kept it
        return ""
