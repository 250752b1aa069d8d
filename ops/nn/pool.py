"""Pooling: batch and channels pass through, the dims that the window slides over stay whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops.batching import batched_factors
from ops.dims import FIRST
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.registry import Function, rule


def _pool(n: int, func: Function, linear: bool) -> None:
    """``n``: how many dims the window slides over."""

    @rule(func, exact=True, doc="linear; " * linear + "the dims that are pooled stay whole")
    def factors(input: Arg, *args: Any, **words: Any) -> Factors:
        if input.ndim not in (n + 1, n + 2):
            raise NoRule(f"{func.__name__} of {list(input.shape)}")
        return batched_factors(
            func, (input, *args), words, [input], [n],
            terms=FIRST if linear else (), local=zeros_if_empty,
        )  # fmt: skip


for _n in (1, 2, 3):
    for _kind, _linear in (("avg", True), ("max", False)):
        for _name in (f"{_kind}_pool{_n}d", f"adaptive_{_kind}_pool{_n}d"):
            _pool(_n, getattr(F, _name), _linear)
            if _kind == "max":
                _pool(_n, getattr(F, _name + "_with_indices"), _linear)
    _pool(_n, getattr(torch, f"max_pool{_n}d"), False)
_pool(1, torch.adaptive_max_pool1d, False)
