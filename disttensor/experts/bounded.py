"""A mixture of experts with a bound on the tokens of each expert: all sizes are known in advance,
and none is read on the host. It is made of ordinary functions of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from disttensor.api.local_map import local_map
from disttensor.core.placement import Placement, Replicate, Shard
from disttensor.tensor.dist_tensor import DistTensor

Experts = Callable[..., Any]  # (rows [n, d], counts, *parameters) -> [n, d]


def run_bounded(
    experts: Experts, num_experts: int, capacity: int, tokens: Any, indices: Any, weights: Any,
    parameters: Sequence[Any],
) -> Any:  # fmt: skip
    """Returns what ``run_experts`` returns, in the layout of the tokens. An expert gets its first
    ``capacity`` tokens, in the order of the whole batch, and rows of zeros after them."""
    size, chosen = num_experts * capacity, indices.flatten().long()
    choices = chosen.unsqueeze(-1) == torch.arange(num_experts, device=chosen.device)
    place = (choices.long().cumsum(0) * choices).sum(-1) - 1  # among the tokens of the expert
    kept = (place >= 0) & (place < capacity)
    slots = torch.where(kept, chosen * capacity + place, size)
    rows = tokens.flatten(0, -2).repeat_interleave(indices.shape[-1], 0)
    sent = rows.new_zeros(size + 1, rows.shape[-1]).index_add(0, slots, rows)[:-1]
    out = _apply(experts, sent.unflatten(0, (num_experts, capacity)), parameters, tokens)
    back = F.embedding(slots.clamp(max=size - 1), out.flatten(0, 1))
    scale = weights.flatten().masked_fill(~kept, 0.0).unsqueeze(-1)
    back = back.masked_fill(~kept.unsqueeze(-1), 0.0) * scale
    summed = back.unflatten(0, indices.shape).sum(-2).to(tokens.dtype)
    if isinstance(tokens, DistTensor):
        summed = summed.redistribute(tokens.device_mesh, tokens.placements)
    return summed


def _apply(experts: Experts, rows: Any, parameters: Sequence[Any], tokens: Any) -> Any:
    """Returns [experts, capacity, d] for rows of the same shape. Where an axis splits the tokens
    and not the experts, it splits the capacity."""

    def run(rows: Any, *own: Any) -> Any:
        return experts(rows.flatten(0, 1), [rows.shape[1]] * len(rows), *own).view(rows.shape)

    if not isinstance(rows, DistTensor):
        return run(rows, *parameters)
    split: list[Placement] = []
    for axis in range(rows.device_mesh.ndim):
        if any(isinstance(p, DistTensor) and p.placements[axis] == Shard(0) for p in parameters):
            split.append(Shard(0))
        elif isinstance(tokens, DistTensor) and tokens.placements[axis].is_shard():
            split.append(Shard(1))
        else:
            split.append(Replicate())
    of_parameters = [p if p == Shard(0) else Replicate() for p in split]
    placements = [split, *[of_parameters] * len(parameters)]
    call = local_map(run, in_placements=placements, out_placements=split, out_shapes=rows.shape)
    return call(rows, *parameters)
