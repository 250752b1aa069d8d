"""A mixture of experts as one call: tokens are sent to the experts that a router chose, and their
results are returned as a weighted sum.

The parameters [experts, ...] may be split by expert. On an axis that splits the tokens too, each
token is sent once to each rank that has some of its experts. One row is sent back: the weighted sum
of their results. On an axis that splits only the parameters, every rank has all tokens and computes
with its experts, and the sum over the ranks is pending.

Before the tokens, each rank sends the choices of its router to all members of the group, in the
smallest integer type. So every rank knows all sizes before it receives rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from disttensor.core.layout import Axes, box_at
from ops.factors import Arg, Factors
from ops.local import LocalCall
from ops.nn.routing import Range, Route, narrow, route, spread, without_data
from ops.registry import rule
from ops.row_exchange import Exchanged, TokenExchange

Experts = Callable[..., Tensor]  # (rows [pairs, d], counts, *parameters) -> [pairs, d]


def run_experts(
    experts: Experts, num_experts: int, tokens: Any, indices: Any, weights: Any, *parameters: Any
) -> Any:
    """Returns [..., d] in the dtype of tokens: the sum over k of weight times the result of expert
    number index for the token. tokens [..., d], indices and weights [..., k], parameters
    [num_experts, ...]."""
    given = tokens, indices, weights, *parameters
    if has_torch_function(given):
        return handle_torch_function(run_experts, given, experts, num_experts, *given)
    if without_data(tokens):  # the graph and the shape of the result only
        return tokens + sum((x.sum() * 0).to(tokens.dtype) for x in (weights, *parameters))
    return _plain(num_experts)(experts, num_experts, *given)


@rule(run_experts, exact=True)
def _(
    experts: Experts, num_experts: int, tokens: Arg, indices: Arg, weights: Arg, *parameters: Arg
) -> Factors:
    """... d, ... k, ... k, e ... -> ... d; an axis may split e and a dim of the tokens"""
    lead = tuple(f".{i}" for i in range(tokens.ndim - 1))
    inputs: list[Any] = [(*lead, "d"), (*lead, "k"), (*lead, "k")]
    whole = {"d", "k"}
    for i, p in enumerate(parameters):
        rest = tuple(f"{i}.{d}" for d in range(1, p.ndim))
        inputs.append(("e", *rest))
        whole.update(rest)
    along = {a for axes in tokens.layout.dims[:-1] for a in axes}
    owns: Axes = max((p.layout.dims[0] for p in parameters), key=len, default=())
    both = tuple(a for a in owns if a in along)
    return Factors(
        tuple(inputs), (inputs[0],), reduced={"e": "sum"}, unsplittable=whole,
        co_split={"e": both} if both else {}, local=partial(_local, num_experts, both),
    )  # fmt: skip


def _plain(num_experts: int) -> Callable[..., Tensor]:
    """Returns the local function of a rank that has all experts."""

    def find(indices: Tensor, k: int) -> Route:
        every = narrow(indices, num_experts).view(1, -1, k)
        return _route(every, [every.shape[1]], 0, [(0, num_experts)])

    return _run(find, None)


def _local(num_experts: int, both: Axes, call: LocalCall) -> Callable[..., Tensor]:
    tokens, params = call.inputs[0], call.inputs[3:]
    along = {a for axes in tokens.layout.dims[:-1] for a in axes}
    if not along.issuperset(both):
        raise RuntimeError(
            "combine_tokens: an axis splits the experts and the tokens, and the indices or weights "
            "along another dim: reshard these as the tokens"
        )
    owns: Axes = params[0].layout.dims[0] if params else ()
    group = tuple(a for a in owns if a in along and call.mesh_shape[a] > 1)
    members = call.members(group)
    me = call.member(group)

    def held(shape: Any, dims: Any, at: Axes) -> Any:
        return box_at(shape, dims, call.mesh_shape, at)

    def range_of(at: Axes) -> Range:
        box = held((num_experts,), (owns,), at)
        return box.offset[0], box.offset[0] + box.shape[0]

    lead = tokens.shape[:-1], tokens.layout.dims[:-1]
    counts = [math.prod(held(*lead, at).shape) for at in members]
    ranges = [range_of(at) for at in members]
    most = max(counts)

    def find(indices: Tensor, k: int) -> Route:
        mine = narrow(indices, num_experts).view(-1, k)
        if group:
            mine = torch.nn.functional.pad(mine, (0, 0, 0, most - counts[me]), value=-1)
        every = call.collectives.all_gather(mine, group)
        return _route(every, counts, me, ranges)

    def send(rows: Tensor, sent: Any, received: Any) -> Tensor:
        return call.collectives.exchange_rows(rows, sent, received, group)

    def choose(indices: Tensor, k: int) -> Route:
        return call.collectives.once(lambda: find(indices, k))

    return _run(choose, send if group else None)


def _route(every: Tensor, counts: list[int], me: int, ranges: list[Range]) -> Route:
    if without_data(every):
        return spread(every, counts, me, ranges)
    return route(every, counts[me], me, ranges)


def _run(find: Callable[[Tensor, int], Route], send: Any) -> Callable[..., Tensor]:
    """Returns the local function. ``send``: None if no token is sent."""

    def run_experts(
        experts: Experts, num_experts: int, tokens: Tensor, indices: Tensor, weights: Tensor,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        shape, k = tokens.shape, indices.shape[-1]
        tokens, weights = tokens.reshape(-1, shape[-1]), weights.reshape(-1, k)
        found = find(indices.detach(), k)
        if send is not None:
            exchange = TokenExchange(send, found.sent, found.received)
            leaving = tokens.index_select(0, found.send), weights.index_select(0, found.send)
            rows, scale = Exchanged.apply(exchange, *leaving)
            at = found.rows
        else:
            rows, scale = tokens, weights
            at = found.rows if found.send.numel() == len(tokens) else found.send[found.rows]
        pairs = experts(rows.index_select(0, at), found.counts, *parameters)
        scale = scale.reshape(-1).index_select(0, at * k + found.slots).unsqueeze(1)
        back = _summed(pairs * scale, at, len(rows), tokens.dtype)
        if send is not None:
            (back,) = Exchanged.apply(exchange.back, back)
            back = _summed(back, found.send, len(tokens), tokens.dtype)
        return back.view(shape)

    return run_experts


def _summed(rows: Tensor, at: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Returns [size, d] of ``dtype``: row i is the sum of the rows that are ``at`` i, in 32 bits at
    least."""
    wide = torch.promote_types(torch.promote_types(rows.dtype, dtype), torch.float32)
    out = rows.new_zeros((size, rows.shape[1]), dtype=wide)
    return out.index_add_(0, at, rows.to(wide)).to(dtype)
