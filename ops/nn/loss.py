"""Elementwise losses: every dim may be split; "sum" and "mean" give a pending sum.

"mean" divides each rank's sum by the *global* count. So the pending sum is the mean, and its
gradient is right, however uneven the pieces are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import tensors_in
from ops.dtypes import HALVES
from ops.empty_pieces import grown
from ops.factors import Arg, Factors, Letter, NoRule, pointwise_factors
from ops.registry import Function, rule

Tensor = torch.Tensor


def losses(*funcs: Function, doc: str) -> Callable[..., Any]:
    """Registers a rule of these functions of Python. The rule and its local function receive all
    arguments by name."""

    def decorate(make: Callable[..., Factors]) -> Callable[..., Factors]:
        for func in funcs:
            names = [*signature(func).parameters]
            factors: Any = partial(_factors, make, names)
            factors.__module__ = make.__module__
            rule(func, exact=True, doc=doc)(factors)
        return make

    return decorate


def _factors(make: Callable[..., Factors], names: list[str], *args: Any, **words: Any) -> Factors:
    f = _by_name(make, names, *args, **words)
    local: Any = f.local
    if local is not None:
        f.local = lambda call: partial(_by_name, local(call), names)
    return f


def _by_name(run: Callable[..., Any], names: list[str], *args: Any, **words: Any) -> Any:
    return run(**dict(zip(names, args, strict=False)), **words)


def requested_reduction(words: dict[str, Any]) -> str:
    """Returns the requested reduction. Torch handles the deprecated arguments."""
    if words.get("size_average") is not None or words.get("reduce") is not None:
        raise NoRule("size_average and reduce are deprecated: use reduction=")
    reduction = words.get("reduction", "mean")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction: use none, mean or sum")
    return str(reduction)


def total(losses: Tensor, divisor: Any = 1) -> Tensor:
    """Returns the sum of the losses over a divisor; half precision is summed in single."""
    if losses.dtype in HALVES:
        return (losses.sum(dtype=torch.float32) / divisor).to(losses.dtype)
    return losses.sum() if type(divisor) is int and divisor == 1 else losses.sum() / divisor


def loss_factors(f: Factors, reduction: str, count: int) -> Factors:
    """Returns the factors of a loss from ``f``, the factors with reduction="none"."""
    if reduction == "none":
        return f
    divisor = 1 if reduction == "sum" else count

    def local(call: Any) -> Callable[..., Tensor]:
        func = call.func
        if not call.split:
            return func

        def run(**words: Any) -> Tensor:
            return total(func(**{**words, "reduction": "none"}), divisor)

        return run

    gone = {letter: "sum" for letter in f.outputs[0] if letter is not None}
    return f.replace(outputs=((),), reduced=gone, shapes=((),), local=local)


def elementwise(words: dict[str, Any]) -> Factors:
    """Returns the factors of a loss with one value for each element of the broadcast tensors."""
    reduction = requested_reduction(words)
    tensors = tensors_in(*words.values())
    f = pointwise_factors(tensors)
    shape = f.output_shapes()[0]
    count = math.prod(shape) if reduction != "batchmean" else (tensors[0].shape or (1,))[0]
    return loss_factors(f, reduction, count)


ELEMENTWISE = "elementwise; mean and sum: P(sum)"


@losses(
    F.smooth_l1_loss, F.kl_div, F.soft_margin_loss, F.hinge_embedding_loss, F.poisson_nll_loss,
    F.margin_ranking_loss, F.mse_loss, F.l1_loss, F.huber_loss, doc=ELEMENTWISE,
)  # fmt: skip
def loss(weight: Any = None, **words: Any) -> Factors:
    if weight is not None and words.get("reduction", "mean") == "mean":
        raise NoRule("a mean by weights")
    return elementwise({**words, "weight": weight})


@losses(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, doc=ELEMENTWISE)
def binary_cross_entropy(input: Arg, target: Arg, **words: Any) -> Factors:
    if target.shape != input.shape:
        raise ValueError(
            f"target {list(target.shape)} must be of the size of input {list(input.shape)}"
        )
    return elementwise({"input": input, "target": target, **words})


@losses(F.gaussian_nll_loss, doc=ELEMENTWISE)
def gaussian_nll_loss(input: Arg, target: Arg, var: Any, **words: Any) -> Factors:
    if not isinstance(var, Arg) or not input.shape == target.shape == var.shape:
        raise NoRule("a variance of another shape")  # torch adds a dim to it
    return elementwise({"input": input, "target": target, "var": var, **words})


@rule(torch.ctc_loss, exact=True)
def ctc_loss(
    log_probs: Arg, targets: Arg, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Factors:  # fmt: skip
    """t n c, n s, n, n -> n: the batch passes through; mean and sum: P(sum)

    Targets that stand one behind the other, [sum of target_lengths], are whole on each rank, and so
    are their lengths, which say where the targets of its sequences begin.
    """
    if log_probs.ndim != 3:
        raise NoRule("ctc_loss of one sequence")
    n, lengths = log_probs.shape[1], (input_lengths, target_lengths)
    for name, given in zip(("input_lengths", "target_lengths"), lengths, strict=True):
        if (given.numel() if isinstance(given, Arg) else len(given)) != n:
            raise RuntimeError(f"ctc_loss: {name} must have one number for each of {n} sequences")
    rows = targets.ndim == 2
    ins: tuple[Any, ...] = (None, "n", None), ("n", None) if rows else (None,)
    for given, letter in zip(lengths, ("n", "n" if rows else None), strict=True):
        ins += ((letter,),) if isinstance(given, Arg) else ()
    f = Factors(ins, (("n",),), local=_ctc_local)
    return f if not reduction else f.replace(outputs=((),), reduced={"n": "sum"})


def _ctc_local(call: Any) -> Callable[..., Tensor]:
    """Returns the losses of this rank's sequences; an empty piece is padded with a sequence."""
    if not call.split:
        return call.func
    (_, start, _), (_, count, _) = call.inputs[0].local_box
    n = call.inputs[0].shape[1]
    own = slice(start, start + count)

    def ctc_loss(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
        blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        lengths = [
            x if isinstance(x, Tensor) else torch.tensor(x).long()[slice(None) if behind else own]
            for x, behind in ((input_lengths, False), (target_lengths, targets.ndim == 1))
        ]
        if targets.ndim == 1:
            first = int(lengths[1][:start].sum())
            lengths[1] = lengths[1][own]
            targets = targets[first : first + int(lengths[1].sum())]
        times, sizes = map(grown, lengths)
        given = grown(log_probs), targets if count else grown(targets), times, sizes
        losses = torch.ctc_loss(*given, blank, 0, zero_infinity)[:count]
        if reduction == 1:
            losses = losses / sizes[:count].clamp(min=1).to(losses)
        return total(losses, n if reduction == 1 else 1) if reduction else losses

    return ctc_loss


# One loss for each row ----------------------------------------------------------------------------


def rowwise(tensors: list[Arg], words: dict[str, Any]) -> Factors:
    """Returns the factors of a loss with one value per row: rows pass through, a row is whole."""
    reduction = requested_reduction(words)
    rows = tensors[0].shape[0] if tensors[0].ndim else 1
    if any(t.ndim not in (1, 2) or t.shape[0] != rows for t in tensors) or tensors[0].ndim != 2:
        raise NoRule("rows of vectors only")
    ins: list[tuple[Letter, ...]] = [("rows", None)[: t.ndim] for t in tensors]
    f = Factors(tuple(ins), (("rows",),))
    return loss_factors(f, reduction, rows)


@losses(
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
    F.cosine_embedding_loss, F.triplet_margin_loss, doc="rows pass through; mean and sum: P(sum)",
)  # fmt: skip
def row_loss(weight: Any = None, **words: Any) -> Factors:
    if weight is not None:
        raise NoRule("weights of classes")
    first, second, *third = tensors = tensors_in(*words.values())
    if third and first.shape != second.shape:
        raise NoRule("rows that broadcast")
    return rowwise(tensors, words)
