"""Full backward hooks of modules: arguments and results pass a node of torch, whose hooks get their
gradients. The node is put on the locals, and the user's hooks get DistTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.core.spec import DistSpec
from disttensor.pytree import rebuild
from disttensor.tensor.dist_tensor import DistTensor, wait_for, wrap
from disttensor.tensor.hooks import on_local, to_local

_MESHES = "disttensor_meshes"  # attribute of a BackwardHook: the meshes of the module's tensors


class _Node:
    """The node of the locals, for a hook that is to get DistTensors."""

    def __init__(self, node: Any, specs: Sequence[DistSpec | None]) -> None:
        self.node, self.specs = node, specs

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        def local_hook(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
            out = hook(self._convert(_shown, inputs), self._convert(_shown, outputs))
            return None if out is None else self._convert(to_local, out)

        return self.node.register_hook(local_hook)

    def _convert(self, convert: Callable[..., Any], grads: Sequence[Any]) -> tuple[Any, ...]:
        """Converts the gradients of DistTensors, which have a spec. No DistTensor is kept: the node
        would keep the arguments of the module alive."""
        return tuple(
            g if spec is None or g is None else convert(spec, g)
            for spec, g in zip(self.specs, grads, strict=True)
        )


def _shown(spec: DistSpec, g: Any) -> Any:
    return on_local(DistTensor, spec, g)


def wrap_apply_on_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``BackwardHook._apply_on_tensors``; ranks without the gradients call no hook."""

    def apply(self: Any, fn: Callable[[Any], Any], args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        specs = [a.spec if isinstance(a, DistTensor) else None for a in tensors]
        dist = [wait_for(a) for a in tensors if isinstance(a, DistTensor)]
        if not dist:
            return original(self, fn, args)
        meshes = {x.spec.mesh.root for x in dist} | self.__dict__.setdefault(_MESHES, set())
        self.__dict__[_MESHES] = meshes
        if len(meshes) > 1 and self.user_hooks:
            raise RuntimeError(
                "register_full_backward_hook: the arguments and results of the module are on "
                f"several meshes, {', '.join(map(repr, meshes))}, and no rank has the gradients of "
                "both. Register the hook on a module within one stage"
            )
        if not all(x.is_initialized for x in dist):
            return args, None
        locals_ = rebuild(args, [a.local if type(a) is DistTensor else a for a in args])
        out, places = original(self, lambda node: fn(_Node(node, specs)), locals_)
        if places is None:
            return args, None
        return rebuild(args, [
            wrap(new, old.spec) if type(old) is DistTensor else new
            for old, new in zip(args, out, strict=True)
        ]), places  # fmt: skip

    return apply
