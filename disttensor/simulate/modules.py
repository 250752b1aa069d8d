"""The modules of a simulated program: each rank imports its own, as processes do.

A module may keep what it has read of its rank when it was imported (``RANK``, a mesh). Installed
packages and C extensions are imported once for all ranks: they take long, and some refuse a second
time.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(str(_ROOT / name) for name in ("disttensor", "ops", "reshard"))
_PACKAGES = {"site-packages", "dist-packages"}


@contextmanager
def own_modules(of_script: bool = False) -> Iterator[None]:
    """Modules of the program that are imported inside are forgotten afterwards. ``of_script``:
    those that were imported before are imported again inside, and are afterwards what they were."""
    before = dict(sys.modules)
    if of_script:
        for name in _of_program(before):
            del sys.modules[name]
    try:
        yield
    finally:
        for name in _of_program(sys.modules):
            module, (parent, _, child) = sys.modules[name], name.rpartition(".")
            if module is before.get(name):
                continue
            del sys.modules[name]
            if before.get(parent) is not None and vars(before[parent]).get(child) is module:
                delattr(before[parent], child)  # else "from parent import child" finds it there
        sys.modules.update(before)


def _of_program(modules: dict[str, ModuleType]) -> list[str]:
    """Names of modules written in Python that are not installed and not ours."""
    return [name for name, module in modules.items()
            if name != "__main__" and any(map(_is_program, _places(module)))]  # fmt: skip


def _places(module: ModuleType) -> list[str]:
    """Its file, or the folders of a package without one."""
    file = getattr(module, "__file__", None)
    if file is not None:
        return [file]
    return [place for place in getattr(module, "__path__", ()) if isinstance(place, str)]


@cache
def _is_program(place: str) -> bool:
    path = Path(place)
    if path.suffix not in ("", ".py") or _PACKAGES & {*path.parts}:
        return False
    return not any(path.is_relative_to(folder) or path.resolve().is_relative_to(folder)
                   for folder in (*_OURS, *_installed()))  # fmt: skip


@cache
def _installed() -> tuple[str, ...]:
    """Folders of Python's own library and of packages: pip leaves a .dist-info beside each."""
    paths = sysconfig.get_paths()
    known = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    with_packages = [p for p in sys.path if p and any(Path(p).glob("*.dist-info"))]
    return (*known, site.getusersitepackages(), *with_packages)
