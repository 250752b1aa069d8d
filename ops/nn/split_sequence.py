"""Attention whose queries and keys are split along the sequence by the same axes.

There are three policies (``attention_policy.py``), and the result has the layout of q. "gather" and
"heads" reshard before and after a local call; "ring" is ``ring_attention.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from disttensor.core.layout import Axes, box_at
from ops.local import LocalCall, LocalPiece
from ops.nn import attention_policy
from ops.nn.attention_policy import Choice, Sizes
from ops.nn.ring_attention import ring

Local = Callable[..., Any]


def split_attention(
    policy: str, whole: Callable[[LocalCall], Local], dropout_p: float, is_causal: bool,
    call: LocalCall,
) -> Local:  # fmt: skip
    """Returns the local function of a call in which one letter splits queries and keys."""
    axes = tuple(a for a in call.axes("l") if call.mesh_shape[a] > 1)
    if not axes:
        return whole(call)
    balanced = bool(call.inputs[0].layout.custom)
    sizes = sizes_of(call, axes, is_causal and not balanced)
    way, why = Choice(policy, "as attention.policy says")
    if balanced:
        way, why = Choice("ring", "as the rows are dealt out")
    elif policy == "auto":
        way, why = attention_policy.choose(sizes, possible_policies(call, axes, dropout_p))
    elif policy == "heads" and len(call.inputs[0].shape) < 3:
        raise ValueError(
            f"scaled_dot_product_attention of {list(call.inputs[0].shape)} by "
            'attention.policy("heads"): it has no dim of heads to split. Give it one, as '
            'x.unsqueeze(0), or use "ring" or "gather"'
        )
    if way == "ring":
        local = ring(call, dropout_p, is_causal)
    else:
        local = (gather_keys if way == "gather" else exchange_heads)(call, axes, whole)

    def run(*args: Any, **kwargs: Any) -> Any:
        return local(*args, **kwargs)

    run.__qualname__ = f"attention by {way}"
    run.why = why  # type: ignore[attr-defined]
    run.sends = round(sizes.forward(way))  # type: ignore[attr-defined]
    return run


def sizes_of(call: LocalCall, axes: Axes, is_causal: bool) -> Sizes:
    """Returns the bytes of q, k, v and the result."""
    dtype = getattr(call.inputs[0], "dtype", None)
    sizes = []
    for piece in (*call.inputs[:3], call.outputs[0]):
        parts = call.count(tuple(a for dim in piece.layout.dims for a in dim if a not in axes))
        sizes.append(math.prod(piece.shape) * (dtype.itemsize if dtype is not None else 4) / parts)
    q, k, v, out = sizes
    return Sizes(q, k, v, out, call.count(axes), is_causal)


def possible_policies(call: LocalCall, axes: Axes, dropout_p: float) -> list[str]:
    """Returns the policies that "auto" may choose: "heads" if the axes divide the heads and no mask
    has rows of its own; "ring" if there is no dropout, for which it would draw numbers one by
    one."""
    ways = ["gather"] if dropout_p else ["gather", "ring"]
    query, key, _, *mask = call.inputs
    if len(query.shape) < 3:
        return ways
    parts = call.count((*query.layout.dims[-3], *axes))
    rows = mask[0].shape[-2:-1] if mask else ()
    if rows in ((), (1,)) and not any(p.shape[-3] % parts for p in (query, key)):
        ways.append("heads")
    return ways


def moved(call: LocalCall, piece: Any, axes: Axes, heads: bool) -> LocalPiece:
    """Returns ``piece`` with its length whole over ``axes``; with ``heads`` they split its heads
    instead."""
    dims = list(piece.layout.dims)
    if len(dims) > 1:
        dims[-2] = tuple(a for a in dims[-2] if a not in axes)
    if heads and len(dims) > 2 and piece.shape[-3] > 1:
        dims[-3] = (*dims[-3], *axes)
    box = box_at(piece.shape, dims, call.mesh_shape, call.coordinate)
    layout = replace(piece.layout, dims=tuple(dims))
    return LocalPiece(tuple(piece.shape), box, layout, getattr(piece, "dtype", None))


def reshards(call: LocalCall, have: Any, want: Any, axes: Axes) -> Local:
    """Returns a function that reshards a local of the call from one layout to another."""
    if have.layout == want.layout:
        return lambda x: x
    return lambda x: call.collectives.reshard(x, have.shape, have.layout, want.layout, axes)


def gather_keys(call: LocalCall, axes: Axes, whole: Callable[[LocalCall], Local]) -> Local:
    """Returns the function that gathers k and v; their gradients are scattered in the sum."""
    query, *keys = call.inputs
    wanted = [moved(call, p, axes, heads=False) for p in keys[:2]]
    inner = whole(replace(call, inputs=[query, *wanted, *keys[2:]]))
    k, v = (reshards(call, have, want, axes) for have, want in zip(keys, wanted, strict=False))

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        return inner(query, k(key), v(value), *rest, **named)

    return run


def exchange_heads(call: LocalCall, axes: Axes, whole: Callable[[LocalCall], Local]) -> Local:
    """Returns a local function that exchanges to the full sequence of some heads, and back. If the
    axes do not divide the heads of k, these are repeated for the heads of q that share them."""
    query, key = call.inputs[:2]
    shared, parts = key.shape[-3], call.count((*key.layout.dims[-3], *axes))
    each = query.shape[-3] // max(1, shared) if shared and shared % parts else 1

    def repeated(piece: Any) -> Any:
        if each == 1:
            return piece
        shape = (*piece.shape[:-3], shared * each, *piece.shape[-2:])
        box = box_at(shape, piece.layout.dims, call.mesh_shape, call.coordinate)
        return LocalPiece(shape, box, piece.layout, piece.dtype)

    have = [query, *map(repeated, call.inputs[1:3]), *call.inputs[3:]]
    wanted = [moved(call, p, axes, heads=True) for p in have]
    out = moved(call, call.outputs[0], axes, heads=True)
    inner = whole(replace(call, inputs=wanted, outputs=[out]))
    there = [reshards(call, a, b, axes) for a, b in zip(have, wanted, strict=True)]
    back = reshards(call, out, call.outputs[0], axes)

    def run(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if each > 1:
            key, value = key.repeat_interleave(each, -3), value.repeat_interleave(each, -3)
        tensors = [query, key, value] + ([] if attn_mask is None else [attn_mask])
        q, k, v, *mask = (move(x) for move, x in zip(there, tensors, strict=True))
        words = {"scale": scale, "enable_gqa": enable_gqa and each == 1}
        return back(inner(q, k, v, *(mask or (None,)), dropout_p, is_causal, **words))

    return run
