"""What belongs to one world: the ranks of one default process group.

Meshes, with their groups and specs, process groups and counters hang on a Runtime, and are dropped
with it. ``current`` notices when ``destroy_process_group`` or ``init_process_group`` was called: it
starts another Runtime from zero and empties all caches. Nobody is told when a process group is
destroyed, so the old world goes when the next one is first used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from disttensor import cache


@dataclass(eq=False, slots=True, weakref_slot=True)
class Runtime:
    """The state of one world. ``default``: its process group."""

    default: Any
    meshes: dict[Any, Any] = field(default_factory=dict)
    groups: dict[Any, Any] = field(default_factory=dict)  # torch's, by members and stream
    tags: dict[int, int] = field(default_factory=dict)  # transfers so far, by channel
    meetings: int = 0  # calls of create_groups so far
    undelivered: Exception | None = None  # of a message that this rank has sent


# Without a process group: a world of one, whose meshes are there whenever there is none.
_alone = Runtime(None)
_current = _alone


def current() -> Runtime:
    """The Runtime of the default process group."""
    global _current
    default = dist.group.WORLD
    if default is not _current.default:
        cache.clear()
        _current = _alone if default is None else Runtime(default)
    return _current
