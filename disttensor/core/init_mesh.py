"""init_mesh: starts the process group if there is none, and returns a mesh of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from disttensor.checks import check_positive, check_shape, check_type
from disttensor.comm import failure_watch
from disttensor.comm.process_group import join_world, world
from disttensor.core.mesh import ProcessMesh, axis_names, check_device_type


def init_mesh(
    shape: Sequence[int], dim_names: Sequence[str] | None = None, *, device_type: str | None = None,
    backend: str | None = None, timeout: float | None = None,
) -> ProcessMesh:  # fmt: skip
    """Returns a mesh of all ranks; starts the process group if there is none yet (torchrun's
    environment, or a world of one).

    ``timeout``: seconds that a collective waits for the other ranks (600). Raises ValueError if the
    shape does not hold exactly the world, or if a process group exists with another backend or
    timeout; RuntimeError if torchrun's environment is incomplete.

    >>> dt.init_mesh((1, 1), ("dp", "tp"))
    ProcessMesh(dp=1, tp=1)
    """
    shape = check_shape("init_mesh: shape", shape, 1)
    axis_names("init_mesh", dim_names, max(1, len(shape)))
    check_device_type("init_mesh", device_type)
    check_type("init_mesh: backend", backend, (str, type(None)), "a name, as 'gloo',")
    if timeout is not None:
        check_positive("init_mesh: timeout", timeout, "a positive number of seconds")
    join_world(device_type, backend, timeout)
    failure_watch.watch()
    size = world()[1]
    places = math.prod(shape)
    if places != size:
        raise ValueError(
            f"init_mesh({shape}): the mesh has {places} places, the "
            f"world {size} processes; choose sizes whose product is {size}, or start that many "
            "processes (torchrun --nproc-per-node N)"
        )
    return ProcessMesh(np.arange(size).reshape(shape), dim_names, device_type)


def mesh_of_all(dim_name: str) -> ProcessMesh:
    """Returns a mesh of all ranks with one axis; starts the process group if there is none yet."""
    join_world()
    failure_watch.watch()
    return ProcessMesh(range(world()[1]), (dim_name,))
