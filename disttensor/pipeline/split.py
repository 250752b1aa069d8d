"""split: places the layers of a model on the meshes of stages; hooks bring the inputs of a layer to
its mesh.

A layer on its stage is an ordinary module with DistTensor parameters and one forward pre-hook. A
tied parameter of an earlier stage is brought to another layer for the time of its forward only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from disttensor import callbacks
from disttensor.api.shard import reshard
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Partial, Placement, Replicate
from disttensor.nn.parameters import slots
from disttensor.nn.shard_module import Plan, check_plan, place
from disttensor.pipeline.partition import Balance, assign_layers, check_tensors, named_layers
from disttensor.pipeline.unsplit import MODELS
from disttensor.pytree import find_tensors, replace_tensors
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import MICRO_BATCH
from disttensor.tensor.user_facts import pass_attributes
from disttensor.tensor.views import stand_for, view_state
from disttensor.trace.skip import skip

Tensor = torch.Tensor


@dataclass(frozen=True, repr=False)
class Split:
    """The places of layers: ``layers`` are (name, mesh) in order, ``stages`` the meshes in the
    order of the visits.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> split = pipeline.split(layers, [mesh["dp"], mesh["tp"]])
    >>> split
    stage 0 on ProcessMesh(dp=1, tp=1)['dp']: 0, 1
    stage 1 on ProcessMesh(dp=1, tp=1)['tp']: 2
    >>> [name for name, mesh in split], split.counts, split.stages[-1]
    (['0', '1', '2'], (2, 1), ProcessMesh(dp=1, tp=1)['tp'])
    """

    layers: tuple[tuple[str, ProcessMesh], ...]
    stages: tuple[ProcessMesh, ...]
    counts: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[str, ProcessMesh]]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        names = iter(name for name, _ in self.layers)
        rows = [", ".join(next(names) for _ in range(count)) for count in self.counts]
        return "\n".join(
            f"stage {i} on {mesh!r}: {row}"
            for i, (row, mesh) in enumerate(zip(rows, self.stages, strict=True))
        )


def split(
    modules: nn.Module | str | Iterable[nn.Module | str],
    stages: Sequence[ProcessMesh],
    plan: Plan = None,
    *,
    of: nn.Module | None = None,
    counts: Sequence[int] | None = None,
    balance: Balance | None = None,
    sample: Any = None,
    init: Callable[[nn.Module], Any] | None = None,
) -> Split:
    """Places the layers of a model on the meshes of stages, in place. Returns the places.

    Forwards stay unchanged. The inputs of a layer are brought to its mesh first, in the same
    placements (replicated, if the mesh has another number of axes); regular tensors are left alone.
    The output of the last layer, and so the loss, is on ``stages[-1]``. Code between layers that
    uses tensors of two stages needs a ``reshard``. A tied parameter is on the first stage that has
    it, and is brought to another layer whenever that layer runs; ``state_dict`` is as before. All
    parameters of ``of`` must be in the layers or be DistTensors already; regular buffers outside of
    the layers stay regular, and so count as replicated.

    Args:
        modules: an nn.Sequential or nn.ModuleList, or layers in the order in which the model runs
            them; with ``of`` they may be names, and globs in which ``*`` stands for one part of a
            name.
        stages: meshes in the order of the visits; a mesh may occur several times (interleaved).
        plan: as for ``shard_module``; names are full names in ``of`` (in ``modules`` without it).
        of: the model that contains the layers.
        counts: ``counts[i]`` layers are assigned to stage i, in order. By default the numbers are
            as even as possible.
        balance: makes the largest cost of a stage as small as possible. The costs of layers are a
            list of numbers, their elements of parameters (``"parameters"``), or the kernel seconds
            of a forward that the simulator estimates for an H100 (``"time"``).
        sample: the inputs of ``of`` for this estimate, a tuple of arguments or a dict of named
            ones. By default, products of 4096 rows with the matrices are estimated.
        init: as for ``shard_module``.

    Returns:
        The stage of each layer, and ``counts``.

    Raises:
        TypeError, ValueError: tensors cannot be placed; before any change.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> first, second = mesh["dp"], mesh["tp"]
    >>> pipeline.split(model, [first, second], {"2.weight": [dt.Shard(1)]}).counts
    (2, 1)
    >>> model(torch.ones(3, 4)).process_mesh
    ProcessMesh(dp=1, tp=1)['tp']
    """
    check_plan("pipeline.split", plan, init)
    root, layers = named_layers(modules, of)
    dealt = assign_layers(layers, stages, counts, balance, root, sample)
    meshes = [mesh for mesh, count in zip(stages, dealt, strict=True) for _ in range(count)]
    placed = [(name, layer, mesh) for (name, layer), mesh in zip(layers, meshes, strict=True)]
    before = slots(root)
    home: dict[int, ProcessMesh] = {}
    for name, layer, mesh in placed:
        if any(isinstance(hook, _Bring) for hook in layer._forward_pre_hooks.values()):
            raise ValueError(f"pipeline.split: {name!r} is on a stage already: split a model once")
        for slot in slots(layer):
            home.setdefault(id(slot.value), mesh)
    check_tensors(before, home)
    if callable(plan):
        for name, layer, mesh in placed:
            for inner, child in layer.named_modules(prefix=name):
                plan(inner, child, mesh)
        plan = None
    place(root, before, lambda value: home.get(id(value)), plan, init)
    skip(root)
    firsts = set(itertools.accumulate(dealt))  # layers with which a visit begins
    for i, (_, layer, mesh) in enumerate(placed):
        borrowed = _Borrowed(layer, mesh)
        bring = _Bring(mesh, borrowed, i in firsts and placed[i - 1][2] is mesh)
        layer.register_forward_pre_hook(bring, with_kwargs=True, prepend=True)
        if not i:
            layer.register_forward_pre_hook(partial(_check_stages, tuple(stages)), prepend=True)
        if borrowed.names:
            layer.register_forward_hook(borrowed.hide, always_call=True)
    MODELS.add(root)
    return Split(tuple((name, mesh) for name, _, mesh in placed), tuple(stages), tuple(dealt))


# At run time --------------------------------------------------------------------------------------


def _check_stages(stages: tuple[ProcessMesh, ...], layer: nn.Module, args: Any) -> None:
    """Compares the visits of the model with the schedule."""
    graph = MICRO_BATCH.get()
    if graph is not None:
        graph.check_stages(stages)


class _Borrowed:
    """The tensors of a layer that are on another mesh: (name of the owner in the layer, key)."""

    def __init__(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        self.names = [
            (slot.name.rpartition(".")[0], slot.key)
            for slot in slots(layer)
            if isinstance(slot.value, DistTensor) and slot.value.spec.mesh is not mesh
        ]

    def show(self, layer: nn.Module, bring: Callable[[Any], Any]) -> None:
        """Sets attributes that hide the entries of ``_parameters`` and ``_buffers``."""
        places, brought = [], []
        for name, key in self.names:
            owner, what = layer.get_submodule(name), f"{name}.{key}".lstrip(".")
            x = {**owner._parameters, **owner._buffers}.get(key)
            if x is None:
                raise RuntimeError(
                    f"{what!r} of a {type(layer).__name__}, which layers on two stages share, is "
                    "no parameter or buffer any more. Change modules (parametrizations, "
                    "weight_norm) before pipeline.split"
                )
            value = bring(x)
            if value is not x:
                view_state(value).refusal = (
                    f"it writes to {what!r} of a {type(layer).__name__}, which layers on two "
                    "stages share: only the first of them may write to it. Give each stage its "
                    "own module, or set eval()"
                )
            places.append((owner.__dict__, key))
            brought.append(value)
        for (table, key), value in zip(places, brought, strict=True):
            table[key] = value
        callbacks.recompute_contexts()[self] = partial(_show_again, places, brought)

    def hide(self, layer: nn.Module, args: Any, output: Any) -> None:
        callbacks.recompute_contexts().pop(self, None)
        for name, key in self.names:
            layer.get_submodule(name).__dict__.pop(key, None)


@contextmanager
def _show_again(places: list[tuple[dict[str, Any], str]], brought: list[Any]) -> Iterator[None]:
    """Shows the tensors again while the layer, or a region in it, is recomputed."""
    before = [table.pop(key, None) for table, key in places]
    for (table, key), value in zip(places, brought, strict=True):
        table[key] = value
    try:
        yield
    finally:
        for (table, key), value in zip(places, before, strict=True):
            del table[key]
            if value is not None:
                table[key] = value


class _Bring:
    """Forward pre-hook that brings the DistTensors that a layer gets or borrows to its mesh.
    ``begins_visit``: the layer before it is on the same mesh, and ends another visit."""

    def __init__(self, mesh: ProcessMesh, borrowed: _Borrowed, begins_visit: bool) -> None:
        self.mesh, self.borrowed, self.begins_visit = mesh, borrowed, begins_visit

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        inputs = self._inputs(layer, args, kwargs)
        graph = MICRO_BATCH.get()
        if graph is not None and graph.shared_state is not None:
            graph.layers.append(layer)
        return inputs

    def _inputs(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.begins_visit:
            return self._next_visit(*(self._bring(layer, args, kwargs) or (args, kwargs)))
        if len(args) == 1 and not kwargs and not self.borrowed.names:  # most calls
            x = args[0]
            if type(x) is DistTensor:
                mesh = self.mesh
                if x.spec.mesh is mesh:
                    return None
                return (_brought(x, mesh),), kwargs
        return self._bring(layer, args, kwargs)

    def _next_visit(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        graph = MICRO_BATCH.get()
        found = {id(x): x for x in find_tensors((args, kwargs)) if isinstance(x, DistTensor)}
        if graph is None or not graph.has_boundaries or not found:
            return args, kwargs
        cuts = zip(found.values(), graph.next_visit(list(found.values())), strict=True)
        cut = {id(x): x if new is x else _stand_for(new, x) for x, new in cuts}
        return replace_tensors((args, kwargs), lambda x: cut.get(id(x), x))

    def _bring(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        mesh = self.mesh
        brought = dict[int, Tensor]()

        def is_away(x: Any) -> bool:
            return isinstance(x, DistTensor) and x.spec.mesh is not mesh

        def bring(x: Any) -> Any:
            if not is_away(x):
                return x
            if id(x) not in brought:
                brought[id(x)] = _brought(x, mesh)
            return brought[id(x)]

        away = any(map(is_away, find_tensors((args, kwargs))))
        if away:
            args, kwargs = replace_tensors((args, kwargs), bring)
        if self.borrowed.names:
            self.borrowed.show(layer, bring)
        return (args, kwargs) if away else None


def _brought(x: DistTensor, mesh: ProcessMesh) -> DistTensor:
    """Returns x on the mesh of the layer."""
    return _stand_for(reshard(x, mesh, _placements(x, mesh)), x)


def _stand_for(new: DistTensor, x: DistTensor) -> DistTensor:
    """Returns ``new``, which the layer gets in place of x."""
    pass_attributes(x, new)
    stand_for(new, x)
    return new


def _placements(x: DistTensor, mesh: ProcessMesh) -> list[Placement] | None:
    """Returns the same placements on the other mesh, with pending sums reduced first, as several
    calls may read the result."""
    if mesh.ndim != x.spec.mesh.ndim:
        return None
    return [Replicate() if isinstance(p, Partial) else p for p in x.spec.placements]
