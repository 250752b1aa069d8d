"""Repeating and padding: the dims that grow are whole, except in repeat_interleave; meshgrid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import FIRST, front, letters_of, moved, named, numbers, replaced, shaped, without
from ops.factors import Arg, Factors, Letter, NoRule
from ops.registry import rule


def _repeated(input: Arg, times: tuple[int, ...]) -> Factors:
    new = len(times) - input.ndim
    out: list[Letter] = [f"times{i}" for i in range(new)]
    sizes: dict[Letter, int] = {f"times{i}": times[i] for i in range(new)}
    for d, n in enumerate(times[new:]):
        out.append(d if n == 1 else f"long{d}")
        sizes[f"long{d}"] = n * input.shape[d]
    return moved(input, tuple(out), sizes)


@rule(*named("repeat"), exact=True)
def repeat(input: Arg, *repeats: Any) -> Factors:
    """repeated dims are whole"""
    return _repeated(input, numbers(repeats))


@rule(*named("tile"), exact=True)
def tile(input: Arg, *dims: Any) -> Factors:
    """repeated dims are whole"""
    times = numbers(dims)
    return _repeated(input, (1,) * (input.ndim - len(times)) + times)


@rule(*named("repeat_interleave"), exact=True)
def repeat_interleave(
    input: Arg, repeats: Any = None, dim: Any = None, *, output_size: Any = None
) -> Factors:
    """the dim may stay split evenly: each piece is repeated where it is"""
    if not isinstance(repeats, int):
        raise NoRule("numbers of repeats given by a tensor")
    if dim is None:
        return moved(input, ("long",), {"long": input.numel() * repeats})
    at = front(dim, input.ndim)
    if not input.ndim:
        return moved(input, ("long",), {"long": repeats})
    if repeats == 0:
        raise NoRule("no repeats")
    out = replaced(input, at, (at, "repeats"))
    local = lambda call: lambda input, *_, **__: input.repeat_interleave(repeats, at)  # noqa: E731
    return moved(input, out, {"repeats": repeats}, divisible_only={at}, local=local)


@rule(F.pad)
def padded_with(
    input: Arg, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Factors:
    """padded dims are whole"""
    if mode != "constant":  # by elements of the input
        dims = without(input, [input.ndim - 1 - i // 2 for i, n in enumerate(pad) if n])
        return shaped(F.pad, (input, pad, mode), {}, [dims], dims, linear_terms=FIRST)
    out: list[Letter] = list(letters_of(input))
    sizes: dict[Letter, int] = {}
    for i in range(len(pad) // 2):
        d = input.ndim - 1 - i
        if pad[2 * i] or pad[2 * i + 1]:
            out[d] = f"padded{d}"
            sizes[f"padded{d}"] = input.shape[d] + pad[2 * i] + pad[2 * i + 1]
    zero = value is None or (isinstance(value, int) and value == 0)  # (a float counts by type)
    return moved(input, tuple(out), sizes, moves=zero)  # zeros stay zeros in any reduction


@rule(torch.constant_pad_nd, exact=True)
def constant_pad_nd(input: Arg, pad: Sequence[int], value: Any = 0) -> Factors:
    """padded dims are whole"""
    return padded_with(input, pad, "constant", value)


@rule(torch.meshgrid)
def meshgrid(*tensors: Any, indexing: Any = None) -> Factors:
    """each vector is a dim of every result"""
    given: Sequence[Arg] = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    order: list[int] = list(range(len(given)))
    if indexing == "xy" and len(given) > 1:
        order[:2] = order[1], order[0]
    ins = tuple((i,) if t.ndim else () for i, t in enumerate(given))
    outs = (tuple(order),) * len(given)
    return Factors(ins, outs, {i: 1 for i, t in enumerate(given) if not t.ndim}, moves=True)
