"""Caches of a bounded size. They are emptied when their world ends; caches of decisions also when a
rule, a reshard or a setting changes.

Specs and meshes are keys of nearly all caches, and would keep destroyed process groups alive. A
function whose arguments contain no mesh (a dtype, a device, a function) uses
``functools.lru_cache``; a dict with such keys is a Cache with ``lasting=True``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., object])

_dicts: weakref.WeakValueDictionary[int, Cache[object, object]] = weakref.WeakValueDictionary()
_functions: list[Callable[[], None]] = []
_at_end: list[Callable[[], None]] = []


def fork_safe_lock() -> Any:
    """Returns a lock that is free in a forked process, also if another thread uses it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        free = lock.release
        os.register_at_fork(before=lock.acquire, after_in_parent=free, after_in_child=free)
    return lock


_lock = fork_safe_lock()


class Cache(dict[K, V]):
    """A dict of at most ``limit`` entries: one more drops the oldest. Read it with ``get``, the
    unchanged method of dict.

    Args:
        lasting: it contains no mesh, and is kept when worlds and decisions are dropped.
        received: it contains data from other ranks, and is kept when decisions are dropped.
    """

    __slots__ = ("__weakref__", "limit", "received")

    def __init__(self, limit: int, lasting: bool = False, received: bool = False) -> None:
        super().__init__()
        self.limit, self.received = limit, received
        if not lasting:
            _dicts[id(self)] = self  # type: ignore[assignment]

    def __setitem__(self, key: K, value: V) -> None:
        with _lock:
            while len(self) >= self.limit and key not in self:
                del self[next(iter(self))]
            super().__setitem__(key, value)


def cached(limit: int) -> Callable[[F], F]:
    """Caches the last ``limit`` results of a function of hashable arguments: ``@cached(1024)``."""

    def remember(function: F) -> F:
        made = lru_cache(maxsize=limit)(function)
        _functions.append(made.cache_clear)
        return made  # type: ignore[return-value]

    return remember


def call_when_cleared(fn: Callable[[], None], received: bool = False) -> None:
    """Makes ``clear_caches`` call ``fn``; without ``received``, ``clear_decisions`` calls it
    too."""
    (_at_end if received else _functions).append(fn)


def clear_decisions() -> None:
    """Empties the caches of decisions. Called when a rule, a reshard or a setting has changed."""
    for cache in list(_dicts.values()):
        if not cache.received:
            cache.clear()
    for empty in _functions:
        empty()


def clear_caches() -> None:
    """Empties all caches."""
    clear_decisions()
    for cache in list(_dicts.values()):
        cache.clear()
    for empty in _at_end:
        empty()


@contextmanager
def caches_aside() -> Iterator[None]:
    """Empties all caches for a block, and at its end. Data from other ranks are restored at the
    end, because those ranks would not send them again."""
    before = [(cache, dict(cache)) for cache in list(_dicts.values()) if cache.received]
    clear_caches()
    try:
        yield
    finally:
        clear_caches()
        for cache, entries in before:
            cache.update(entries)
