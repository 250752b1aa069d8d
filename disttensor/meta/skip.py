"""Skips whole modules whose parameters are on other ranks: their results follow from the metadata
of their inputs.

On a rank off the mesh of its parameters a module gets a Skip as its ``forward``. The first call of
a kind runs the real forward on tokens (``disttensor.meta.trace``) and records its results; later
calls are one look-up. A forward with effects that a skipped call would miss runs call by call.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from torch import nn

from disttensor.cache import Cache
from disttensor.checks import check_type
from disttensor.meta.guards import Subtree
from disttensor.meta.instance_forward import InstanceForward
from disttensor.meta.trace import ASSIGNS, Case, trace
from disttensor.pytree import Uncacheable, key_of_contents
from disttensor.settings import snapshot
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import count_function_modes, current_backward

_Module = TypeVar("_Module", bound=nn.Module)
_MOST = 64  # most kinds of calls that are kept of a module
_TRIALS = 16  # traces allowed in addition to one for each skipped call


class _Tracing(threading.local):
    now = False


_tracing = _Tracing()


def never_skip(module: _Module) -> _Module:
    """Makes the forward of ``module``, and of modules around it, run on every rank, on whatever
    mesh its parameters are. Returns the module.

    Needed for a forward with effects that are not visible from outside: it prints, counts in a
    global, or depends on values that change without an assignment to the module. All ranks must
    call this alike.

    >>> model = torch.nn.Sequential(dt.never_skip(torch.nn.Linear(4, 4)), torch.nn.ReLU())
    >>> model = dt.shard_module(model, mesh)
    """
    check_type("never_skip: module", module, nn.Module, "a module")
    module._never_skip = True  # type: ignore[assignment]
    return module


def attach(module: nn.Module) -> None:
    """Makes ``module``, or the modules in it that are worth it, skip their forward. Modules with a
    parameter on this rank are left alone."""
    for m in module.modules():
        worth = bool(m._modules) or not type(m).__module__.startswith("torch.nn")
        callable_ = type(m).forward is not nn.Module.forward and "forward" not in m.__dict__
        if worth and callable_ and _lies_elsewhere(m):
            Skip(m).put()


def _lies_elsewhere(m: nn.Module) -> bool:
    tensors = [*m.parameters(), *m.buffers()]
    return bool(tensors) and all(
        isinstance(p, DistTensor) and not p.is_initialized for p in tensors
    )


class Skip(InstanceForward):
    """The ``forward`` of one module on a rank off the mesh. Copied and pickled with the module,
    without its records."""

    def __init__(self, module: nn.Module) -> None:
        self.__setstate__({"module": module})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module: nn.Module = state["module"]
        self._cases: Cache[Any, Case | str] = Cache(_MOST)
        self._subtree: Subtree | None = None
        self._trials = self._hits = 0
        self._why = ""  # the reason why this module is never skipped

    def why(self) -> list[str]:
        """Returns the reasons why calls were not skipped, as text."""
        reasons = [self._why, *(c for c in self._cases.values() if isinstance(c, str))]
        return sorted({reason for reason in reasons if reason})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._why or _tracing.now or count_function_modes():
            return self.class_forward(*args, **kwargs)
        subtree = self._subtree
        if subtree is None or not subtree.unchanged():
            subtree = self._look()
            if subtree is None:
                return self.class_forward(*args, **kwargs)
        if not subtree.elsewhere:
            return self.class_forward(*args, **kwargs)
        try:
            key, inputs = self._key(args, kwargs)
        except Uncacheable:
            return self.class_forward(*args, **kwargs)
        case = self._cases.get(key)
        if case is None:
            return self._trace(subtree, key, inputs, args, kwargs)
        if type(case) is str:
            return self.class_forward(*args, **kwargs)
        self._hits += 1
        return case.give(inputs)  # type: ignore[union-attr]

    def _look(self) -> Subtree | None:
        """Guards the module again. Returns None if it is not to be skipped."""
        if not self._may_try():
            return None
        self._cases.clear()
        self._subtree = subtree = Subtree(self.module)
        if any(
            getattr(type(m), "_never_skip", False) or "_never_skip" in m.__dict__
            for m in subtree.modules
        ):
            self._why = "never_skip"
        elif any(
            m.__dict__.get("forward") is not None and type(m.__dict__["forward"]) is not Skip
            for m in subtree.modules
        ):
            self._why = "a forward that was put on an instance"
        return None if self._why else subtree

    def _may_try(self) -> bool:
        self._trials += 1
        if self._trials > _TRIALS + self._hits:
            self._why = "it changes too often"
        return not self._why

    def _trace(
        self, subtree: Subtree, key: Any, inputs: list[DistTensor], args: Any, kwargs: Any
    ) -> Any:
        # a recomputation in a backward does not show random calls
        if current_backward() != -1 or not inputs:
            return self.class_forward(*args, **kwargs)
        if subtree.hooked or any(x.is_initialized for x in inputs):
            self._cases[key] = "hooks in it, or inputs on this rank"
            return self.class_forward(*args, **kwargs)
        if not self._may_try():
            return self.class_forward(*args, **kwargs)
        _tracing.now = True
        try:
            result, case = trace(lambda: self.class_forward(*args, **kwargs), inputs, subtree)
        finally:
            _tracing.now = False
        if case == ASSIGNS:
            self._why = ASSIGNS
        if not isinstance(case, str) and not self._same_key(key, args, kwargs):
            case = "it changes its arguments"
        self._cases[key] = case
        return result

    def _same_key(self, key: Any, args: Any, kwargs: Any) -> bool:
        try:
            return bool(self._key(args, kwargs)[0] == key)
        except Uncacheable:
            return False

    def _key(self, args: Any, kwargs: Any) -> tuple[Any, list[DistTensor]]:
        """Returns the key, on which metadata of results depends, and the tensor arguments."""
        subtree: Any = self._subtree
        if len(args) == 1 and not kwargs and not subtree.attached:
            x = args[0]
            if type(x) is DistTensor:  # mostly: the same as below
                now = snapshot(x.device.type)
                return (1, x.spec, x.local.requires_grad, subtree.flags(), now), [x]
        inputs: list[DistTensor] = []
        parts: list[Any] = [len(args)]
        for x in args:
            if type(x) is DistTensor:  # mostly
                inputs.append(x)
                parts += (x.spec, x.local.requires_grad)
            else:
                parts.append(_part(x, inputs))
        if kwargs:
            parts.append(_part(kwargs, inputs))
        for attributes, name in subtree.attached:
            parts.append(_part(attributes.get(name), inputs))
        if len(inputs) > 1:  # a result depends on two tensors, or twice on one
            ids = [id(x) for x in inputs]
            parts.append(tuple(map(ids.index, ids)))
        parts += (subtree.flags(), snapshot(inputs[0].device.type if inputs else "cpu"))
        return tuple(parts), inputs


def _part(value: Any, inputs: list[DistTensor]) -> Any:
    def key(x: Any) -> Any:
        if not isinstance(x, DistTensor):
            raise Uncacheable("an argument is a torch.Tensor")
        inputs.append(x)
        return x.spec, x.local.requires_grad

    return key_of_contents(value, key)
