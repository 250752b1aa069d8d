"""Reduces gradients before an optimizer reads them.

``disttensor.patches`` registers these functions as hooks of torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from disttensor.comm import compare_programs
from disttensor.gradients.sync import sync_gradients
from disttensor.optim.owners import owners_of
from disttensor.tensor.dist_tensor import DistTensor


def check_fresh(params: Iterable[Any], who: str) -> None:
    """Raises RuntimeError if a module has replaced some of ``params`` by other tensors.

    Code that replaces a parameter of a module describes the replacement in its attribute
    ``_replaced`` (``disttensor.tensor.user_facts.carry_over``).
    """
    marks = [getattr(p, "_replaced", None) for p in params]  # torch.compile traces this
    stale = [what for what in marks if what]
    if stale:
        raise RuntimeError(
            f"{who}: {len(stale)} of its parameters are no longer those of the model, so it would "
            f"change tensors that nothing uses: {stale[0]} after the parameters were taken. Build "
            "the optimizer after sharding the model (and take model.parameters() again), or let "
            "strategy.apply(model, optimizer) do both"
        )


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Runs before every optimizer step. If the step has a closure, gradients are reduced after each
    call of it too. Gradients of parameters with an owner are reduced in the step, on the owner."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    name = type(optimizer).__name__
    check_fresh(params, name)
    if DistTensor in map(type, params):
        compare_programs.at_step(f"{name}.step")
    if owned := owners_of(optimizer):
        params = [p for p in params if id(p) not in owned]
    sync_gradients(params)

    def then_sync(closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            sync_gradients(params)
            return loss

        return run

    if len(args) > 1 and callable(args[1]):
        return (args[0], then_sync(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": then_sync(kwargs["closure"])}
    return None
