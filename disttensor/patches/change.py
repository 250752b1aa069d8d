"""One change to torch or another library, and the functions that make it and revert it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disttensor.patches.imports import Undo, once_imported

_originals: dict[str, Any] = {}


@dataclass(frozen=True)
class Change:
    """what: a name in torch; why: the problem without the change; public: the public API, and why
    it is not enough; make: makes the change, and returns a function to undo it."""

    what: str
    why: str
    public: str
    make: Callable[[str], Undo]


def replace(new: Callable[[Any], Any], *places: tuple[Any, str]) -> Callable[[str], Undo]:
    """Returns a change that puts ``new(original)`` at ``places``, which are names of one function.
    Undoing it keeps replacements that other code has made since."""

    def make(what: str) -> Undo:
        owner, name = places[0]
        before = _originals[what] = inspect.getattr_static(owner, name)
        after = new(before)
        for owner, name in places:
            setattr(owner, name, after)

        def undo() -> None:
            for owner, name in places:
                if inspect.getattr_static(owner, name) is after:
                    setattr(owner, name, before)

        return undo

    return make


def replace_in_module(
    module: str, new: Callable[[Any], Any], name: str, owner: str | None = None
) -> Callable[[str], Undo]:
    """Returns ``replace`` for a module, or its class ``owner``, applied when it is imported."""

    def make(what: str) -> Undo:
        def change(found: Any) -> Undo:
            return replace(new, (getattr(found, owner) if owner else found, name))(what)

        return once_imported(module, change)

    return make


def append_to(table: list[Any], item: Any) -> Callable[[str], Undo]:
    def make(what: str) -> Undo:
        table.append(item)
        return lambda: table.remove(item)

    return make


def join(*makes: Callable[[str], Undo]) -> Callable[[str], Undo]:
    """Joins several changes to one."""

    def make(what: str) -> Undo:
        undos = [one(what) for one in makes]

        def undo() -> None:
            for one in reversed(undos):
                one()

        return undo

    return make


def original(name: str) -> Any:
    """Returns the object of torch that a change replaced."""
    return _originals[name]
