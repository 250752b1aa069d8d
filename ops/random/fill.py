"""Functions that fill a tensor with random numbers, also in the shape of another tensor.

Rules are as for elementwise functions. The local function gets the numbers of this call from
``call.collectives`` (``ops.local.DrawProtocol``): by global position, or from torch's own function,
seeded for this rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from disttensor.core.layout import Layout
from ops.dims import FIRST
from ops.factors import Arg, Factors, LocalMaker, NoRule, pointwise_factors
from ops.local import DrawProtocol, LocalCall
from ops.registry import rule

ByPosition = Callable[..., Any]  # (draw, *args, **kwargs of the torch function) -> result
Kind = tuple[str, dict[str, Any]]  # a distribution and its options


def drawing(
    call: LocalCall,
    default: str,
    by_position: ByPosition,
    place: tuple[int, ...] | None = None,
    func: Any = None,
) -> Callable[..., Any]:
    """Returns the local function of a random call: ``by_position``, or ``func`` (the torch
    function) seeded for this rank's place on the axes ``place`` (those that split the result)."""
    run_fast = func or call.func
    axes = tuple(sorted(call.outputs[0].layout.sharded)) if place is None else place

    def run(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if isinstance(args[-1], torch.Generator):  # of poisson and rrelu_
            *args, generator = args  # type: ignore[assignment]
        draw = call.collectives.draw(default, generator)
        if draw.invariant:
            return by_position(draw, *args, **kwargs)
        with draw.seeded(axes, next(a for a in args if isinstance(a, Tensor)).device):
            return run_fast(*args, **kwargs)

    return run


def drawn(default: str) -> Callable[[ByPosition], LocalMaker]:
    """Decorates a function ``by_position``, which gets the call first. The result returns the local
    function of a call."""

    def decorator(by_position: ByPosition) -> LocalMaker:
        return lambda call: drawing(call, default, partial(by_position, call))

    return decorator


def whole_float(dtype: torch.dtype) -> int:
    """Returns the largest n such that dtype holds all integers up to n, or of an integer dtype its
    largest value."""
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


# In place -----------------------------------------------------------------------------------------


RANGE = {"from": "low", "to": "high"}
# torch function -> the distribution, and its options: their names in torch, in order -> here
FILLS: dict[Any, tuple[str, dict[str, str]]] = {
    Tensor.normal_: ("normal", {"mean": "mean", "std": "std"}),
    Tensor.uniform_: ("uniform", RANGE), Tensor.random_: ("integers", RANGE),
    Tensor.exponential_: ("exponential", {"lambd": "rate"}),
    Tensor.bernoulli_: ("bernoulli", {"p": "p"}),
}  # fmt: skip


def distribution(func: Any, dtype: torch.dtype, args: Any, kwargs: dict[str, Any]) -> Kind:
    """Returns the distribution of a call and its options."""
    kind, names = FILLS[func]
    if kind == "integers":
        low, high = (0, *args)[-2:] if args else (0, None)  # random_(to)
        return kind, {"low": low, "high": whole_float(dtype) + 1 if high is None else high}
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return kind, {names[name]: value for name, value in given.items()}


# torch draws the whole tensor on every rank, which keeps its piece
WHOLE = (Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_)


def filled(call: LocalCall) -> Callable[..., Any]:
    """Fills this rank's piece. For a pending sum or product the first rank has the numbers, and the
    others have 0 or 1."""
    func, target = call.func, call.outputs[0]
    ops = dict(target.layout.partial)
    mute = [op for a, op in ops.items() if op in ("sum", "prod") and call.coordinate[a]]
    neutral = 0 if "sum" in mute else 1

    def by_position(draw: DrawProtocol, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if func not in FILLS:
            whole = torch.empty(target.shape, dtype=input.dtype, device=input.device)
            with draw.seeded((), input.device):
                func(whole, *args, **kwargs)
            layout, here = Layout(((),) * whole.ndim), replace(target.layout, partial=())
            return input.copy_(call.collectives.reshard(whole, target.shape, layout, here, ()))
        kind, options = distribution(func, input.dtype, args, kwargs)
        if isinstance(options.get("p"), Tensor):
            options["p"] = options["p"].expand(input.shape)
        return input.copy_(draw.numbers(kind, target, input.dtype, input.device, **options))

    run = drawing(call, "invariant", by_position, func=func)
    if not mute:
        return run
    return lambda input, *args, **kwargs: run(input, *args, **kwargs).fill_(neutral)


@rule(*FILLS, *WHOLE, exact=True, floats=True)  # torch checks their values
def fill(input: Arg, *args: Any, **kwargs: Any) -> Factors:
    """the target is only written"""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Arg)]
    return pointwise_factors(
        [input, *tensors], linear_terms=FIRST, moves=True, local=filled,
        independent=set(range(input.ndim)),
    )  # fmt: skip


# In the likeness of another -----------------------------------------------------------------------


@drawn("invariant")
def likeness(
    call: LocalCall, draw: DrawProtocol, input: Tensor, *bounds: Any, **kwargs: Any
) -> Tensor:
    """Runs rand_like, randn_like or randint_like of this rank's piece."""
    kind, options = LIKES[call.func], {}
    if kind == "integers":
        options = dict(zip(("low", "high"), (0, *bounds)[-2:], strict=True))
    out = torch.empty_like(input, **kwargs)
    numbers = draw.numbers(kind, call.outputs[0], out.dtype, out.device, **options)
    out.detach().copy_(numbers)
    return out


LIKES = {torch.rand_like: "uniform", torch.randn_like: "normal", torch.randint_like: "integers"}


@rule(*LIKES, exact=True, floats=True)
def random_like(input: Arg, *args: Any, **kwargs: Any) -> Factors:
    """lies as the input; only shape and dtype matter"""
    if any(isinstance(a, Arg) for a in (*args, *kwargs.values())):
        raise NoRule("bounds that are tensors")
    return pointwise_factors([input], metadata_only={0}, local=likeness)
