"""A model with what is needed to try it: its batch, its loss and a plan; and the comparison with
one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import disttensor as dt

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """``plan``: name of a parameter (a glob) -> the dim that tensor parallelism splits."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    plan: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 1e-9  # float64; more where the model computes in float32 by itself
    training: bool = True
    batch_dim: int = 0
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return self.name

    def model(self) -> nn.Module:
        """The same on every rank."""
        torch.manual_seed(3)
        model = self.build().to(self.dtype).train(self.training)
        with torch.no_grad():
            for parameter in model.parameters():  # no weight is 0, none is 1
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model


def weighted(out: torch.Tensor) -> torch.Tensor:
    """A loss in which every element of ``out`` counts differently."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return (out * weights).sum()


def placements(dim: int | None, mesh: dt.ProcessMesh, axis: str) -> list[dt.Placement]:
    """Split ``dim`` over ``axis`` of the mesh."""
    return [
        dt.Shard(dim) if name == axis and dim is not None else dt.Replicate()
        for name in mesh.dim_names
    ]


def check(
    case: Case,
    mesh: dt.ProcessMesh,
    plan: Mapping[Any, Any] | None = None,
    stage: int | None = None,
) -> dt.debugging.CommLog:
    """Loss and gradients on ``mesh`` (axes named dp, tp) are those of one process. ``stage``: with
    state in shards over dp.

    Returns what was communicated in forward and backward.
    """
    plain, model, batch = case.model(), case.model(), case.batch()
    want = case.loss(plain, batch)
    want.backward()
    if plan is None and "tp" in mesh.dim_names:
        plan = {name: placements(dim, mesh, "tp") for name, dim in case.plan.items()}
    dt.shard_module(model, mesh, plan)
    if stage is not None:
        small = dt.fsdp.SegmentBySize(0.02)  # several of them
        dt.shard_data_parallel(model, shard_axis="dp", stage=stage, segments=small)
    split = {
        key: dt.shard_tensor(value, mesh, placements(case.batch_dim, mesh, "dp"))
        for key, value in batch.items()
    }
    with dt.debugging.record_comms() as log:
        loss = case.loss(model, split)
        assert isinstance(loss, dt.DistTensor)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), want, rtol=case.tolerance, atol=case.tolerance)
    differ = []
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        if theirs.grad is None:
            assert mine.grad is None or not mine.grad.full_tensor().any(), name
            continue
        assert mine.grad is not None, name
        try:
            torch.testing.assert_close(
                mine.grad.full_tensor(), theirs.grad, rtol=10 * case.tolerance, atol=case.tolerance
            )
        except AssertionError as error:
            differ.append(f"{name} {mine!r:.80}: {error}")
    assert not differ, "\n".join(differ)
    return log
