"""Records what a program computes, by hooks of PyTorch: the outputs of modules and their gradients,
losses, norms, the gradients of parameters at each optimizer step, and parameters after it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from disttensor.pytree import find_tensors, replace_tensors
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import current_backward, see_clipping
from disttensor.verification.records import write

# Parts of names that a wrapper adds, beside "module" at the root.
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


class StepsEnded(BaseException):
    """Ends a program after the steps that are compared."""


class TensorRecorder:
    """Records the program of this process from now on, in the file ``path``.

    ``steps``: of an optimizer; after them the program ends at its next forward or backward.
    ``nudge``: outputs of modules and gradients are changed by about one rounding.
    """

    def __init__(self, path: Path, steps: int, nudge: bool) -> None:
        self.file, self.steps, self.nudge = path.open("wb"), steps, nudge
        self.step, self.order = 0, 0
        self.lock = threading.Lock()  # of the file: hooks run on threads of autograd too
        self.calls: Counter[Any] = Counter()  # by step, phase and name
        self.stepped: Counter[Any] = Counter()  # steps, by optimizer
        self.roots: dict[nn.Module, str] = {}  # with the prefix of its names
        self.names: dict[nn.Module, str] = {}
        self.is_due = False  # parameters have changed since they were recorded
        self.thread = threading.local()  # stack: modules whose forward runs, with their order
        nn_module.register_module_forward_pre_hook(self._enter)
        nn_module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        register_optimizer_step_post_hook(self._after_step)
        see_clipping(self._clip)
        owners: tuple[Any, ...] = torch.autograd, DistTensor
        for owner in owners:
            owner.backward = self._seeing_losses(owner.backward)

    def close(self) -> None:
        self._record_parameters()
        self.file.close()

    # Modules --------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if current_backward() == -1:  # else it is computed again
            stack = self.thread.__dict__.setdefault("stack", [])
            if not stack:
                self._begin(module)
            self.order += 1
            stack.append((module, self.order))

    def _begin(self, root: nn.Module) -> None:
        self._record_parameters()
        if self.step >= self.steps:
            raise StepsEnded
        if root not in self.roots:
            is_model = next(root.parameters(), None) is not None
            same = sum(type(m) is type(root) for m in self.roots)
            first = is_model and "" not in self.roots.values()
            self.roots[root] = "" if first else f"{type(root).__name__}{same or ''}."
            for name, p in self._named(root).items():
                self._record("weights", name, p)

    def _leave(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        stack = self.thread.__dict__.get("stack", [])
        if current_backward() != -1 or not any(m is module for m, _ in stack):
            return None
        while stack[-1][0] is not module:
            stack.pop()
        _, order = stack.pop()
        if len(rest) == 1:  # an error ends the forward
            return None
        kwargs, output = rest
        name = self._name(module)
        for i, x in enumerate(() if stack else find_tensors((args, kwargs))):
            self._record("input", f"{name} input {i}", x, order=order)
        if self.nudge:
            output = replace_tensors(output, _nudged)
        for i, x in enumerate(find_tensors(output)):
            title = f"{name} output {i}" if i else name
            call = self.step, self._record("forward", title, x)
            if x.requires_grad and not x.is_leaf:
                x.register_hook(partial(self._see_gradient, title, call))
        return output if self.nudge else None

    def _see_gradient(self, name: str, call: tuple[int, int], gradient: Any) -> None:
        self._record("backward", name, gradient, call)

    def _name(self, module: nn.Module) -> str:
        """Returns the name of a module with its class."""
        if module not in self.names:
            for root, prefix in self.roots.items():
                for name, m in root.named_modules():
                    title = (prefix + _clean(name, root)).rstrip(".")
                    kind = type(m).__name__
                    self.names[m] = kind if title == kind else f"{title} ({kind})".lstrip()
        return self.names.setdefault(module, f"({type(module).__name__})")

    # Optimizers, losses and norms -----------------------------------------------------------------

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._record_gradients(p for group in optimizer.param_groups for p in group["params"])
        self.stepped[optimizer] += 1
        self.step, self.is_due = max(self.stepped.values()), True

    def _clip(self, parameters: Any, norm: Any) -> None:
        self._record_gradients(parameters)
        self._record("norm", "norm", norm)

    def _seeing_losses(self, original: Any) -> Any:
        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            is_inner = current_backward() != -1 or getattr(self.thread, "is_backward", False)
            if is_inner:
                return original(tensors, *args, **kwargs)
            if self.step >= self.steps:
                raise StepsEnded
            for x in find_tensors((tensors,)):
                if x.numel() == 1:
                    self._record("loss", "loss", x)
            self.thread.is_backward = True  # of a DistTensor, which calls that of its piece
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.thread.is_backward = False

        return backward

    def _record_gradients(self, parameters: Iterable[Any]) -> None:
        names = {id(p): name for name, p in self._parameters().items()}
        for i, p in enumerate(parameters):
            if self.nudge and p.grad is not None:
                p.grad.copy_(_nudged(p.grad))
            self._record("gradient", names.get(id(p), f"parameter {i}"), p.grad)

    def _record_parameters(self) -> None:
        """Records what the last step has left, also by code after it that sends parameters."""
        if self.is_due:
            self.is_due = False
            for name, p in self._parameters().items():
                call = self.step - 1, self.calls[self.step - 1, "update", name]
                self._record("update", name, p, call)

    def _parameters(self) -> dict[str, Any]:
        """Returns the parameters and buffers of all modules, and others of optimizers, by name."""
        found = {name: p for root in self.roots for name, p in self._named(root).items()}
        known = {id(p) for p in found.values()}
        for optimizer in self.stepped:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            found |= {f"parameter {i}": p for i, p in enumerate(params) if id(p) not in known}
        return found

    def _named(self, root: nn.Module) -> dict[str, Any]:
        named = [*root.named_parameters(), *root.named_buffers()]
        return {self.roots[root] + _clean(name, root): p for name, p in named}

    def _record(
        self, phase: str, name: str, x: Any, call: tuple[int, int] | None = None, order: int = 0
    ) -> int:
        """Writes a tensor. Returns the number of this call in the step."""
        with self.lock, torch.no_grad():
            self.order += 1
            step, number = call or (self.step, self.calls[self.step, phase, name])
            self.calls[step, phase, name] += 1
            write(self.file, (step, phase, name, number), order or self.order, x)
        return number


def _nudged(x: Any) -> Any:
    """Returns ``x`` with other roundings: each element changes by at most one unit of the last
    place, by a number that looks random and is the same in each run."""
    if not x.is_floating_point() or x.is_meta:
        return x
    still = x.detach()
    noise = still * torch.sin(still * 12345.678) * torch.finfo(x.dtype).eps
    return x + noise.nan_to_num(0.0, 0.0, 0.0)


def _clean(name: str, root: nn.Module) -> str:
    """Returns a name as the module has it without wrappers."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    is_wrapper = [child for child, _ in root.named_children()] == ["module"]
    return ".".join(parts[is_wrapper and parts[0] == "module" :])
