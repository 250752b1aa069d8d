"""Of which layer an operator is: of the module whose forward calls it, and in a backward of the one
whose forward made the node of autograd that runs.

Nodes are found from tensors. When a module that has computed something calls another, or ends, what
lies behind the arguments, or the result, and is no other's yet, is its own. What a checkpointed
region computes again is of the modules that run again, or of the one that the region is in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from disttensor import callbacks
from disttensor.pipeline.unsplit import MODELS
from disttensor.pytree import find_tensors
from disttensor.replay.replay import Replay
from disttensor.tensor.base import MeshTensor
from disttensor.torch_private import current_backward, current_node

OUTSIDE = "(outside modules)"
_LAYER = "disttensor.layer"

LayersOfMeshes = dict[tuple[int, ...], list[str]]


class _Call:
    """A forward that runs, in the backward of this number (-1: in none)."""

    __slots__ = ("backward", "computes", "layer")

    def __init__(self, layer: str, backward: int) -> None:
        self.layer, self.backward = layer, backward
        self.computes = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, a region that is in this forward is computed again."""
        token = callbacks.recompute_context.set(_Call(self.layer, current_backward()))
        try:
            yield
        finally:
            callbacks.recompute_context.reset(token)


class Layers:
    """``with layers.following():`` it knows which module runs. A layer's name is its path in the
    outermost module that is called, or in the model that was split; where there are several of
    those, after its class."""

    def __init__(self) -> None:
        self._roots: list[nn.Module] = []
        self._names: dict[nn.Module, str] = {}
        self._outside = _Call(OUTSIDE, -1)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Modules tell of their calls; what was recorded by ``dt.replay`` runs call by call."""
        call = nn.Module.__call__

        def following(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._called(call, module, args, kwargs)

        def eager(replay: Replay, *args: Any, **kwargs: Any) -> Any:
            return replay.eager(*args, **kwargs)

        with ExitStack() as stack:
            for owner, instead in ((nn.Module, following), (Replay, eager)):
                stack.callback(setattr, owner, "__call__", owner.__call__)
                owner.__call__ = instead  # type: ignore[method-assign]
            yield

    def _called(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        outer, backward = callbacks.recompute_context.get() or self._outside, current_backward()
        if outer.computes:
            _own(find_tensors([args, kwargs]), outer.layer)
        inner = _Call(self._name(module, outer), backward)
        token = callbacks.recompute_context.set(inner)
        try:
            out = call(module, *args, **kwargs)
        finally:
            callbacks.recompute_context.reset(token)
        if inner.computes:
            _own(find_tensors(out, attributes=True), inner.layer)
        return out

    def now(self) -> str:
        """The layer of what is computed now."""
        call, backward = callbacks.recompute_context.get() or self._outside, current_backward()
        if call.backward == backward:
            call.computes = True
            return call.layer
        node = current_node()
        return OUTSIDE if node is None else node.metadata.get(_LAYER, OUTSIDE)

    # Names ----------------------------------------------------------------------------------------

    def _name(self, module: nn.Module, outer: _Call) -> str:
        name = self._names.get(module)
        if name is not None:
            return name
        if outer is not self._outside:
            return outer.layer  # it is in no table of the one that calls it
        if next(module.parameters(), None) is None:  # a loss
            return type(module).__name__
        split = (model for model in MODELS if any(m is module for m in model.modules()))
        self._adopt(next(split, module))
        return self._names[module]

    def _adopt(self, root: nn.Module) -> None:
        """A model is found."""
        self._roots = [r for r in self._roots if all(m is not r for m in root.modules())]
        self._roots.append(root)
        seen: Counter[str] = Counter()
        for one in self._roots:
            kind = type(one).__name__
            seen[kind] += 1
            name = kind if seen[kind] == 1 else f"{kind}#{seen[kind]}"
            for path, module in one.named_modules(prefix=name if len(self._roots) > 1 else ""):
                self._names[module] = path or kind

    def of_meshes(self) -> LayersOfMeshes:
        """Of each mesh, by its ranks, the modules that have parameters on it, in order."""
        out: LayersOfMeshes = {}
        for module in (m for root in self._roots for m in root.modules()):
            own = next(module.parameters(recurse=False), None)
            if isinstance(own, MeshTensor):
                out.setdefault(own.spec.mesh.ranks, []).append(self._names[module])
        return out


def _own(tensors: Sequence[Any], layer: str) -> None:
    """The nodes behind these tensors are those of ``layer``, up to nodes that are somebody's."""
    nodes = [t.local.grad_fn if isinstance(t, MeshTensor) else t.grad_fn for t in tensors]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and _LAYER not in node.metadata:
            node.metadata[_LAYER] = layer
            nodes += [below for below, _ in node.next_functions]


def counterparts(mine: Sequence[str], its: Sequence[str]) -> dict[str, str]:
    """Layer by layer the names on another stage, and those of the modules that they are in. Raises
    ValueError where one has more layers."""
    out: dict[str, str] = {}
    for a, b in zip(mine, its, strict=True):
        same = True
        while a and same:
            out[a] = b
            (a, _, x), (b, _, y) = a.rpartition("."), b.rpartition(".")
            same = x == y
    return out


def renamed(layer: str, names: Mapping[str, str]) -> str:
    """The layer where what is called as in ``names`` has other names."""
    head, rest = layer, ""
    while head not in names:
        head, dot, last = head.rpartition(".")
        if not dot:
            return layer
        rest = f".{last}{rest}"
    return names[head] + rest
