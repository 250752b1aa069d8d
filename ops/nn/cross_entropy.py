"""cross_entropy and nll_loss: batch, sequence and classes may be split; logits are never gathered.

If the classes are split, there are two all-reduces: of the largest logits, and then of the sums (of
exponentials, of the targets' logits, ...). The result is whole on those axes. If the batch is
split, "mean" divides by the global number (or weight) of the targets that are not ignored, and the
result is a pending sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from disttensor.core.layout import Axes
from ops.dims import replaced
from ops.dtypes import HALVES, wide
from ops.factors import Arg, Factors, Letter, NoRule
from ops.indexing.vocab_shard import Owned
from ops.local import Collectives
from ops.nn.loss import requested_reduction, total
from ops.registry import Function, rule

Tensor = torch.Tensor


@dataclass(slots=True)
class Options:
    """The options of a call. ``classes``: the dim of classes."""

    classes: int
    dense: bool
    logits: bool
    owned: Owned
    class_axes: Axes
    batch_axes: Axes
    collectives: Collectives


def _loss(func: Function, logits: bool, doc: str) -> None:
    """Registers a loss of [C] or [N, C, ...] with class numbers [] or [N, ...], or, of logits, with
    probabilities of the same shape."""

    @rule(func, exact=True, sizes="letters", doc=doc)
    def factors(
        input: Arg, target: Arg, weight: Any = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Factors:  # fmt: skip
        words = {"size_average": size_average, "reduce": reduce, "reduction": reduction}
        kind = requested_reduction(words)
        if not input.ndim:
            raise NoRule("a number")
        at = 0 if input.ndim == 1 else 1
        every, dims = replaced(input, at, "c"), replaced(input, at)
        dense = logits and input.shape == target.shape
        if not dense and target.shape != tuple(input.shape[d] for d in dims):
            raise NoRule("shapes that do not fit")  # torch raises the error
        ins = [every, every if dense else dims, *([("c",)] if isinstance(weight, Arg) else [])]
        reduced: dict[Letter, str] = {"c": "inner"}
        if kind != "none":
            reduced.update(dict.fromkeys(dims, "sum"))

        def local(call: Any) -> Callable[..., Tensor]:
            if not call.split:
                return call.func
            owned, axes = Owned.of(call.inputs[0], at), (call.axes("c"), call.axes(*dims))
            return _local(call.func, Options(at, dense, logits, owned, *axes, call.collectives))

        out = dims if kind == "none" else ()
        sizes = dict(zip(every, input.shape, strict=True))
        return Factors(tuple(ins), (out,), sizes, reduced, local=local, independent=set(dims))


_loss(
    F.cross_entropy, True, "N.. c, N.. -> N..; batch dims give P(sum), classes are reduced within"
)
_loss(F.nll_loss, False, "as cross_entropy, of log-probabilities")


def _local(func: Callable[..., Tensor], o: Options) -> Callable[..., Tensor]:
    def run(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        weights = None
        target = target if o.dense else target.long()  # torch takes uint8 too
        if o.class_axes:
            if not o.dense and weight is not None and weight.requires_grad:
                raise RuntimeError(
                    "cross_entropy has no gradient for weight, as in torch: give weight.detach()"
                )
            dtype = _result_dtype(o, input, target)
            x = input.to(wide(dtype))
            if o.dense:
                losses = _dense_losses(o, x, target, weight, label_smoothing)
            else:
                losses, weights = _losses(o, x, target, weight, ignore_index, label_smoothing)
        else:
            words: dict[str, Any] = {"label_smoothing": label_smoothing} if o.logits else {}
            losses = func(
                input, target, weight, ignore_index=ignore_index, reduction="none", **words
            )
            dtype = losses.dtype
            if reduction == "mean" and not o.dense:
                weights = _weights(target, weight, ignore_index)
        if reduction == "none":
            return losses.to(dtype)
        if reduction == "sum":
            return total(losses).to(dtype)
        return total(losses, _count(o, losses, weights)).to(dtype)

    return run


def _result_dtype(o: Options, input: Tensor, target: Tensor) -> torch.dtype:
    """Returns the dtype of torch's result: autocast computes losses in single precision."""
    dtype = torch.result_type(input, target) if o.dense else input.dtype
    autocast = dtype in HALVES and torch.is_autocast_enabled(input.device.type)
    return torch.float32 if autocast else dtype


