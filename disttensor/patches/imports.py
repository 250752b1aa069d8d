"""A change to a module of torch that is not imported yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

Undo = Callable[[], None]

_waiting: dict[str, list[Callable[[], None]]] = {}


class _Finder(MetaPathFinder):
    """Runs what waits for a module as soon as that is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _waiting else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                for change in _waiting.pop(name, ()):
                    change()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def once_imported(module: str, make: Callable[[Any], Undo]) -> Undo:
    """Calls ``make(module)`` now, or when the module is imported. Returns a function to undo it."""
    if module in sys.modules:
        return make(sys.modules[module])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    made: list[Undo] = []

    def change() -> None:
        made.append(make(sys.modules[module]))

    _waiting.setdefault(module, []).append(change)

    def undo() -> None:
        for take_back in made:
            take_back()
        if not made and change in (waiting := _waiting.get(module, [])):
            waiting.remove(change)
            if not waiting:
                del _waiting[module]
        if not _waiting and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)

    return undo
