"""Finds the layer of an operator: the module whose forward calls it, or in a backward the module
whose forward made the autograd node that runs.

Nodes are found from tensors. When a module that has computed something calls another, or ends, the
nodes behind the arguments or the result that have no layer yet belong to that module. Operators of
a recomputed region belong to the modules that run again, or to the module around the region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

from disttensor import callbacks
from disttensor.pipeline.unsplit import MODELS
from disttensor.pytree import find_tensors
from disttensor.tensor.base import MeshTensor
from disttensor.torch_private import current_backward, current_node

OUTSIDE = "(outside modules)"
_LAYER = "disttensor.layer"

LayersOfMeshes = dict[tuple[int, ...], list[str]]  # by the ranks of a mesh


class ModuleCall(NamedTuple):
    """A recorded forward of a watched module. ``start``, ``end``: positions in the step; ``shape``,
    ``nbytes``: the global shape and the local bytes of its first argument on a mesh."""

    module: nn.Module
    start: int
    end: int
    shape: tuple[int, ...]
    nbytes: int


class _Call:
    """A forward that runs, in the backward of this number (-1: in none)."""

    __slots__ = ("backward", "computes", "layer")

    def __init__(self, layer: str, backward: int) -> None:
        self.layer, self.backward = layer, backward
        self.computes = False

    def __call__(self) -> AbstractContextManager[None]:
        """Surrounds the recomputation of a region of this forward."""
        again = _Call(self.layer, current_backward())
        return callbacks.set_during(callbacks.recompute_context, again)


class Layers:
    """Follows the calls of modules inside ``with layers.following():``.

    The name of a layer is its path in the outermost module that is called, or in the model that was
    split. If there are several of these, the name begins with the class of the model.

    Args:
        now: returns the current position in the step, None while nothing is recorded.
    """

    def __init__(self, now: Callable[[], int | None]) -> None:
        self.now = now
        self.calls: list[ModuleCall] = []
        self._watched: set[nn.Module] = set()
        self._roots: list[nn.Module] = []
        self._names: dict[nn.Module, str] = {}
        self._outside = _Call(OUTSIDE, -1)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Adds the recorded forwards of these modules to ``calls``."""
        self._watched.update(modules)

    def following(self) -> AbstractContextManager[Any]:
        """Patches the calls of modules: torch's global hooks do not get keyword arguments."""
        call = nn.Module.__call__

        def following(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._called(call, module, args, kwargs)

        return mock.patch.object(nn.Module, "__call__", following)

    def _called(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        outer, backward = callbacks.recompute_context.get() or self._outside, current_backward()
        if outer.computes:
            _own(find_tensors([args, kwargs]), outer.layer)
        inner = _Call(self._name(module, outer), backward)
        start = self.now() if module in self._watched else None
        size = _size(find_tensors([args, kwargs])) if start is not None else ((), 0)
        with callbacks.set_during(callbacks.recompute_context, inner):
            out = call(module, *args, **kwargs)
        if start is not None:
            self.calls.append(ModuleCall(module, start, self.now() or start, *size))
        if inner.computes:
            _own(find_tensors(out, attributes=True), inner.layer)
        return out

    def layer_now(self) -> tuple[str, bool]:
        """Returns the layer of the operator that runs, and whether it is recomputed."""
        call, backward = callbacks.recompute_context.get() or self._outside, current_backward()
        if call.backward == backward:
            call.computes = True
            return call.layer, backward != -1
        node = current_node()
        return OUTSIDE if node is None else node.metadata.get(_LAYER, OUTSIDE), False

    # Names ----------------------------------------------------------------------------------------

    def _name(self, module: nn.Module, outer: _Call) -> str:
        name = self._names.get(module)
        if name is not None:
            return name
        if outer is not self._outside:
            return outer.layer  # it is in no table of the module that calls it
        if next(module.parameters(), None) is None:  # a loss
            return type(module).__name__
        split = (model for model in MODELS if any(m is module for m in model.modules()))
        self._add_root(next(split, module))
        return self._names[module]

    def _add_root(self, root: nn.Module) -> None:
        """Adds a model, and names the modules of all models."""
        self._roots = [r for r in self._roots if all(m is not r for m in root.modules())]
        self._roots.append(root)
        seen: Counter[str] = Counter()
        for one in self._roots:
            kind = type(one).__name__
            seen[kind] += 1
            name = kind if seen[kind] == 1 else f"{kind}#{seen[kind]}"
            for path, module in one.named_modules(prefix=name if len(self._roots) > 1 else ""):
                self._names[module] = path or kind

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of all models."""
        for root in self._roots:
            yield from root.parameters()

    def of_meshes(self) -> LayersOfMeshes:
        """Returns the modules that have parameters on each mesh, in order."""
        out: LayersOfMeshes = {}
        for module in (m for root in self._roots for m in root.modules()):
            own = next(module.parameters(recurse=False), None)
            if isinstance(own, MeshTensor):
                out.setdefault(own.spec.mesh.ranks, []).append(self._names[module])
        return out


def _size(tensors: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Returns the global shape and the local bytes of the first tensor on a mesh."""
    on_mesh = (t for t in tensors if isinstance(t, MeshTensor))
    return next(((tuple(t.shape), t.local.nbytes) for t in on_mesh), ((), 0))


def _own(tensors: Sequence[Any], layer: str) -> None:
    """Sets the layer of the nodes behind these tensors, up to nodes that have one."""
    nodes = [t.local.grad_fn if isinstance(t, MeshTensor) else t.grad_fn for t in tensors]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and _LAYER not in node.metadata:
            node.metadata[_LAYER] = layer
            nodes += [below for below, _ in node.next_functions]


def counterparts(mine: Sequence[str], its: Sequence[str]) -> dict[str, str]:
    """Maps layers to the layers of another stage, and the modules around them. Raises ValueError if
    the numbers of layers differ."""
    out: dict[str, str] = {}
    for a, b in zip(mine, its, strict=True):
        same = True
        while a and same:
            out[a] = b
            (a, _, x), (b, _, y) = a.rpartition("."), b.rpartition(".")
            same = x == y
    return out


def renamed(layer: str, names: Mapping[str, str]) -> str:
    """Returns the layer with the longest prefix in ``names`` replaced."""
    head, rest = layer, ""
    while head not in names:
        head, dot, last = head.rpartition(".")
        if not dot:
            return layer
        rest = f".{last}{rest}"
    return names[head] + rest
