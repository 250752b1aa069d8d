"""Metrics of other libraries, which add up over ranks where there is a process group: told that
there is nothing to add up, they have the value of one process, whatever they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from tests.support.layouts import S0, P, R, everywhere, grid
from tests.support.oracle import randn


class Mean:
    """What torchmetrics.Metric does: states that ``update`` adds to, gathered by ``compute``."""

    def __init__(
        self, sync_on_compute: bool = True, distributed_available_fn: Any = dist.is_initialized,
        process_group: Any = None,
    ) -> None:  # fmt: skip
        self.states = {"total": torch.zeros((), dtype=torch.float64), "count": torch.tensor(0)}
        self.sync = sync_on_compute
        self.available, self.group = distributed_available_fn, process_group

    def update(self, x: Any) -> None:
        self.states["total"] = self.states["total"] + x.sum()
        self.states["count"] = self.states["count"] + x.numel()

    def compute(self) -> tuple[float, float]:
        states = {k: dt.broadcast_value(v) for k, v in self.states.items()}
        if self.sync and self.available():
            for name, value in states.items():
                found = [torch.zeros_like(value) for _ in range(dist.get_world_size(self.group))]
                dist.all_gather(found, value.detach().contiguous(), group=self.group)
                states[name] = torch.stack(found).sum()
        return states["total"].item(), states["count"].item()


@everywhere
def test_a_metric_that_does_not_sync_has_the_value_of_one_process():
    mesh, batches = grid(), [randn(5, 3, seed=i) for i in range(2)]
    want = sum(x.sum() for x in batches).item(), 30.0
    layouts = ([S0, R], [R, S0], [S0, S0], [R, R], [P, S0])
    for options in ({"sync_on_compute": False}, {"distributed_available_fn": lambda: False}):
        for layout in (*layouts, None):
            metric = Mean(**options)
            for x in batches:
                whole = dt.shard_tensor(x, mesh)
                metric.update(x if layout is None else dt.reshard(whole, mesh, layout))
            assert metric.compute() == pytest.approx(want)


@everywhere
def test_a_metric_of_pieces_syncs_over_the_axis_that_splits_them():
    mesh, full = grid(), randn(5, 3)
    for axis, layout in ((0, [S0, R]), (1, [R, S0])):
        group = mesh.group((axis,))
        metric = Mean(process_group=group.pg, distributed_available_fn=lambda g=group: g.size > 1)
        metric.update(dt.shard_tensor(full, mesh, layout).to_local())
        assert metric.compute() == pytest.approx((full.sum().item(), 15.0))


@everywhere
def test_a_metric_that_syncs_counts_a_global_value_once_for_each_rank():
    """What the page warns of."""
    if dist.is_initialized():
        metric = Mean()
        metric.update(dt.shard_tensor(randn(5, 3), grid(), [S0, R]))
        assert metric.compute()[1] == 15.0 * dist.get_world_size()
