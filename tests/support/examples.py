"""The programs of examples/, run inside of a process that is there: to start one takes longer than
most of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def example(name: str) -> ModuleType:
    """A module of examples/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_by(name: str, *options: str) -> str:
    """What an example prints in this process, which may be a rank of a running world. Each rank
    takes itself for the first, the one that prints and writes files."""
    before = sys.argv, torch.get_default_dtype(), dict(os.environ)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = [str(ROOT / "examples" / f"{name}.py"), *options]
    os.environ["WORLD_SIZE"] = str(dist.get_world_size() if dist.is_initialized() else 1)
    os.environ.pop("RANK", None)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            module = example(name)
            getattr(module, "main", lambda: None)()
    finally:
        sys.argv, dtype, environment = before
        torch.set_default_dtype(dtype)
        sys.path.remove(str(ROOT / "examples"))
        os.environ.clear()
        os.environ.update(environment)
    return out.getvalue()
