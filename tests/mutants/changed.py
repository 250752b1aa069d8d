"""Runs a changed source file, in this process and in the processes that it starts.

They import ``workers/sitecustomize.py`` at their start, which does there what the environment says:
``MUTANT_PATH`` and ``MUTANT_SOURCE`` name a file and its other contents.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


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


def set_environment(**values: str) -> None:
    """Processes started from now on import ``workers/sitecustomize.py`` with these variables."""
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(Path(__file__).parent / "workers")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.update(values)


def begin_worker() -> None:
    """Does in a new process what the environment says."""
    if path := os.environ.get("MUTANT_PATH"):
        sys.meta_path.insert(0, ChangedFile(Path(path), os.environ["MUTANT_SOURCE"]))
