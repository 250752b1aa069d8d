"""One change to torch or another library, and the functions that make it and revert it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

Undo = Callable[[], None]
Make = Callable[[], Undo]
Place = str | tuple[Any, str]  # "module:name" or "module:Class.name", or an owner and a name

_waiting: dict[str, list[Callable[[], None]]] = {}


@dataclass(frozen=True)
class Change:
    """what: a name in torch; why: the problem without the change; public: the public API, and why
    it is not enough; make: makes the change, and returns a function to undo it."""

    what: str
    why: str
    public: str
    make: Make


def replace(new: Callable[[Any], Any], *places: Place) -> Make:
    """Returns a change that puts ``new(original)`` at ``places``, which are names of one function,
    when the module of the first is imported. Undoing it keeps replacements that other code has made
    since."""

    def change(module: Any = None) -> Undo:
        found = [_owner_of(place) for place in places]
        before = inspect.getattr_static(*found[0])
        after = new(before)
        for owner, name in found:
            setattr(owner, name, after)

        def undo() -> None:
            for owner, name in found:
                if inspect.getattr_static(owner, name) is after:
                    setattr(owner, name, before)

        return undo

    first = places[0]
    return partial(once_imported, first.split(":")[0], change) if type(first) is str else change


def _owner_of(place: Place) -> tuple[Any, str]:
    """Returns the owner of a place, whose module is imported, and the name there."""
    if isinstance(place, tuple):
        return place
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    return reduce(getattr, owners, sys.modules[module]), name


def append_to(table: list[Any], item: Any) -> Make:
    def make() -> Undo:
        table.append(item)
        return lambda: table.remove(item)

    return make


def join(*makes: Make) -> Make:
    """Joins several changes to one."""

    def make() -> Undo:
        undos = [one() for one in makes]

        def undo() -> None:
            for one in reversed(undos):
                one()

        return undo

    return make


# Modules that are not imported yet ----------------------------------------------------------------


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
