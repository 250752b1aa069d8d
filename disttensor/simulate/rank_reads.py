"""Notes the lines at which a program reads its rank: the environment, torch.distributed, or the
coordinates of a mesh. Ranks of such a program may do something of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from disttensor.core.mesh import ProcessMesh
from disttensor.errors import is_users, user_line

_VARIABLES = "RANK", "LOCAL_RANK", "GROUP_RANK"
_OF_MESHES = "get_coordinate", "get_local_rank", "get_rank"


def watch_rank_reads() -> dict[str, None]:
    """Returns the lines, in order, to which later reads are added until this process ends."""
    lines: dict[str, None] = {}

    def noting(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            if frame.f_code.co_name in _OF_MESHES:
                frame = frame.f_back
            if is_users(frame):
                lines[user_line()] = None
            return read(*args, **kwargs)

        return call

    class Environment(type(os.environ)):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            if name in _VARIABLES:
                lines[user_line()] = None
            value: str = super().__getitem__(name)
            return value

    os.environ.__class__ = Environment
    for owner in (dist, sys.modules["torch.distributed.distributed_c10d"]):
        vars(owner)["get_rank"] = noting(dist.get_rank)
    for name in _OF_MESHES:
        setattr(DeviceMesh, name, noting(getattr(DeviceMesh, name)))
    kept = "coordinate"
    read_kept = noting(lambda mesh: vars(mesh)[kept])
    ProcessMesh.coordinate = property(  # type: ignore[assignment]
        read_kept, lambda mesh, value: vars(mesh).__setitem__(kept, value)
    )
    return lines
