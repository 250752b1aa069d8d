"""Bars for work that takes long, drawn by tqdm (``pip install 'disttensor[progress]'``).

The first rank of the world shows them, on a terminal or in a notebook. A log file, other ranks,
simulated worlds, tests under pytest and processes without tqdm show none, and
``DISTTENSOR_PROGRESS=0`` in the environment turns all of them off.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from disttensor.comm.process_group import is_fake, world

DELAY = 1.0  # seconds: shorter work shows no bar
Advance = Callable[..., None]
_one = threading.Lock()  # held by the bar that is open: work inside of other work shows none


def show_nothing(n: float = 1, note: str = "") -> None:
    """Shows nothing."""


def say(line: str) -> None:
    """Prints a line to stderr on the first rank, also into a log file, before work that takes
    long and that no bar can follow."""
    if _may_show():
        print(f"disttensor: {line}", file=sys.stderr, flush=True)


@contextmanager
def bar(work: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Yields ``advance(n=1, note="")``, which adds ``n`` to a bar and shows ``note`` next to it.

    Args:
        work: a verb, as "loading".
        total: of all ``n``; None if it is not known.
        unit: of ``n``; "B" for bytes.
    """
    tqdm = None if total == 0 else _tqdm()
    if tqdm is None or not _one.acquire(blocking=False):
        yield show_nothing
        return
    try:
        shown = tqdm(
            total=total, desc=work, unit=unit if unit == "B" else f" {unit}", delay=DELAY,
            unit_scale=unit == "B", unit_divisor=1024, leave=False, dynamic_ncols=True, miniters=1,
        )  # fmt: skip
        with shown:

            def advance(n: float = 1, note: str = "") -> None:
                if note:
                    shown.set_postfix_str(note, refresh=False)
                shown.update(n)

            yield advance
    finally:
        _one.release()


def _tqdm() -> Any:
    """Returns the class of bars for this terminal or notebook, or None if no bar is shown."""
    if not _may_show() or not (sys.stderr.isatty() or _in_notebook()):
        return None
    try:
        with warnings.catch_warnings():  # without ipywidgets a notebook shows the bar as text
            warnings.simplefilter("ignore")
            tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError:
        return None
    return type("Bar", (tqdm,), {"monitor_interval": 0})  # no thread: programs may fork


def _may_show() -> bool:
    first = world()[0] == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"
    off = os.environ.get("DISTTENSOR_PROGRESS") == "0" or "PYTEST_CURRENT_TEST" in os.environ
    return first and not off and not is_fake()


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config
