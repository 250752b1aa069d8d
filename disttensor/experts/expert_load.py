"""expert_load: how evenly the tokens of the last forward were distributed to experts, and to the
ranks that have these experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from disttensor.checks import check_type
from disttensor.comm import objects
from disttensor.core.layout import Layout, box_at
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Replicate
from disttensor.core.spec import DistSpec
from disttensor.experts.dispatch_tokens import DispatchedTokens
from disttensor.experts.expert_modules import ExpertsForward
from disttensor.tensor.dist_tensor import DistTensor, wrap


class LayerLoad(NamedTuple):
    """``experts[i]``: the number of tokens that chose expert i, also those that its capacity drops.
    ``parts[j]``: of all experts of the j-th
    part, as the mesh splits them; one part if it does not. ``busiest``: the largest part over the
    mean, which is 1.0 if the load is even."""

    name: str
    experts: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def busiest(self) -> float:
        return max(self.parts) * len(self.parts) / max(1, sum(self.parts))


class ExpertLoad(tuple[LayerLoad, ...]):
    """A LayerLoad for each mixture that has run, in the order of the model's modules. Prints as a
    table."""

    def __str__(self) -> str:
        head = ("mixture", "tokens of each expert", "of each part", "busiest / mean")
        rows = [head] + [
            (layer.name, " ".join(map(str, layer.experts)), " ".join(map(str, layer.parts)),
             f"{layer.busiest:.2f}")
            for layer in self
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]])
            for row in rows
        )


def expert_load(model: nn.Module) -> ExpertLoad:
    """Counts the tokens of the last forward that each expert of each mixture in ``model`` received
    from all ranks. All ranks of the world make the call.

    It finds experts of transformers that ``shard_module`` has converted, and ``DispatchedTokens``
    that are attributes of modules. With several micro-batches it counts the last one that ran.

    >>> class Mixture(torch.nn.Module):
    ...     def forward(self, x, indices, weights):
    ...         self.sent = dt.experts.dispatch_tokens(x, indices, 3)
    ...         return dt.experts.combine_tokens(self.sent, weights)
    >>> model = Mixture()
    >>> y = model(torch.ones(4, 2), torch.tensor([[0], [2], [2], [2]]), torch.ones(4, 1))
    >>> print(dt.experts.expert_load(model))
    mixture  tokens of each expert  of each part  busiest / mean
    Mixture  1 0 3                  4             1.00
    """
    check_type("expert_load: model", model, nn.Module, "a module")
    found = []
    for name, sent, mesh in _mixtures(model):
        if mesh is not None and mesh.coordinate is None:
            counts = objects.recv_object(mesh.root.ranks, mesh.device)
        else:
            counts = _counted(sent)
            if mesh is not None and objects.other_ranks(mesh.root.ranks):
                objects.send_object(counts, mesh.root.ranks, mesh.device)
        if counts is not None:
            found.append(LayerLoad(name or type(model).__name__, *counts))
    return ExpertLoad(found)


def _mixtures(
    model: nn.Module,
) -> Iterator[tuple[str, DispatchedTokens | None, ProcessMesh | None]]:
    """Returns (name, last dispatched tokens, mesh), the same on all ranks."""
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        forward = getattr(forward, "inner", None) or forward  # of a module that is recomputed
        if isinstance(forward, ExpertsForward):
            first = next(module.parameters())
            mesh = first.spec.mesh if isinstance(first, DistTensor) else None
            yield name, forward.dispatched, mesh
        for value in module.__dict__.values():
            if isinstance(value, DispatchedTokens):
                mesh = value.indices.spec.mesh if isinstance(value.indices, DistTensor) else None
                if mesh is None and value.owner is not None:
                    mesh = value.owner.mesh
                yield name, value, mesh


def _counted(sent: DispatchedTokens | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if sent is None or sent.tokens is not None:
        return None
    experts, indices = sent.num_experts, sent.indices
    if isinstance(indices, DistTensor):
        whole = [Replicate() if p.is_partial() else p for p in indices.placements]
        indices = indices.redistribute(placements=whole)
    local: Any = indices.local if isinstance(indices, DistTensor) else indices
    local = local.flatten().long()
    counts = torch.bincount(local[(local >= 0) & (local < experts)], minlength=experts)
    if isinstance(indices, DistTensor):
        spec = indices.spec
        pending = tuple((a, "sum") for a in sorted(spec.layout.varies()))
        counted = DistSpec(spec.mesh, Layout(((),), pending), (experts,), torch.int64)
        counts = wrap(counts, counted).full_tensor()
    each: list[int] = counts.tolist()
    parts = [sum(each[start:stop]) for start, stop in _ranges(sent.owner, experts)]
    return tuple(each), tuple(parts)


def _ranges(owner: DistSpec | None, experts: int) -> list[tuple[int, int]]:
    """Returns the range of experts of each part."""
    if owner is None or not owner.layout.dims[0]:
        return [(0, experts)]
    axes, mesh = owner.layout.dims[0], owner.mesh
    members = mesh.members(axes, (0,) * mesh.ndim)
    boxes = [box_at((experts,), (axes,), mesh.shape, at) for at in members]
    return [(box.offset[0], box.offset[0] + box.shape[0]) for box in boxes]
