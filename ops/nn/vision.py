"""Functions of images: they rearrange pixels, resize, extract or pool windows, or look up values by
position. The batch passes through, and usually the channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import FIRST, batched_factors, without
from ops.dtypes import smooth
from ops.empty_pieces import padded_if_empty, zeros_if_empty
from ops.factors import Arg, Factors, NoRule, Terms
from ops.registry import Function, rule


def _images(
    func: Function, core: int, doc: str, tensors: int = 1, linear: bool = True,
    empty: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Registers a rule for ``tensors`` arguments that are images with ``core`` whole dims; -2: all
    but 2. ``empty``: also of images without elements."""

    @rule(func, exact=True, doc="linear; " * linear + doc, **options)
    def factors(*args: Any, **words: Any) -> Factors:
        images = list(args[:tensors])
        lacks = 0 in args[0].shape and not empty
        if any(i.shape != args[0].shape for i in images) or lacks:
            raise NoRule("no images, or places of another shape")
        last = core if core > 0 else args[0].ndim + core
        if last < 1:
            raise NoRule(f"{func.__name__} wants batch, channels and at least one more dim")
        return batched_factors(
            func, args, words, images, [last] * tensors,
            # of integers torch rounds each average
            linear_terms=FIRST if linear and smooth(args[0].dtype) else (),
            # padded places of max_unpool might not be on the image
            local=zeros_if_empty if tensors > 1 else padded_if_empty,
        )  # fmt: skip


_POOLED = "the dims that are pooled stay whole"
for _name in ("pixel_shuffle", "pixel_unshuffle"):
    _images(getattr(F, _name), 3, "the last 3 dims are whole, those before pass through")
_images(F.unfold, 3, "the batch passes through")
_images(F.fold, 2, "the batch passes through")
_images(F.interpolate, -2, "batch and channels pass through", floats=True)
for _n in (1, 2, 3):
    _images(getattr(F, f"max_unpool{_n}d"), _n, "batch and channels pass through", tensors=2)
    _max = f"max_pool{_n}d", f"adaptive_max_pool{_n}d"
    _pools = [getattr(F, name + end) for name in _max for end in ("", "_with_indices")]
    for _func in (*_pools, getattr(torch, f"max_pool{_n}d")):
        _images(_func, _n, _POOLED, linear=False, empty=True)
    for _func in (getattr(F, f"avg_pool{_n}d"), getattr(F, f"adaptive_avg_pool{_n}d")):
        _images(_func, _n, _POOLED, empty=True)
_images(torch.adaptive_max_pool1d, 1, _POOLED, linear=False, empty=True)


def _channels(func: Function, terms: Terms) -> None:
    @rule(func, exact=True, doc="the channels are whole")
    def factors(input: Arg, *args: Any, **words: Any) -> Factors:
        if input.ndim < 3:
            raise NoRule("fewer than 3 dims")
        dims = without(input, [1])
        return Factors(
            (dims,), (dims,), linear_terms=terms, shapes=(input.shape,), local=padded_if_empty
        )


_channels(F.channel_shuffle, FIRST)
_channels(F.local_response_norm, ())


@rule(F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d, exact=True)
def grid_sample(input: Arg, grid: Arg, *args: Any, **words: Any) -> Factors:
    """n c ..., n points 2 -> n c points: linear in the image, which is whole; points may be
    split"""
    n = input.ndim - 2
    if n < 2 or grid.ndim != input.ndim or input.shape[0] != grid.shape[0] or 0 in input.shape:
        raise NoRule("an image and a grid that do not fit")
    spots = tuple(f"p{i}" for i in range(n))
    ins = ("n", "c", *(None,) * n), ("n", *spots, None)
    return Factors(ins, (("n", "c", *spots),), linear_terms=FIRST, local=padded_if_empty)
