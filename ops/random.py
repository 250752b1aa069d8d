"""Tensors filled with random numbers, and tensors drawn from others that hold probabilities.

A rule decides as for any elementwise function. Its local function asks ``call.reach`` for the numbers of this one call
(``ops.call.Draw``): by global position, or torch's own function seeded for this rank's place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ops.call import Call, Draw
from ops.empty import zero_of
from ops.factors import Arg, Factors, pointwise_factors
from ops.infer import NoRule
from ops.registry import rule

ByPosition = Callable[..., Any]  # (draw, *args, **kwargs of the torch function) -> result
Kind = tuple[str, dict[str, Any]]  # a distribution and its options
FIRST = (frozenset({0}),)


def drawing(
    call: Call,
    default: str,
    by_position: ByPosition,
    place: tuple[int, ...] | None = None,
    func: Any = None,
) -> Callable[..., Any]:
    """The local function of a random call: ``by_position``, or ``func`` (the torch function) seeded for this rank's place
    on the axes ``place`` (those that split the result)."""
    run_fast = func or call.func
    reach = call.reach
    axes = tuple(sorted(call.outputs[0].layout.sharded)) if place is None else place

    def run(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        draw = reach.draw(default, generator)
        if draw.invariant:
            return by_position(draw, *args, **kwargs)
        device = next(a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        with draw.seeded(axes, device):
            return run_fast(*args, **kwargs)

    return run


def whole_float(dtype: torch.dtype) -> int:
    """The largest n such that dtype holds all integers up to n, or of an integer dtype its largest value."""
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


# In place -------------------------------------------------------------------------------------------------


def _normal(dtype: Any, mean: float = 0.0, std: float = 1.0) -> Kind:
    return "normal", {"mean": mean, "std": std}


def _uniform(dtype: Any, low: float = 0.0, high: float = 1.0, **named: float) -> Kind:
    return "uniform", {"low": named.get("from", low), "high": named.get("to", high)}


def _exponential(dtype: Any, lambd: float = 1.0) -> Kind:
    return "exponential", {"rate": lambd}


def _log_normal(dtype: Any, mean: float = 1.0, std: float = 2.0) -> Kind:
    return "log_normal", {"mean": mean, "std": std}


def _cauchy(dtype: Any, median: float = 0.0, sigma: float = 1.0) -> Kind:
    return "cauchy", {"median": median, "sigma": sigma}


def _geometric(dtype: Any, p: float) -> Kind:
    return "geometric", {"p": p}


def _integers(dtype: Any, *bounds: int, **named: int) -> Kind:
    """random_(), random_(to), random_(from, to)"""
    low, high = (0, *bounds)[-2:] if bounds else (0, whole_float(dtype) + 1)
    return "integers", {"low": named.get("from", low), "high": named.get("to", high)}


def _bernoulli(dtype: Any, p: Any = 0.5) -> Kind:
    return "bernoulli", {"p": p}


FILLS: dict[Any, Callable[..., Kind]] = {
    Tensor.normal_: _normal, Tensor.uniform_: _uniform, Tensor.exponential_: _exponential, Tensor.log_normal_: _log_normal,
    Tensor.cauchy_: _cauchy, Tensor.geometric_: _geometric, Tensor.random_: _integers, Tensor.bernoulli_: _bernoulli,
}  # fmt: skip


def filled(call: Call) -> Callable[..., Any]:
    """Fill this rank's piece. Of a pending sum or product the first rank has the numbers, the others 0 or 1."""
    kind_of, func, target = FILLS[call.func], call.func, call.outputs[0]
    ops = dict(target.layout.partial)
    mute = [op for a, op in ops.items() if op in ("sum", "prod") and call.coordinate[a]]
    neutral = 0 if "sum" in mute else 1

    def by_position(draw: Draw, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind, options = kind_of(input.dtype, *args, **kwargs)
        if isinstance(options.get("p"), Tensor):
            options["p"] = options["p"].expand(input.shape)
        return input.copy_(draw.numbers(kind, target, input.dtype, input.device, **options))

    run = drawing(call, "invariant", by_position, func=func)
    return (
        run
        if not mute
        else lambda input, *args, **kwargs: run(input, *args, **kwargs).fill_(neutral)
    )


@rule(*FILLS, exact=True, numbers="type")
def fill(input: Arg, *args: Any, **kwargs: Any) -> Factors:
    """the target is only written"""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Arg)]
    return pointwise_factors([input, *tensors], terms=FIRST, moves=True, local=filled)


# In the likeness of another -------------------------------------------------------------------------------


def likeness(call: Call) -> Callable[..., Any]:
    """rand_like, randn_like, randint_like of this rank's piece."""
    kind, target = LIKES[call.func], call.outputs[0]

    def by_position(draw: Draw, input: Tensor, *bounds: Any, **kwargs: Any) -> Tensor:
        options = {}
        if kind == "integers":
            low, high = (0, *bounds)[-2:] if bounds else (0, 0)
            options = {"low": kwargs.pop("low", low), "high": kwargs.pop("high", high)}
        out = torch.empty_like(input, **kwargs)
        numbers = draw.numbers(kind, target, out.dtype, out.device, **options)
        out.detach().copy_(numbers)
        return out

    return drawing(call, "invariant", by_position)


