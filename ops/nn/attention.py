"""scaled_dot_product_attention: batch, heads, queries and the width of values pass through. If
queries are split and attention is causal, a rank uses the keys up to its last query. If the axes of
the queries split the keys too, see ``split_sequence.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from disttensor.core.layout import Box
from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors, NoRule
from ops.local import DrawProtocol, LocalCall, LocalPiece
from ops.nn import attention_policy
from ops.nn.split_sequence import split_attention
from ops.random.fill import drawing
from ops.registry import rule

Local = Callable[..., Any]


@rule(F.scaled_dot_product_attention, floats=True, setting=attention_policy.setting)
def scaled_dot_product_attention(
    query: Arg, key: Arg, value: Arg, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> Factors:  # fmt: skip
    """... h l e, ... h s e, ... h s v -> ... h l v; e stays whole, s unless l's axes split it"""
    ndim = query.ndim
    if not ndim == key.ndim == value.ndim or ndim < 2:
        raise NoRule("scaled_dot_product_attention of tensors that broadcast")
    lead: tuple[Any, ...] = tuple(f".{i}" for i in range(ndim - 2))
    q, k, v = ((*lead, *last) for last in ("le", "se", "sv"))
    heads, sizes = query.shape[:-2], dict[Any, int]()
    if enable_gqa and ndim > 2 and heads[-1] != key.shape[-3]:
        shared = key.shape[-3]  # head i of the queries uses head i // r of the keys
        if shared != value.shape[-3] or heads[-1] % shared:
            raise NoRule("scaled_dot_product_attention with odd groups of heads")
        sizes = {lead[-1]: shared, "r": heads[-1] // shared}
        q, heads = (*lead[:-1], (lead[-1], "r"), "l", "e"), (*heads[:-1], shared)
    length, width = key.shape[-2], query.shape[-1]
    if key.shape != (*heads, length, width) or value.shape[:-1] != (*heads, length):
        raise NoRule("scaled_dot_product_attention of shapes that broadcast")
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            "scaled_dot_product_attention: with is_causal=True no attn_mask is expected; add the "
            "causal part to the mask, and leave is_causal out"
        )
    policy = attention_policy.policy.current()
    along = {arg.layout.dims[-2] for arg in (query, key, value)}
    alike = len(along) == 1 and along != {()}  # each is split by its own size
    if alike:
        k, v = (*lead, "l", "e"), (*lead, "l", "v")
        sizes["l"] = query.shape[-2]
    inputs = [q, k, v]
    if isinstance(attn_mask, Arg):
        rows = None if alike and policy == "heads" else "l"
        scores = (*q[:-2], rows, "s")
        last = scores[ndim - attn_mask.ndim :]
        inputs.append(
            tuple(None if s == 1 else x for x, s in zip(last, attn_mask.shape, strict=True))
        )
    whole = partial(with_whole_keys, dropout_p=dropout_p, is_causal=is_causal)
    return Factors(
        tuple(inputs),
        ((*q[:-1], "v"),),
        sizes,
        unsplittable={"s", "e"},
        divisible_only={lead[-1]} if "r" in sizes else set(),
        linear_terms=({2},),
        local=partial(split_attention, policy, whole, dropout_p, is_causal) if alike else whole,
        independent=set("l" if alike and policy in ("auto", "ring") else ""),
    )


def with_whole_keys(call: LocalCall, dropout_p: float, is_causal: bool) -> Local:
    """Returns the local function of a call in which a rank has all keys for its queries."""
    plain = (causal if is_causal else zeros_if_empty)(call)
    return with_dropout(call, plain) if dropout_p else plain


def causal(call: LocalCall) -> Callable[..., Any]:
    """Returns the local function of causal attention for this rank's queries ``first``, ``first +
    1``, ...: query i sees the keys up to i."""
    plain, out = zeros_if_empty(call), call.outputs[0]
    count, first = out.local_shape[-2], out.local_box.offset[-2]
    if not call.axes("l") or not math.prod(out.local_shape):
        return plain

    def from_there(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        key, value = key[..., : first + count, :], value[..., : first + count, :]
        words = {"scale": scale, "enable_gqa": enable_gqa}
        if not first:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **words)
        past = torch.ones(count, key.shape[-2], dtype=torch.bool, device=query.device).tril_(first)
        return plain(query, key, value, past, dropout_p, False, **words)

    return from_there


def with_dropout(call: LocalCall, plain: Local) -> Callable[..., Any]:
    """Returns the local function of attention with dropout, with a random number for each of the
    weights [..., l, s]: ``plain`` with numbers of torch's own, or one by position. If the width of
    the values is split, the ranks that split it share the mask."""
    out, keys = call.outputs[0], call.inputs[1]
    size = keys.shape[-2]
    offset, rows = out.local_box
    mask = LocalPiece((*out.shape[:-1], size), Box((*offset[:-1], 0), (*rows[:-1], size)))
    place = tuple(a for axes in out.layout.dims[:-1] for a in axes)
    first = offset[-2]

    def by_position(
        draw: DrawProtocol, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if enable_gqa:
            each = query.shape[-3] // max(1, key.shape[-3])
            key, value = key.repeat_interleave(each, -3), value.repeat_interleave(each, -3)
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = query @ key.transpose(-2, -1) * scale
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            future.triu_(1 + first)
            scores = scores.masked_fill(future, -math.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
        unseen = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key has 0
        weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
        keep = draw.numbers("bernoulli", mask, query.dtype, query.device, p=1.0 - dropout_p)
        return weights * (keep.div_(1.0 - dropout_p) if dropout_p < 1.0 else keep) @ value

    return drawing(call, "fast", by_position, place, plain)
