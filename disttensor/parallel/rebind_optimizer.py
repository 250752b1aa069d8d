"""Replaces the parameters of an optimizer that was built before they were placed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from disttensor.nn.parameters import Slot, slots

Optimizer = torch.optim.Optimizer
Maker = Callable[[Iterable[torch.Tensor]], Optimizer]


def _has_stepped(state: Any) -> bool:
    """Returns True if this is the state of a parameter after a step, not the state that the
    constructor of the optimizer made."""
    return bool(state) and not (isinstance(state, dict) and state.get("step", 1) == 0)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raises an error for an optimizer that ``rebind`` cannot handle, before any change."""
    if not isinstance(optimizer, Optimizer):
        if optimizer is not None and not callable(optimizer):
            raise TypeError(
                f"Strategy.apply: the optimizer is {optimizer!r}; give an optimizer of the model's "
                "parameters, or a function that makes one: lambda params: "
                "torch.optim.AdamW(params, lr=1e-3)"
            )
        return
    name = type(optimizer).__name__
    check_no_steps("Strategy.apply", optimizer)
    here = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in here:
                raise ValueError(
                    f"Strategy.apply: parameter {i} of group {g} of this {name}, {tuple(p.shape)}, "
                    "is no parameter of the model: it would never get a gradient. Build the "
                    "optimizer from model.parameters() as they are now, or give a function: "
                    "lambda params: torch.optim.AdamW(params, lr=1e-3)"
                )


def check_no_steps(who: str, optimizer: Optimizer) -> None:
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ValueError(
            f"{who}: this {type(optimizer).__name__} has state already, for parameters as they "
            "were before they were placed. Apply the strategy before the first step, and load a "
            "state_dict after it"
        )


def rebind(
    optimizer: Optimizer | Maker | None, model: nn.Module, before: list[Slot]
) -> Optimizer | None:
    """Returns the optimizer with the parameters ``before`` replaced by those in ``model``, or a new
    optimizer. Its groups keep their options and their order."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        return optimizer(list(model.parameters()))
    now = {slot.name: slot.value for slot in slots(model)}
    replacements = {id(slot.value): now[slot.name] for slot in before}
    replace_parameters(optimizer, lambda p: replacements[id(p)])
    return optimizer


def replace_parameters(
    optimizer: Optimizer, become: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replaces the parameters of an optimizer, which has not stepped, by ``become`` of each."""
    for group in optimizer.param_groups:
        group["params"][:] = map(become, group["params"])
    optimizer.state.clear()
    if isinstance(optimizer, torch.optim.Adagrad):  # its constructor makes the state
        groups = [dict(group) for group in optimizer.param_groups]
        optimizer.state.update(torch.optim.Adagrad(groups, **optimizer.defaults).state)