LIKES = {torch.rand_like: "uniform", torch.randn_like: "normal", torch.randint_like: "integers"}


@rule(*LIKES, exact=True, numbers="type")
def random_like(input: Arg, *args: Any, **kwargs: Any) -> Factors:
    """lies as the input; only shape and dtype matter"""
    if any(isinstance(a, Arg) for a in (*args, *kwargs.values())):
        raise NoRule("bounds that are tensors")
    return pointwise_factors([input], ignored=frozenset({0}), local=likeness)


# From tensors of probabilities, means, deviations -----------------------------------------------------------


def tossed(call: Call) -> Callable[..., Any]:
    """bernoulli(p), bernoulli(input, p): 1 with probability p."""
    target = call.outputs[0]

    def by_position(draw: Draw, input: Tensor, p: Any = None) -> Tensor:
        odds = input if p is None else p
        out = draw.numbers("bernoulli", target, input.dtype, input.device, p=odds)
        return out + zero_of(input) if input.requires_grad else out

    return drawing(call, "invariant", by_position)


@rule(torch.bernoulli, Tensor.bernoulli, exact=True, numbers="type")
def bernoulli(input: Arg, p: Any = None, **kwargs: Any) -> Factors:
    """elementwise"""
    tensors = [a for a in (input, p) if isinstance(a, Arg)]
    return pointwise_factors(tensors, local=tossed)


def scattered(call: Call) -> Callable[..., Any]:
    """normal(mean, std): standard numbers, scaled and shifted."""
    target = call.outputs[0]

    def by_position(draw: Draw, mean: Any, std: Any = 1.0) -> Tensor:
        like = mean if isinstance(mean, Tensor) else std
        if bool((torch.as_tensor(std) < 0).any()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
        wide = torch.float64 if not like.is_complex() else torch.complex128
        out = draw.numbers("normal", target, wide, like.device).mul_(std).add_(mean)
        graded = [v for v in (mean, std) if isinstance(v, Tensor) and v.requires_grad]
        return out.detach().to(like.dtype) + zero_of(*graded) if graded else out.to(like.dtype)

    return drawing(call, "invariant", by_position)


@rule(torch.normal, exact=True, numbers="type")
def normal(mean: Any, std: Any = 1.0, **kwargs: Any) -> Factors:
    """elementwise"""
    return pointwise_factors([a for a in (mean, std) if isinstance(a, Arg)], local=scattered)


# Choices --------------------------------------------------------------------------------------------------


def chosen(call: Call) -> Callable[..., Any]:
    """Rows of weights to numbers of columns. Without replacement: the largest of weight / exponential number (of all
    columns, by position); with: where a uniform number falls in the running sum of the weights."""
    weights, out = call.inputs[0], call.outputs[0]

    def by_position(
        draw: Draw, input: Tensor, num_samples: int, replacement: bool = False
    ) -> Tensor:
        check(input)
        wide = input.detach().to(torch.float64)
        if not replacement:
            race = draw.numbers("exponential", weights, torch.float64, input.device)
            return (wide / race).topk(num_samples, dim=-1).indices
        edges = wide.cumsum(-1)
        total = edges[..., -1:]
        where = draw.numbers("uniform", out, torch.float64, input.device) * total
        where = torch.minimum(where, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(edges, where.contiguous(), right=True)

    return drawing(call, "invariant", by_position)


def check(weights: Tensor) -> None:
    """Raises RuntimeError for what torch.multinomial refuses."""
    if not bool((weights >= 0).logical_and(weights < float("inf")).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not bool((weights.sum(-1) > 0).all()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")


@rule(torch.multinomial, Tensor.multinomial, exact=True)
def multinomial(input: Arg, num_samples: int, replacement: bool = False, **kwargs: Any) -> Factors:
    """m n -> m s: rows pass through, all columns are needed"""
    if not input.dtype.is_floating_point:
        raise RuntimeError(
            f"multinomial: weights of a floating dtype are expected, not {input.dtype}"
        )
    if (
        not 1 <= input.ndim <= 2
        or num_samples < 1
        or (num_samples > input.shape[-1] and not replacement)
    ):
        raise RuntimeError(
            f"multinomial: {num_samples} samples {'with' if replacement else 'without'} replacement of weights of shape "
            f"{list(input.shape)}: weights have 1 or 2 dims, and as many columns as samples are taken without replacement"
        )
    rows = tuple(range(input.ndim - 1))
    sizes = {**dict(enumerate(input.shape[:-1])), "n": input.shape[-1], "s": num_samples}
    return Factors(
        ((*rows, "n"),), ((*rows, "s"),), sizes, whole=frozenset({"n", "s"}), local=chosen
    )


def box(shape: Any, local_shape: Any, local_offset: Any) -> Any:
    """A piece of a tensor that is none of the call's own."""
    return SimpleNamespace(
        shape=tuple(shape), local_shape=tuple(local_shape), local_offset=tuple(local_offset)
    )
