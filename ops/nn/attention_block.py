"""Attention of some queries to one block of keys, and its backward. It also returns the log-sum-exp
of the scores, which is used to merge the results for several blocks.

All tensors are [batch, heads, length, width]; k and v may have fewer heads, each for a group of
heads of q. Source of the merge and of the backward: Dao et al., "FlashAttention", 2022; Liu et al.,
"Ring attention with blockwise transformers", 2023.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from disttensor.torch_private import flash_on_cpu, flash_on_cpu_backward
from ops.dtypes import wide

Grads = tuple[Tensor, Tensor, Tensor, Any]  # of q, k, v, and of the mask or None


class Hidden(NamedTuple):
    """The hidden part of a block: ``mask`` (False, or added to the scores), ``causal`` (key i is
    visible to query i and later ones), ``keep`` (factors of the weights: dropout)."""

    mask: Tensor | None = None
    causal: bool = False
    keep: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """Returns (result, log-sum-exp of each query's scores): [b, h, l, v] and [b, h, l], in
    ``wide``. A query that sees no key has 0 and -inf."""
    if _flash(q, v, hidden):
        mask = _added(hidden.mask, q.dtype)
        out, lse = flash_on_cpu(
            _dense(q), _dense(k), _dense(v), 0.0, hidden.causal, attn_mask=mask, scale=scale
        )
        if mask is not None:  # the kernel returns 0
            lse = lse.masked_fill((mask == -math.inf).all(-1), -math.inf)
        return out.to(wide(q.dtype)), lse.to(wide(q.dtype))
    q, k, v = _wide(q, k, v)
    scores = _scores(q, k, scale, hidden)
    lse = torch.logsumexp(scores, -1)
    weights = _weights(scores, lse)
    return (weights if hidden.keep is None else weights * hidden.keep) @ v, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    hidden: Hidden, of_mask: bool,
) -> Grads:  # fmt: skip
    """Returns gradients of q, k, v (and the mask if asked). ``out`` and ``lse`` belong to all
    keys."""
    if _flash(q, v, hidden) and not of_mask:
        seen = lse.masked_fill(lse == -math.inf, 0.0)
        mask = _added(hidden.mask, q.dtype)
        some: Grads = flash_on_cpu_backward(
            _dense(grad), _dense(q), _dense(k), _dense(v), _dense(out), seen, 0.0, hidden.causal,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        return some[0], some[1], some[2], None
    heads = k.shape[1]
    q, k, v = _wide(q, k, v)
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    weights = _weights(_scores(q, k, scale, hidden), lse)
    used = weights if hidden.keep is None else weights * hidden.keep
    of_weights = grad @ v.mT
    if hidden.keep is not None:
        of_weights = of_weights * hidden.keep
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True))
    of_q = of_scores @ k * scale
    of_k, of_v = of_scores.mT @ q * scale, used.mT @ grad
    if of_k.shape[1] != heads:
        of_k, of_v = (t.unflatten(1, (heads, -1)).sum(2) for t in (of_k, of_v))
    mask = hidden.mask
    return (
        of_q,
        of_k,
        of_v,
        of_scores.sum_to_size(mask.shape) if of_mask and mask is not None else None,
    )


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds, in place, the result for more keys to the result for some."""
    weight = torch.sigmoid(more_lse - lse).nan_to_num_(0.0)  # 0 for a query that has seen no key
    out.lerp_(more, weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, more_lse))


def _flash(q: Tensor, v: Tensor, hidden: Hidden) -> bool:
    """Returns True if torch has a kernel that returns the log-sum-exp. It divides by sizes, so a
    piece without elements would end the process."""
    return (
        q.is_cpu and flash_on_cpu is not None and hidden.keep is None and q.shape[-1] == v.shape[-1]
        and 0 not in (*q.shape, *v.shape)
    )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns a mask as numbers that are added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v in the dtype of sums, each with the heads of q."""
    dtype, each = wide(q.dtype), q.shape[1] // max(1, k.shape[1])
    if each > 1:
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Hidden) -> Tensor:
    scores = q @ k.mT * scale
    if hidden.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, -math.inf)
    mask = hidden.mask
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
