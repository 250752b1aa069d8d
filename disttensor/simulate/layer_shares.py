"""The part of the FLOPs that each layer does: sums over the modules around it, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from disttensor.simulate.events import PHASES
from disttensor.simulate.text import quantity

Flops = dict[str, dict[str, int]]  # layer -> phase -> FLOPs
_ROWS = 12  # of a table


def added(parts: Iterable[tuple[str, Mapping[str, int], int]]) -> Flops:
    """Returns the sum of (layer, its FLOPs by phase, factor)."""
    out: Flops = {}
    for layer, phases, times in parts:
        sums = out.setdefault(layer, {})
        for phase, n in phases.items():
            sums[phase] = sums.get(phase, 0) + n * times
    return out


def rolled_up(layers: Flops, depth: int) -> Flops:
    """Adds the layers whose names have more than ``depth`` parts to the modules around them."""
    short = {layer: ".".join(layer.split(".")[:depth]) for layer in layers}
    return added((short[layer], phases, 1) for layer, phases in layers.items())


def largest(layers: Flops, most: int = _ROWS) -> Flops:
    """Returns the modules that do most, including the modules inside, each after the module around
    it. Modules whose names differ by a number, and that contain modules, are one: ``blocks.*``. A
    module that does as much as a module inside is omitted."""
    inner = {path for layer in layers for path in _paths(layer) if path != layer}
    tree = added((path, phases, 1) for layer, phases in layers.items()
                 for path in _paths(_starred(layer, inner)))  # fmt: skip
    whole = {(name.rpartition(".")[0], sum(phases.values())) for name, phases in tree.items()}
    shown = [name for name in tree if (name, sum(tree[name].values())) not in whole]
    shown = sorted(shown, key=lambda name: -sum(tree[name].values()))[:most]
    return {name: tree[name] for name in _in_order(tree) if name in shown}


def _paths(layer: str) -> Iterator[str]:
    """Yields the modules around a layer, the outermost first, and the layer."""
    return accumulate(layer.split("."), "{}.{}".format)


def _starred(layer: str, inner: set[str]) -> str:
    return ".".join(
        "*" if name.isdigit() and path in inner else name
        for name, path in zip(layer.split("."), _paths(layer), strict=True)
    )


def _in_order(tree: Flops) -> list[str]:
    """Sorts names as a walk over the tree; the modules inside one module keep their order."""
    at = {name: i for i, name in enumerate(tree)}
    return sorted(tree, key=lambda name: [at[path] for path in _paths(name)])


def rows(layers: Flops) -> list[tuple[str, ...]]:
    """Returns the rows of a table, the first of which is its head."""
    total = sum(sum(phases.values()) for phases in layers.values())
    out: list[tuple[str, ...]] = [("FLOP by layer", *PHASES[:2], "share")]
    for name, phases in largest(layers).items():
        both = [quantity(phases.get(phase, 0)) for phase in PHASES[:2]]
        out.append((name, *both, f"{sum(phases.values()) / total:.1%}"))
    return out
