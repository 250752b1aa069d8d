"""Convolutions: batch and output channels pass through, input channels are reduced, groups stay
together.

A dim that the window slides over stays split if its halo, in forward and backward, is no larger
than a gather of the input: each rank fetches the halo of its piece (ops/nn/halo.py). The dims of a
transposed convolution stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ops.dims import PRODUCT, tuple_of
from ops.empty_pieces import grown, is_empty
from ops.factors import Arg, Factors, NoRule
from ops.local import LocalCall
from ops.nn.halo import Window, halo
from ops.registry import rule

Tensor = torch.Tensor
GROUPS = "input channels: P(sum); groups stay together"


def _windows(
    sizes: Sequence[int], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[Window, ...]:
    """Returns how each dim of the output reads its dim of the input. With "same" and an odd number
    of zeros, the end gets one more."""
    n = len(sizes)
    steps, holes = tuple_of(stride, n), tuple_of(dilation, n)
    reach = [d * (k - 1) + 1 for d, k in zip(holes, kernel, strict=True)]
    if padding == "same":
        pads, after = tuple((r - 1) // 2 for r in reach), tuple(r // 2 for r in reach)
        made = tuple(sizes)
    else:
        pads = after = (0,) * n if padding == "valid" else tuple_of(padding, n)
        rows = zip(sizes, pads, reach, steps, strict=True)
        made = tuple((size + 2 * p - r) // max(s, 1) + 1 for size, p, r, s in rows)
    if min(*steps, *holes, *reach) < 1 or min(pads) < 0 or (padding == "same" and max(steps) > 1):
        raise NoRule(f"stride {stride}, padding {padding}, dilation {dilation} of kernel {kernel}")
    return tuple(map(Window, sizes, made, steps, reach, pads, after))


def _factors(
    name: str, n: int, input: Arg, weight: Arg, bias: Any, groups: int, out: tuple[int, ...],
    windows: tuple[Window, ...], local: Any,
) -> Factors:  # fmt: skip
    """Returns the factors of a convolution. ``windows``: one for each dim that slides; none of a
    transposed convolution."""
    transposed = not windows
    lead: tuple[Any, ...] = ("n",) * (input.ndim - n - 1)
    slide = tuple(f"in{i}" for i in range(n))
    taps = tuple(f"k{i}" for i in range(n))
    made = tuple(f"out{i}" for i in range(n)) if transposed else slide
    into, outof = ("c", "o") if groups == 1 else (("g", "c"), ("g", "o"))
    if transposed:
        weights: tuple[Any, ...] = (into, "o", *taps)
        c, o = weight.shape[0] // groups, weight.shape[1]
        outs = o * groups
    else:
        weights = (outof, "c", *taps)
        c, o, outs = weight.shape[1], weight.shape[0] // groups, weight.shape[0]
    if (c * groups, o * groups) != (input.shape[len(lead)], outs) or min(out, default=1) < 1:
        raise NoRule(
            f"{name}: input {list(input.shape)} and weight {list(weight.shape)} do not fit"
        )
    sizes: dict[Any, int] = {"g": groups, "c": c, "o": o}
    if transposed:
        sizes.update(zip(made, out, strict=True))
    inputs: list[tuple[Any, ...]] = [(*lead, into, *slide), weights]
    if isinstance(bias, Arg):
        inputs.append((outof,))
    shape = (*input.shape[: len(lead)], o * groups, *out)
    return Factors(
        tuple(inputs), ((*lead, outof, *made),), sizes, local=local,
        linear_terms=(*PRODUCT, {2}) if isinstance(bias, Arg) else PRODUCT,
        reduced={"c": "sum"} if groups == 1 else {}, divisible_only={"g"},
        unsplittable=set((*slide, *taps) if transposed else taps), shapes=(shape,),
        halo={letter: _cost(input, w) for letter, w in zip(slide, windows, strict=False)},
    )  # fmt: skip


def _cost(input: Arg, window: Window) -> Callable[[int], float]:
    """Returns a function: number of pieces -> bytes that a rank receives. It counts both
    directions, since gradients are sent back; the backward of a gather is a local slice."""
    return lambda parts: 2 * input.nbytes * window.halo_share(parts)


def _check(name: str, n: int, input: Arg, weight: Arg) -> None:
    if input.ndim not in (n + 1, n + 2) or weight.ndim != n + 2:
        raise NoRule(f"{name} of {list(input.shape)} with {list(weight.shape)}")


def _with_halo(call: LocalCall, n: int, windows: Sequence[Window], split: Sequence[int]) -> Any:
    """Returns the convolution of a piece. It fetches the halo of each split dim, pads the piece,
    and runs without padding."""
    parts = call.count(call.axes("g"))
    halos = [halo(call, i - n, call.axes(f"in{i}"), windows[i]) for i in split]
    pads = [w.before for w in windows]
    zeros_at = [(0, w.after - w.before) for w in windows]  # of padding="same"
    for i, one in zip(split, halos, strict=True):
        pads[i], zeros_at[i] = 0, one.zeros
    around = [z for pair in reversed(zeros_at) for z in pair]
    run, shape = call.func, call.outputs[0].local_shape
    if 0 in (*shape, *call.inputs[1].local_shape):
        run = _padded(call, {i - n: windows[i].reach for i in split if not shape[i - n]})

    def conv(
        input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        for one in halos:
            input = one.fetch(input)
        if any(around):
            input = torch.nn.functional.pad(input, around)
        return run(input, weight, bias, stride, tuple(pads), dilation, groups // parts)

    return conv


def _padded(call: LocalCall, least: dict[int, int]) -> Any:
    """Returns the convolution of pieces whose empty dims are padded, the image with ones and the
    weight with zeros; the padding is cut off from the result. So the graph is the same as on other
    ranks, for gradients of every order. ``least``: size by dim, where it is not 1."""
    kept = tuple(slice(0, n) for n in call.outputs[0].local_shape)

    def grow(x: Tensor, sizes: dict[int, int], value: float) -> Tensor:
        lacks = [max(0, sizes.get(d, 1) - x.shape[d]) for d in range(-1, -x.ndim - 1, -1)]
        return torch.nn.functional.pad(x, [n for lack in lacks for n in (0, lack)], value=value)

    def conv(input: Tensor, weight: Tensor, *rest: Any, **words: Any) -> Tensor:
        words = {k: grown(v) for k, v in words.items()}
        given = grow(input, least, 1.0), grow(weight, {}, 0.0), *map(grown, rest)
        return call.func(*given, **words)[kept]

    return conv


def _on_pieces(call: LocalCall, n: int) -> Any:
    """Returns the convolution with the groups that this rank has."""
    parts = call.count(call.axes("g"))
    run = _padded(call, {}) if is_empty(call) else call.func
    if parts == 1:
        return run

    def conv(*args: Any, **words: Any) -> Tensor:
        if len(args) > 6:
            args = (*args[:6], args[6] // parts, *args[7:])
        else:
            words["groups"] //= parts
        return run(*args, **words)

    return conv


def _conv(func: Any, n: int) -> None:
    name = func.__name__

    @rule(func, doc=f"{GROUPS}; a halo where the window slides")
    def factors(
        input: Arg, weight: Arg, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Factors:  # fmt: skip
        _check(name, n, input, weight)

        def local(call: LocalCall) -> Any:
            split = [i for i in range(n) if call.count(call.axes(f"in{i}")) > 1]
            return _with_halo(call, n, windows, split) if split else _on_pieces(call, n)

        windows = _windows(input.shape[-n:], weight.shape[2:], stride, padding, dilation)
        out = tuple(w.made for w in windows)
        return _factors(name, n, input, weight, bias, groups, out, windows, local)


def _conv_transpose(func: Any, n: int) -> None:
    name = func.__name__

    @rule(func, doc=GROUPS)
    def factors(
        input: Arg, weight: Arg, bias: Any = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Factors:  # fmt: skip
        _check(name, n, input, weight)
        options = [tuple_of(v, n) for v in (stride, padding, output_padding, dilation)]
        sizes = zip(input.shape[-n:], weight.shape[2:], *options, strict=True)
        out = tuple((s - 1) * step - 2 * p + d * (k - 1) + e + 1 for s, k, step, p, e, d in sizes)
        local = lambda call: _on_pieces(call, n)  # noqa: E731
        return _factors(name, n, input, weight, bias, groups, out, (), local)


_conv(torch.conv1d, 1)
_conv(torch.conv2d, 2)
_conv(torch.conv3d, 3)
_conv_transpose(torch.conv_transpose1d, 1)
_conv_transpose(torch.conv_transpose2d, 2)
_conv_transpose(torch.conv_transpose3d, 3)
