"""visualize: a picture of a tensor or a table of a module, also for a plan that is not applied."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from disttensor.api.interop import from_dtensor
from disttensor.checks import argument_error, check_int, check_shape, check_type, has_own_operators
from disttensor.comm.process_group import world as current_world
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.spec import DistSpec, spec_of
from disttensor.nn.parameters import slots
from disttensor.nn.shard_module import check_plan, shard_module
from disttensor.parallel.degrees import AXES
from disttensor.parallel.strategy import Strategy
from disttensor.pieces.picture import Picture
from disttensor.pieces.table import Table
from disttensor.simulate.world import simulated_rank
from disttensor.tensor.dist_tensor import DistTensor

_WHAT = "a DistTensor, a DTensor, a DistSpec, a module, or a shape with mesh= and plan=,"


def visualize(
    x: Any,
    *,
    plan: Any = None,
    mesh: ProcessMesh | Mapping[str, int] | None = None,
    strategy: Strategy | None = None,
    world: int | None = None,
    layers: Iterable[nn.Module | str] | None = None,
) -> Picture | Table:
    """Shows which rank holds which part of a tensor, or the tensors of a module with their bytes.

    Sends, changes and reads no data. All ranks get the same result: ``print`` shows text, and a
    notebook a drawing.

    Args:
        x: a DistTensor, torch's DTensor, a ``DistSpec``, or a module. With ``mesh``: a regular
            tensor or a shape. With ``mesh`` or ``strategy``: a regular module.
        plan: of a module, as for ``shard_module`` or ``Strategy.apply``; of a tensor or a shape,
            its placements.
        mesh: where ``plan`` would place it: a mesh, or the sizes by axis of a simulated one, as
            ``{"dp": 2, "tp": 4}``.
        strategy: that would be applied to the module, with ``plan`` and ``layers``.
        world: the number of ranks for ``strategy``. Default: the current world, and in one process
            the product of the degrees that are given.
        layers: see ``Strategy.apply``.

    Returns:
        A Picture of a tensor (``pieces``, ``save(path)``), or a Table of a module (``rows``,
        ``nbytes`` by rank).

    Raises: TypeError: ``x`` is none of these. ValueError: arguments that do not go together; any
        error of ``shard_module`` and
            ``Strategy.apply``.

    >>> print(dt.visualize((8, 6), plan=[dt.Shard(0), dt.Shard(1)], mesh={"dp": 2, "tp": 2}))
    f32[8@dp, 6@tp] on ProcessMesh(dp=2, tp=2)
    <BLANKLINE>
           0:3      3:6
        ┌────────┬────────┐
    0:4 │ rank 0 │ rank 1 │
        ├────────┼────────┤
    4:8 │ rank 2 │ rank 3 │
        └────────┴────────┘
    <BLANKLINE>
    bytes on a rank: 48
    """
    if isinstance(x, nn.Module):
        if mesh is None and strategy is None:
            if plan is not None or layers is not None or world is not None:
                raise ValueError(
                    "visualize: plan=, layers= and world= describe how a module would be placed: "
                    "give mesh= or strategy= too, or none of them, for the module as it is"
                )
            return Table.of(x)
        return _planned(x, plan, mesh, strategy, world, layers)
    for name, value in (("strategy", strategy), ("world", world), ("layers", layers)):
        if value is not None:
            raise ValueError(f"visualize: {name}= describes a module, and x is {type(x).__name__}")
    if isinstance(x, (DistTensor, DistSpec)) or type(x).__name__ == "DTensor":
        if mesh is not None or plan is not None:
            raise ValueError(
                "visualize: x has a mesh and placements. To see it in others, give its shape: "
                "visualize(x.shape, mesh=..., plan=[placements])"
            )
        x = x if isinstance(x, (DistTensor, DistSpec)) else from_dtensor(x)
        return Picture.of(x.spec if isinstance(x, DistTensor) else x)
    shape, dtype = x, torch.get_default_dtype()
    if isinstance(x, torch.Tensor):
        shape, dtype = x.shape, x.dtype
    elif not isinstance(x, Sequence) or isinstance(x, str):
        raise argument_error("visualize: x", x, _WHAT)
    if mesh is None:
        raise ValueError(f"visualize: {tuple(shape)} is on no mesh: give mesh= and plan=")
    with _simulated_mesh(mesh) as there:
        return Picture.of(spec_of(there, check_shape("visualize: x", shape), dtype, plan))


@contextmanager
def _simulated_mesh(mesh: Any, data: bool = True) -> Iterator[ProcessMesh]:
    """Yields a mesh that cannot communicate: a copy of ``mesh``, or a mesh of the given sizes."""
    if isinstance(mesh, Mapping):
        for axis, size in mesh.items():
            check_type("visualize: mesh: axis", axis, str, "the name of an axis")
            check_int(f"visualize: mesh: {axis}", size, 1, "a number of ranks")
        if not mesh:
            raise argument_error("visualize: mesh", mesh, "one axis or more", ValueError)
        rank, size = 0, math.prod(mesh.values())
    else:
        expected = 'a mesh, or the sizes of its axes, as {"dp": 2, "tp": 4},'
        check_type("visualize: mesh", mesh, (ProcessMesh, DeviceMesh), expected)
        mesh = as_mesh("visualize: mesh", mesh)
        rank, size = current_world()
    with simulated_rank(rank, size, data=data), _without_addresses():
        if isinstance(mesh, Mapping):
            ranks = np.arange(size).reshape(tuple(mesh.values()))
            yield ProcessMesh(ranks, tuple(mesh))
        else:
            root = ProcessMesh(mesh.root.mesh, mesh.root.dim_names, "cpu")
            yield root if mesh.root is mesh else root[mesh.dim_names]


@contextmanager
def _without_addresses() -> Iterator[None]:
    """Ignores torch's warning about addresses, which the engine only compares."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def _planned(
    module: nn.Module, plan: Any, mesh: Any, strategy: Any, ranks: int | None, layers: Any
) -> Table:
    """Places a copy of the module, whose tensors have no data, in a simulated world."""
    if mesh is not None and strategy is not None:
        raise ValueError("visualize: a strategy makes its own mesh: give mesh= or strategy=")
    for slot in slots(module):
        if isinstance(slot.value, DistTensor):
            raise ValueError(
                f"visualize: {slot.name!r} is placed already, {slot.value.spec!r}: give the module "
                "as it was before, or leave plan=, mesh= and strategy= out to see it as it is"
            )
    check_plan("visualize", plan, None)
    if strategy is None:
        if ranks is not None or layers is not None:
            raise ValueError("visualize: world= and layers= belong to strategy=")
        with _simulated_mesh(mesh, data=False) as there:
            copied = shard_module(_copy(module), there, plan, init=_leave)
            return Table.of(copied, f"{type(module).__name__} as this plan places it on {there!r}")
    check_type("visualize: strategy", strategy, Strategy, "a Strategy")
    if ranks is None:
        given = (getattr(strategy, axis) or 1 for axis in AXES)
        ranks = current_world()[1] if current_world()[1] > 1 else math.prod(given)
    check_int("visualize: world", ranks, 1, "a number of ranks")
    degrees = strategy.degrees(ranks)
    with simulated_rank(0, ranks), _without_addresses():
        copied = _copy(module)
        # the bytes do not depend on the device, which this process may not have
        on_cpu = replace(strategy, device_type="cpu")
        on_cpu.apply(copied, plan=plan, layers=layers, init=_leave)
        return Table.of(copied, f"{type(module).__name__} under {degrees} on {ranks} ranks")


def _copy(module: nn.Module) -> nn.Module:
    """Returns a copy of the module, with tensors that have no data."""
    made: dict[int, Any] = {}
    for slot in slots(module):
        x = slot.value
        if not has_own_operators(x):
            new = torch.empty(x.shape, dtype=x.dtype, device="cpu")
            is_parameter = isinstance(x, nn.Parameter)
            made[id(x)] = nn.Parameter(new, x.requires_grad) if is_parameter else new
    return copy.deepcopy(module, made)


def _leave(module: nn.Module) -> None:
    """Initializes nothing."""
