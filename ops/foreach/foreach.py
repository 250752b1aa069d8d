"""torch._foreach_*: a separate elementwise call for each element of the lists.

A call is linear in the same arguments as the function of one tensor. A number, a list of numbers or
a 0-d tensor in addition to the lists is shared by all elements. An in-place function writes every
tensor of its first list.

A fused function of an optimizer or a gradient scaler is such a call for each parameter, with its
gradient and state; its step is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.dims import SECOND
from ops.factors import Arg, Factors, pointwise_factors
from ops.pointwise.elementwise import LINEAR
from ops.registry import Function, rule

# How the call of one element is linear (see ``ops.pointwise.elementwise``); "none" by default
KINDS = {
    "neg": "first", "clone": "first", "zero": "first", "div": "quotient", "mul": "product",
    "add": "joint", "sub": "joint", "lerp": "interpolation", "addcmul": "product and sum",
}  # fmt: skip
NOT_POINTWISE = frozenset({"norm", "powsum", "max", "mm"})


def lists_of(args: Sequence[Any]) -> tuple[list[Sequence[Arg]], list[Arg]]:
    """Returns the lists of tensors among the arguments, and the tensors that are shared."""
    lists: list[Sequence[Arg]] = []
    shared: list[Arg] = []
    for a in args:
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], Arg):
            lists.append(a)
        elif isinstance(a, Arg):
            shared.append(a)
    if len({len(a) for a in lists}) > 1:
        raise RuntimeError(f"lists of tensors of different lengths: {[len(a) for a in lists]}")
    return lists, shared


def grouped(
    lists: Sequence[Sequence[Arg]],
    shared: Sequence[Arg],
    make: Callable[[Sequence[Arg]], Factors],
    written: Sequence[int] = (),
) -> Factors:
    """Returns the factors of a call on lists: its results are the results of the elements.

    ``make`` returns the Factors of one element's tensors (called once for equal shapes and dtypes).
    ``written`` are the numbers of the lists that are targets.
    """
    inputs: list[Any] = [()] * (sum(map(len, lists)) + len(shared))
    for arg in shared:
        inputs[arg.index] = (None,) * arg.ndim
    outputs: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    per_item: list[tuple[Factors, tuple[int, ...]]] = []
    seen: dict[Any, Factors] = {}
    for members in zip(*lists, strict=True):
        key = tuple([(arg.shape, arg.dtype) for arg in members])
        part = seen.get(key)
        if part is None:
            numbered = [Arg(arg.shape, None, arg.dtype, index=i) for i, arg in enumerate(members)]
            part = seen[key] = make(numbered).replace(targets=tuple(written))
        indices = tuple([arg.index for arg in members])
        for t, dims in zip(indices, part.inputs, strict=True):
            inputs[t] = dims
        outputs += part.outputs
        shapes += part.output_shapes()
        per_item.append((part, indices))
    targets = tuple([arg.index for n in written for arg in lists[n]])
    return Factors(
        tuple(inputs),
        tuple(outputs),
        shapes=tuple(shapes),
        per_item=tuple(per_item),
        targets=targets,
    )


def foreach(name: str, inplace: bool) -> Callable[..., Factors]:
    """Returns the rule of one pointwise function on lists."""
    terms_of = LINEAR[KINDS.get(name, "none")]
    copies = name in ("clone", "zero")

    def factors(*args: Any, **kwargs: Any) -> Factors:
        lists, shared = lists_of((*args, *kwargs.values()))

        def one(members: Sequence[Arg]) -> Factors:
            if name == "copy":
                return pointwise_factors(members, linear_terms=SECOND, metadata_only={0})
            terms = () if name == "div" and shared else terms_of(members, {})
            return pointwise_factors(members, linear_terms=terms, moves=copies)

        return grouped(lists, shared, one, (0,) if inplace else ())

    return factors


for _full in dir(torch):
    _name = _full.removeprefix("_foreach_").rstrip("_")
    if _full.startswith("_foreach_") and _name not in NOT_POINTWISE:
        _factors = foreach(_name, _full.endswith("_"))
        _enter = rule(
            getattr(torch, _full), exact=True, integers=_name == "pow", doc="each element pointwise"
        )
        _enter(_factors)


# Fused optimizers ---------------------------------------------------------------------------------


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
        used = [i for i, a in enumerate(args) if isinstance(a, (list, tuple)) and a]
        unscaled = kwargs.get("grad_scale") is not None
        lists, shared = lists_of((*args, *kwargs.values()))
        targets = [n for n, i in enumerate(used) if i in written or (i == 1 and unscaled)]
        return grouped(lists, shared, pointwise_factors, targets).replace(outputs=(), shapes=())

    return factors


for _func, _written in WRITTEN.items():
    rule(_func, exact=True, integers=False, doc="each parameter elementwise")(fused(_written))


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

    f = grouped([self], [found_inf, inv_scale], pointwise_factors, [0])
    return f.replace(outputs=(), shapes=(), targets=(*f.targets, found_inf.index), local=local)


@rule(torch._amp_update_scale_, integers=False)
def update_scale(
    input: Arg, growth_tracker: Arg, found_inf: Arg, growth: float, backoff: float, interval: int
) -> Factors:
    """numbers, the same on every rank"""
    return Factors(((), (), ()), ((),), targets=(input.index, growth_tracker.index))
