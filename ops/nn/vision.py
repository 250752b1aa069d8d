"""Functions of images: they rearrange pixels, resize, extract or pool windows, or look up values by
position. The batch passes through, and usually the channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import FIRST, batched_factors, shaped, without
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors, NoRule
from ops.registry import Function, rule


def _images(
    func: Function, core: int, doc: str, tensors: int = 1, linear: bool = True, empty: bool = False
) -> None:
    """Registers a rule for ``tensors`` arguments that are images with ``core`` whole dims.
    ``empty``: also of images without elements."""

    @rule(func, exact=True, doc="linear; " * linear + doc)
    def factors(*args: Any, **words: Any) -> Factors:
        images = list(args[:tensors])
        lacks = 0 in args[0].shape and not empty
        if any(i.shape != args[0].shape for i in images) or lacks:
            raise NoRule("no images, or places of another shape")
        return batched_factors(
            func, args, words, images, [core] * tensors,
            linear_terms=FIRST if linear else (), local=zeros_if_empty,
        )  # fmt: skip


_POOLED = "the dims that are pooled stay whole"
for _name in ("pixel_shuffle", "pixel_unshuffle"):
    _images(getattr(F, _name), 3, "the last 3 dims are whole, those before pass through")
_images(F.unfold, 3, "the batch passes through")
_images(F.fold, 2, "the batch passes through")
for _n in (1, 2, 3):
    _images(getattr(F, f"max_unpool{_n}d"), _n, "batch and channels pass through", tensors=2)
    _max = f"max_pool{_n}d", f"adaptive_max_pool{_n}d"
    _pools = [getattr(F, name + end) for name in _max for end in ("", "_with_indices")]
    for _func in (*_pools, getattr(torch, f"max_pool{_n}d")):
        _images(_func, _n, _POOLED, linear=False, empty=True)
    for _func in (getattr(F, f"avg_pool{_n}d"), getattr(F, f"adaptive_avg_pool{_n}d")):
        _images(_func, _n, _POOLED, empty=True)
_images(torch.adaptive_max_pool1d, 1, _POOLED, linear=False, empty=True)


@rule(F.channel_shuffle, exact=True)
def channel_shuffle(input: Arg, groups: int) -> Factors:
    """the channels are whole"""
    dims = without(input, [1])
    return shaped(torch.channel_shuffle, (input, groups), {}, [dims], dims, linear_terms=FIRST)


@rule(F.local_response_norm, exact=True)
def local_response_norm(input: Arg, size: int, *args: Any, **words: Any) -> Factors:
    """the channels are whole"""
    if input.ndim < 3:
        raise NoRule("local_response_norm of fewer than 3 dims")
    dims = without(input, [1])
    return Factors((dims,), (dims,), shapes=(input.shape,), local=zeros_if_empty)


@rule(F.interpolate, exact=True, floats=True)
def interpolate(
    input: Arg, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None, antialias: bool = False,
) -> Factors:  # fmt: skip
    """linear; batch and channels pass through"""
    args = (input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if input.ndim < 3 or 0 in input.shape:
        raise NoRule("interpolate wants batch, channels and at least one more dim")
    return batched_factors(
        F.interpolate, args, {}, [input], [input.ndim - 2], linear_terms=FIRST, local=zeros_if_empty
    )


@rule(F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d, exact=True)
def grid_sample(input: Arg, grid: Arg, *args: Any, **words: Any) -> Factors:
    """n c ..., n points 2 -> n c points: linear in the image, which is whole; points may be
    split"""
    n = input.ndim - 2
    if n < 2 or grid.ndim != input.ndim or input.shape[0] != grid.shape[0] or 0 in input.shape:
        raise NoRule("an image and a grid that do not fit")
    spots = tuple(f"p{i}" for i in range(n))
    ins = ("n", "c", *(None,) * n), ("n", *spots, None)
    return Factors(ins, (("n", "c", *spots),), linear_terms=FIRST, local=zeros_if_empty)
