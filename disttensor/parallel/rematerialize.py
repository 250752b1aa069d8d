"""Activation recomputation: modules chosen by name keep no activations, and run their forward again
in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from disttensor.experts.expert_modules import ExpertsForward
from disttensor.nn.names import find_modules, has_forward
from disttensor.trace.instance_forward import InstanceForward
from disttensor.trace.skip import Skip


class Recomputed(InstanceForward):
    """Runs the forward of a module under torch.utils.checkpoint; for experts, the forward that
    replaces the forward of their class."""

    wraps = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        own = module.__dict__.get("forward")
        self.inner = own if isinstance(own, ExpertsForward) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.inner or self.class_forward
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def modules_to_recompute(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Returns the modules that match ``names`` (or globs); for a ModuleList, its elements. Raises
    ValueError for a name without a match, and for modules that cannot be wrapped."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for pattern in names:
        hits = find_modules(model, pattern, "Strategy: recompute=")
        found.update({id(module): (name, module) for name, module in hits})
    for name, module in found.values():
        if not has_forward(module):
            why = "no forward"
        elif not isinstance(module.__dict__.get("forward"), (Skip, ExpertsForward, type(None))):
            why = "a forward of its own already"
        else:
            continue
        raise ValueError(
            f"Strategy: recompute={name!r}: this {type(module).__name__} has {why}, so there is "
            "nothing that could be wrapped; name the modules in it that are called"
        )
    return [module for _, module in found.values()]


def recompute(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Wraps the forwards of ``modules``, except modules that are skipped on this rank."""
    elsewhere = {
        id(child)
        for module in model.modules()
        if isinstance(module.__dict__.get("forward"), Skip)
        for child in module.modules()
    }
    for module in modules:
        if id(module) not in elsewhere:
            Recomputed(module).put()
