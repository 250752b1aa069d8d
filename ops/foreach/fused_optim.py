"""Fused functions that optimizers and gradient scalers call for all parameters at once.

Parameter, gradient and state of each parameter form a separate elementwise call; its step is a
number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.factors import Arg, Factors, pointwise_factors
from ops.foreach.foreach import grouped, lists_of
from ops.infer import NoRule
from ops.registry import Function, rule

# the lists that each function writes, by position; the gradients (1) too where they are unscaled
WRITTEN: dict[Function, tuple[int, ...]] = {
    torch._fused_adamw_: (0, 2, 3, 4, 5),
    torch._fused_adam_: (0, 2, 3, 4, 5),
    torch._fused_sgd_: (0, 2),
    torch._fused_adagrad_: (0, 2, 3),
}


def fused(written: tuple[int, ...]) -> Callable[..., Factors]:
    """Returns the rule of a fused optimizer function: parameter, state and, read only, the
    gradient."""

    def factors(*args: Any, **kwargs: Any) -> Factors:
        if any(isinstance(a, (list, tuple)) for a in kwargs.values()):
            raise NoRule("lists given by name")
        used = [i for i, a in enumerate(args) if isinstance(a, (list, tuple)) and a]
        unscaled = kwargs.get("grad_scale") is not None
        lists, shared = lists_of((*args, *kwargs.values()))
        targets = [n for n, i in enumerate(used) if i in written or (i == 1 and unscaled)]

        def one(members: Sequence[Arg]) -> Factors:
            return pointwise_factors(members)

        return grouped(lists, shared, one, targets).replace(outputs=(), shapes=())

    return factors


for _func, _written in WRITTEN.items():
    rule(_func, exact=True, numbers="type", doc="each parameter elementwise")(fused(_written))


@rule(torch._amp_foreach_non_finite_check_and_unscale_)
def unscale(self: Sequence[Arg], found_inf: Arg, inv_scale: Arg) -> Factors:
    """each gradient elementwise; what is found in one piece, all ranks know"""

    def local(call: Any) -> Callable[..., None]:
        axes: set[int] = set()
        for piece in call.inputs:
            axes |= piece.layout.sharded

        def run(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
            if axes:
                found_inf.copy_(call.collectives.all_reduce(found_inf, "max", tuple(sorted(axes))))

        return run

    f = grouped([self], [found_inf, inv_scale], lambda members: pointwise_factors(members), [0])
    return f.replace(outputs=(), shapes=(), targets=(*f.targets, found_inf.index), local=local)


@rule(torch._amp_update_scale_, numbers="type")
def update_scale(
    input: Arg, growth_tracker: Arg, found_inf: Arg, growth: float, backoff: float, interval: int
) -> Factors:
    """numbers, the same on every rank"""
    return Factors(((), (), ()), ((),), targets=(input.index, growth_tracker.index))
