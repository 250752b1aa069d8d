"""The state of one world: the ranks of one default process group.

Process groups and counters belong to a ``Runtime``, and are dropped with it. A mesh is dropped with
its specs when no reference is left; a rank may hold it for longer than another rank, so
communication never depends on that.

A Runtime refers to its process group weakly, and ends with it: caches are emptied, groups and the
watcher are dropped. So the store of the world ends when ``destroy_process_group`` returns, as it
does without this project. A store that lived on would give the addresses of this world to the next
one that the program starts on the same port.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

from disttensor.cache import caches_aside, clear_caches, fork_safe_lock
from disttensor.torch_private import default_group, release_world


@dataclass(eq=False, slots=True, weakref_slot=True)
class Runtime:
    """The state of one world. ``default_ref``: returns its process group; None if it has ended."""

    default_ref: Any = lambda: None
    made: WeakSet[Any] = field(default_factory=WeakSet)  # Groups, which end with the world
    # interned, as long as tensors or cached plans refer to them
    meshes: WeakValueDictionary[Any, Any] = field(default_factory=WeakValueDictionary)
    shared: list[Any] = field(default_factory=list)  # meshes that torch has as a DeviceMesh
    groups: dict[Any, Any] = field(default_factory=dict)  # torch's, by members and stream
    started: dict[Any, list[int]] = field(default_factory=dict)  # collectives so far, as groups
    calls: Counter[str] = field(default_factory=Counter)  # of groups, in debug mode
    entries: Counter[Any] = field(default_factory=Counter)  # calls of shard_tensor, by line
    tags: dict[int, int] = field(default_factory=dict)  # transfers so far, by channel
    retired: int = 0  # channels of micro-batches whose run has failed
    meetings: int = 0  # calls of create_groups so far
    undelivered: Exception | None = None  # of a message that this rank has sent
    abandoned: list[Any] = field(default_factory=list)  # messages that may never come
    early: dict[Any, Any] = field(default_factory=dict)  # receives that were posted early
    watcher: Any = None  # disttensor.comm.failure_watch; False: this is the only rank
    raises: dict[Any, tuple[str, ...]] = field(default_factory=dict)  # disttensor.comm.lone_failure
    raised: Any = None
    posted: Any = None
    is_given_up: bool = False
    posts_errors: bool = True  # False: a debugger may stop this rank
    steps: Any = None  # disttensor.comm.compare_programs
    buffers: Any = None  # disttensor.comm.buffers
    numbered: dict[int, Any] = field(default_factory=dict)  # disttensor.graphs.traced_comm
    numbers: dict[Any, int] = field(default_factory=dict)
    is_aside: bool = False  # another world has its place for a while
    name: str = ""  # disttensor.comm.process_group.world_name
    store_lasts: bool = False  # the store of the world outlives it
    is_fake: bool | None = None  # None: not known yet
    is_nccl: bool | None = None
    posts_early_receives: bool = True  # disttensor.pipeline.early_receives
    stands_for: str = "fake"  # the backend that a fake process group imitates

    @property
    def default(self) -> Any:
        return self.default_ref()


# The world of one without a process group. Its meshes are kept while process groups exist.
_alone = Runtime()
_current = _alone
_entering = fork_safe_lock()  # two threads must not make two Runtimes of one world


@contextmanager
def set_runtime_aside() -> Iterator[None]:
    """Keeps the current Runtime while other worlds are created and destroyed, and restores it with
    its meshes and groups at the end. The caller keeps its process group alive."""
    global _current
    kept = current_runtime()
    before, kept.is_aside = kept.is_aside, True
    with caches_aside():
        try:
            yield
        finally:
            _current, kept.is_aside = kept, before


def last_runtime() -> Runtime:
    """Returns the most recent Runtime without checking whether its process group still exists."""
    return _current


def current_runtime() -> Runtime:
    """Returns the Runtime of the default process group."""
    global _current
    if default_group() is not _current.default_ref():
        with _entering:
            default = default_group()
            if default is not _current.default_ref():
                _end(_current)
                if default is not None:
                    clear_caches()
                    release_world(default)
                    made = Runtime()
                    made.default_ref = ref(default, partial(_ended, ref(made)))
                    _current = made
    return _current


def _ended(runtime: ref[Runtime], _: Any) -> None:
    now = runtime()
    if now is not None:
        _end(now)


def _end(now: Runtime) -> None:
    """Drops what a world has, after its end."""
    global _current
    if now is _alone or now.is_aside:
        return
    if now is _current:
        clear_caches()
        _current = _alone
    now.groups.clear()
    for group in list(now.made):
        group.end()
    if now.watcher:
        now.watcher.end()