def _count(o: Options, losses: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the divisor of the mean: the number or weight of the counted targets of all ranks."""
    dtype = wide(losses.dtype)
    if weights is None:
        mine = torch.full((), losses.numel(), dtype=dtype, device=losses.device)
    else:
        mine = weights.detach().sum(dtype=dtype)
    return o.collectives.all_reduce(mine, "sum", o.batch_axes)


def _weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Returns the weight of each target: the weight of its class, 0 if it is ignored."""
    ignored = target == ignore_index
    if weight is None:
        return ~ignored
    return weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)


def _shifted(o: Options, x: Tensor) -> Tensor:
    """Returns logits minus the largest of their row over all ranks, which has no gradient: a loss
    depends on differences only, and large logits would cancel."""
    shape = (*x.shape[: o.classes], *x.shape[o.classes + 1 :])
    mine = x.detach().amax(o.classes) if o.owned.size else x.new_full(shape, -torch.inf)
    largest = o.collectives.all_reduce(mine, "max", o.class_axes)
    return x - largest.masked_fill(largest == -torch.inf, 0).unsqueeze(o.classes)


def _sums(o: Options, parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns the parts, each summed over all ranks, in one collective."""
    return tuple(o.collectives.psum(torch.stack(parts), o.class_axes).unbind(0))


def _along(o: Options, x: Tensor, weight: Tensor | None) -> Tensor | None:
    """Returns the class weights, shaped to multiply logits."""
    return (
        None if weight is None else weight.reshape(-1, *(1,) * (x.ndim - o.classes - 1)).to(x.dtype)
    )


def _losses(
    o: Options, x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns loss (log sum exp - logit, smoothed) and weight of targets, on this rank."""
    ignored = target == ignore_index
    index = target.masked_fill(ignored, 0)
    here, others = o.owned.find(index)
    x = _shifted(o, x) if o.logits else x
    at = here.unsqueeze(o.classes)
    hit = o.owned.gather(x, o.classes, at, index, IndexError).squeeze(o.classes)
    w = _along(o, x, weight)
    parts = [hit.masked_fill(others, 0)]
    if o.logits:
        parts.append(x.exp().sum(o.classes))
    if weight is not None:
        parts.append(o.owned.rows(weight)[here].masked_fill(others, 0).to(x.dtype))
    if smoothing:
        parts.append((x if w is None else x * w).sum(o.classes))
        if weight is not None:
            parts.append(weight.sum().to(x.dtype).expand(target.shape))
    sums = iter(_sums(o, parts))
    logit = next(sums)
    logsumexp = next(sums).log() if o.logits else torch.zeros_like(logit)
    weights = next(sums) if weight is not None else torch.ones_like(logit)
    losses = (logsumexp - logit) * weights
    if smoothing:
        dot = next(sums)
        mass = next(sums) if weight is not None else o.owned.total
        smooth = logsumexp * mass - dot
        losses = losses * (1 - smoothing) + smooth * (smoothing / o.owned.total)
    return losses.masked_fill(ignored, 0), weights.masked_fill(ignored, 0)


def _dense_losses(
    o: Options, x: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    """Returns the loss of rows for probabilities: the sum over classes of w t (log sum exp - x)."""
    t = target.to(x.dtype)
    if smoothing:
        t = t * (1 - smoothing) + smoothing / o.owned.total
    w = _along(o, x, weight)
    if w is not None:
        t = t * w
    x = _shifted(o, x)
    parts = [(t * x).sum(o.classes), t.sum(o.classes), x.exp().sum(o.classes)]
    dot, mass, power = _sums(o, parts)
    return power.log() * mass - dot
