"""Finds the layers of a model, and the number of layers of each stage, without changing the
model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from disttensor.checks import check_int, check_number, check_sequence, check_type
from disttensor.core.mesh import ProcessMesh
from disttensor.nn.names import find_modules, has_forward
from disttensor.nn.parameters import Slot
from disttensor.tensor.dist_tensor import DistTensor

Layers = list[tuple[str, nn.Module]]


def named_layers(
    modules: nn.Module | str | Iterable[nn.Module | str], of: nn.Module | None
) -> tuple[nn.Module, Layers]:
    """Returns the module in which names count, and (name, layer) in order. Raises as ``split``."""
    if of is not None:
        check_type("pipeline.split: of", of, nn.Module, "a module")
    if isinstance(modules, (nn.Sequential, nn.ModuleList)):
        entries: list[Any] = list(modules)
        root = modules if of is None else of
    elif isinstance(modules, nn.Module):
        raise TypeError(
            f"pipeline.split: the order in which {type(modules).__name__} runs its layers is not "
            "known. Give a Sequential, a ModuleList, or the names of the layers in order with "
            "of=model"
        )
    else:
        named = (modules,) if isinstance(modules, str) else modules
        expected = "a Sequential, a ModuleList, or a list of layers"
        entries = list(check_sequence("pipeline.split: modules", named, expected))
        for entry in entries:
            if not isinstance(entry, (nn.Module, str)):
                raise TypeError(
                    f"pipeline.split: modules: {entry!r} is neither a module nor a name of one"
                )
            if of is None and isinstance(entry, str):
                raise TypeError(
                    f"pipeline.split: modules: {entry!r} is a name in which model? Give of=model"
                )
        root = nn.ModuleList(entries) if of is None else of
    names = {id(module): name for name, module in root.named_modules()}
    layers: Layers = []
    for entry in entries:
        if isinstance(entry, str):
            layers += find_modules(root, entry, "pipeline.split: ")
        elif id(entry) in names:
            layers.append((names[id(entry)], entry))
        else:
            raise ValueError(
                f"pipeline.split: a listed {type(entry).__name__} is not part of the model"
            )
    _check_layers(layers)
    return root, layers


def _check_layers(layers: Layers) -> None:
    names: dict[int, str] = {}
    for name, layer in layers:
        if id(layer) in names:
            raise ValueError(
                f"pipeline.split: {name!r} is listed twice"
                + (f", first as {names[id(layer)]!r}" if names[id(layer)] != name else "")
                + "; a layer lies on one stage, however often the model calls it"
            )
        if not has_forward(layer):
            raise ValueError(
                f"pipeline.split: {name!r}, a {type(layer).__name__}, has no forward, so nothing "
                "could be brought to it: list the modules in it that are called"
            )
        names[id(layer)] = name
    for name, layer in layers:
        for part in layer.modules():
            if part is not layer and id(part) in names:
                raise ValueError(
                    f"pipeline.split: {names[id(part)]!r} is listed, and is a part of {name!r}, "
                    "which is listed too: one or the other"
                )


def assign_layers(
    layers: Layers,
    stages: Sequence[ProcessMesh],
    counts: Sequence[int] | None = None,
    balance: Balance | None = None,
    of: nn.Module | None = None,
    sample: Any = None,
) -> list[int]:
    """Returns the number of layers of each stage. Raises as ``split``."""
    count = len(layers)
    for mesh in check_sequence("pipeline.split: stages", stages, "a list of meshes"):
        if not isinstance(mesh, ProcessMesh):
            raise TypeError(
                "pipeline.split: stages are meshes, one for each visit, as [mesh[0], mesh[1]]; "
                f"got {mesh!r}"
            )
    number = len(stages)
    if balance is not None:
        _check_balance(balance, counts, layers)
    if sample is not None and balance != "time":
        raise ValueError(
            "pipeline.split: sample is what balance='time' estimates the layers by, and "
            f"balance={balance!r}"
        )
    if counts is not None:
        for n in check_sequence("pipeline.split: counts", counts, "a list of whole numbers"):
            check_int("pipeline.split: counts: entry", n)
        if len(counts) != number or sum(counts) != count or min(counts, default=0) < 1:
            raise ValueError(
                f"pipeline.split: counts={list(counts)}: one number from 1 up for each of {number} "
                f"stages, {count} together, as there are {count} layers"
            )
        return list(counts)
    if not 0 < number <= count:
        raise ValueError(
            f"pipeline.split: {count} layers on {number} stages: each stage needs one at least. "
            "Name smaller parts of the model, or give fewer stages"
        )
    costs = BALANCES[balance](layers, of, sample) if isinstance(balance, str) else balance
    return divide_layers(count, number, costs)


def divide_layers(count: int, number: int, costs: Sequence[float] | None = None) -> list[int]:
    """Returns the number of layers of each of ``number`` stages: as even as possible, or, with the
    cost of each layer, such that the most expensive stage costs as little as possible.

    >>> divide_layers(5, 2), divide_layers(4, 2, [1.0, 1.0, 0.5, 3.0])
    ([3, 2], [3, 1])
    """
    if costs is None:
        return [count // number + (stage < count % number) for stage in range(number)]
    sums = [0.0, *itertools.accumulate(costs)]
    # best[j]: (most of one stage, where the stages begin) of the first j layers
    best: list[tuple[float, tuple[int, ...]]] = [(n, (0,)) for n in sums]
    for stage in range(1, number):
        best = [(0.0, ())] * (stage + 1) + [
            min((max(best[i][0], sums[j] - sums[i]), (*best[i][1], i)) for i in range(stage, j))
            for j in range(stage + 1, len(sums))
        ]
    ends = (*best[-1][1][1:], count)
    return [end - start for start, end in zip(best[-1][1], ends, strict=True)]


def elements(layers: Layers, of: nn.Module | None = None, sample: Any = None) -> list[int]:
    """Returns the parameter elements of each layer. A tied parameter counts in its first layer."""
    seen: set[int] = set()
    costs = []
    for _, layer in layers:
        own = {id(p): p.numel() for p in layer.parameters() if id(p) not in seen}
        seen |= own.keys()
        costs.append(sum(own.values()))
    return costs


Balance = str | Sequence[float]
# Name -> costs of layers, of a model, for a sample of its inputs. ``simulate`` adds "time".
BALANCES: dict[str, Callable[[Layers, nn.Module | None, Any], Sequence[float]]] = {
    "parameters": elements
}


def _check_balance(balance: Any, counts: Any, layers: Layers) -> None:
    """Raises ValueError or TypeError unless it is a name in BALANCES, or a cost of each layer."""
    if isinstance(balance, str) or not isinstance(balance, Sequence):
        if balance not in list(BALANCES) or counts is not None:
            raise ValueError(
                f"pipeline.split: balance={balance!r}: None, 'parameters', 'time' or a list with a "
                "cost of each layer is expected, and not together with counts"
            )
        return
    for cost in balance:
        check_number("pipeline.split: balance: entry", cost)
    if len(balance) != len(layers) or counts is not None or min(balance) < 0:
        raise ValueError(
            f"pipeline.split: balance={list(balance)}: one cost, not negative, for each of "
            f"{len(layers)} layers is expected, and not together with counts"
        )


def check_tensors(slots: Iterable[Slot], home: Mapping[int, ProcessMesh]) -> None:
    """Raises ValueError for a tensor on another mesh than ``home``, or a parameter on none."""
    plain = []
    for name, owner, _, key, value in slots:
        mesh = home.get(id(value))
        if isinstance(value, DistTensor):
            if mesh is not None and value.spec.mesh is not mesh:
                raise ValueError(
                    f"pipeline.split: {name!r} lies on {value.spec.mesh!r} already, and its stage "
                    f"is {mesh!r}: split the model before anything else is done with its parameters"
                )
        elif mesh is None and (key in owner._parameters or value.is_meta):
            plain.append(name)
    if plain:
        raise ValueError(
            f"pipeline.split: {', '.join(plain[:5])}{', ...' if len(plain) > 5 else ''}: in no "
            "layer that is listed, so on no stage. List the modules, or place the parameters "
            "first: nn.Parameter(dt.shard_tensor(value, mesh))"
        )
