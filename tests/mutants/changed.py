"""Runs a changed source file, and notes which lines run, in this process and in the processes that
it starts.

Worker processes import ``workers/sitecustomize.py`` at their start, which does there what the
environment says: ``MUTANT_PATH`` and ``MUTANT_SOURCE`` name a file and its other contents,
``WATCHED_FILES`` the files whose lines are noted.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Lines = set[tuple[str, int]]


class ChangedFile(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one file of the repository with other contents."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source, self.file = path, source, str(ROOT / path)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        inner = Path(*name.split("."))
        if self.path not in (inner.with_suffix(".py"), inner / "__init__.py"):
            return None
        inside = [str(Path(self.file).parent)] if self.path.stem == "__init__" else None
        return importlib.util.spec_from_file_location(
            name, self.file, loader=self, submodule_search_locations=inside
        )

    def get_filename(self, fullname: str) -> str:
        return self.file

    def get_data(self, path: str | bytes) -> bytes:
        return self.source.encode()

    def path_stats(self, path: str | bytes) -> Any:
        raise OSError("no bytecode is kept")


class LineRecorder:
    """Notes the lines of ``watched`` files that run, on all threads started after ``start``."""

    def __init__(self, watched: Iterable[str]) -> None:
        self.watched = frozenset(watched)
        self.seen: Lines = set()

    def start(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def stop(self) -> None:
        """On this thread: the threads of simulated ranks are kept, and noted on."""
        sys.settrace(None)

    def take(self) -> Lines:
        """Returns the lines noted since the last call."""
        taken, self.seen = self.seen, set()
        return taken

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.watched:
            return None
        self.seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace


_recorder: LineRecorder | None = None  # of a worker process


def set_environment(**values: str) -> None:
    """Processes started from now on import ``workers/sitecustomize.py`` with these variables."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(Path(__file__).parent / "workers")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.update(values)


def begin_worker() -> None:
    """Does in a new process what the environment says."""
    global _recorder
    if path := os.environ.get("MUTANT_PATH"):
        sys.meta_path.insert(0, ChangedFile(Path(path), os.environ["MUTANT_SOURCE"]))
    if watched := os.environ.get("WATCHED_FILES"):
        _recorder = LineRecorder(watched.split(os.pathsep))
        _recorder.start()


def take_lines() -> Lines:
    """Returns the lines that this worker process has run since the last call."""
    return set() if _recorder is None else _recorder.take()
