"""infer: returns the placements of the results of a call, given its layouts, without a mesh or a
process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disttensor.core.layout import Axes, replicated
from disttensor.core.placement import Placement
from disttensor.pytree import substitute
from ops.check_call import check_call
from ops.factors import Arg, Factors, NoRule
from ops.promotion import fit_dtypes
from ops.propagation import Decision, assign
from ops.registry import RULES
from ops.signatures import form_of


@dataclass(frozen=True, slots=True)
class Inferred:
    """``inputs[i]``: the required placements of tensor argument i; ``outputs[j]``: the placements
    of result j."""

    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]
    shapes: tuple[tuple[int, ...], ...]


def decide(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[Arg],
    mesh_shape: Axes,
    device: str = "cpu",
) -> tuple[Factors, Decision | None]:
    """Returns the factors of a call in its one form, and the decision (None: not in place as
    asked). ``tensors`` are the Args of the call in order. Raises NoRule."""
    rule = RULES.get(func)
    if rule is None:
        raise NoRule(f"{getattr(func, '__name__', func)} has no rule")
    try:
        factors = rule.factors(*args, **kwargs)
        if len(factors.inputs) != len(tensors):
            raise NoRule(
                f"the rule {rule.name} speaks of {len(factors.inputs)} tensors, the call has "
                f"{len(tensors)}"
            )
        for item, members in factors.per_item:
            item.with_sizes([tensors[t].shape for t in members])
        if not factors.per_item:
            factors = factors.with_sizes([t.shape for t in tensors])
    except Exception:
        check_call(func, args, kwargs, device=device)  # torch's error instead, if it has one
        raise
    if not factors.per_item:
        found = check_call(func, args, kwargs, factors, device)
        if found and not rule.inplace and len(found.views) == len(factors.outputs):
            factors = factors.replace(views=found.views)
    factors = fit_dtypes(func, args, kwargs, tensors, factors)
    return factors, assign(factors, tensors, mesh_shape, fixed=rule.inplace)


def infer(
    func: Callable[..., Any], *args: Any, mesh_shape: Axes = (2, 3), **kwargs: Any
) -> Inferred:
    """Returns the placements that the rule of ``func`` infers for a call: ``infer(torch.matmul,
    Arg((4, 6), [Shard(0), Replicate()]), ...)``.

    Tensor arguments are ``Arg(shape, placements, dtype)``, also inside lists. For a function
    without a rule, all inputs and results are Replicate. Raises the error of the rule for shapes
    that do not fit, ValueError for wrong placements.
    """
    tensors: list[Arg] = []

    def place(value: Arg) -> Arg:
        tensors.append(value.placed(len(mesh_shape), len(tensors)))
        return tensors[-1]

    form = form_of(func, args, kwargs)
    args, kwargs = substitute((tuple(form.args), form.kwargs), place, Arg)
    n = len(mesh_shape)
    try:
        factors, decision = decide(func, args, kwargs, tensors, mesh_shape)
    except NoRule:
        whole = tuple(replicated(t.ndim).placements(n) for t in tensors)
        return Inferred(whole, whole[:1], ())
    if decision is None:  # in place, through a copy: the target keeps its layout
        given = tuple(t.layout.placements(n) for t in tensors)
        return Inferred(given, given[:1], factors.output_shapes())
    return Inferred(
        tuple(w.placements(n) for w in decision.input_layouts),
        tuple(g.placements(n) for g in decision.output_layouts),
        factors.output_shapes(),
    )
