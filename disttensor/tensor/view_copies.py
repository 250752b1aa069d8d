"""Copies in place of views: a view function that had to move data gives a tensor with memory of its
own.

In one process a write to the one would be seen in the other. So a write to such a copy is refused,
or brought back to what it was taken from; and after a write to that (through whatever view of it)
the copy is out of date: its local is replaced by an ``Outdated``, and any use of it raises. Reading
costs nothing extra.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from disttensor.torch_private import storage_id

LIVE: dict[int, list[weakref.ref[Any]]] = {}  # storage -> the copies that were taken from it
# storages of copies whose write is being brought back: they are up to date
_current: list[int] = []


class Copied:
    """Where a copy came from: the view function, and the storages (kept, as a view would keep them)
    it depends on."""

    __slots__ = ("__weakref__", "name", "storages")

    def __init__(self, name: str, storages: list[Any]) -> None:
        self.name = name
        self.storages = storages

    def __str__(self) -> str:
        return self.name


class Outdated:
    """In place of the local of a copy whose source was written to."""

    def __init__(self, message: str) -> None:
        object.__setattr__(self, "message", message)

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(object.__getattribute__(self, "message"))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        found = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Outdated))
        raise RuntimeError(object.__getattribute__(found, "message"))


def enter(copy: Any, source: Any, name: str) -> None:
    """``copy`` was taken from ``source`` (both DistTensors) by the view function ``name``, which
    moved data."""
    _follow(
        copy,
        Copied(
            name,
            [source.local.untyped_storage(), *(source._copied.storages if source._copied else ())],
        ),
    )


def inherit(view: Any, source: Any) -> None:
    """``view`` shares the memory of ``source``, which is a copy: so is the view."""
    back: Callable[[Any], Any] | None = source._back
    if back is not None:
        view._back = lambda _: back(source)
    _follow(view, Copied(source._copied.name, source._copied.storages))


def _follow(copy: Any, copied: Copied) -> None:
    copy._copied = copied
    for storage in copied.storages:
        key = storage_id(storage)
        copies = LIVE.setdefault(key, [])

        def gone(ref: weakref.ref[Any], key: int = key) -> None:
            left = [r for r in LIVE.get(key, ()) if r is not ref]
            if left:
                LIVE[key] = left
            else:
                LIVE.pop(key, None)

        copies.append(weakref.ref(copy, gone))


def outdate(written: torch.Tensor) -> None:
    """The memory of ``written`` has changed: copies that were taken from it hold old values."""
    for ref in LIVE.get(storage_id(written.untyped_storage()), ()) if LIVE else ():
        copy = ref()
        if (
            copy is not None
            and not isinstance(copy.local, Outdated)
            and storage_id(copy.local.untyped_storage()) not in _current
        ):
            copy.local = Outdated(
                f"{copy.spec!r} came from {copy._copied}, which had to move data and gave a copy; "
                "the tensor that it was taken from has been written to since, which a view would "
                "show. Take it again for the new values, or clone() it before the write to keep "
                "the old ones"
            )


def check(copy: Any) -> None:
    """Raise if ``copy`` is out of date: for what would hand out its local unread."""
    if isinstance(copy.local, Outdated):
        _ = copy.local.shape


@contextmanager
def up_to_date(copy: Any) -> Iterator[None]:
    """While a write to ``copy`` is brought back to what it was taken from."""
    _current.append(storage_id(copy.local.untyped_storage()))
    try:
        yield
    finally:
        _current.pop()
