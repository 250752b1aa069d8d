"""Rules. Functions that rearrange elements without computing: views, permutations, joins, cuts,
padding."""

from ops.shape import (
    concat,
    flip_roll,
    pad,
    permute,
    regroup,
    repeat,
    split,
    strides,
    view,
    view_copy,
)

__all__ = [
    "concat",
    "flip_roll",
    "pad",
    "permute",
    "regroup",
    "repeat",
    "split",
    "strides",
    "view",
    "view_copy",
]
