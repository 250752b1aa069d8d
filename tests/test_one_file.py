"""A new op, reshard, schedule or segment policy is one file: each of these runs as it stands, and
touches nothing of the packages. The pages show the same: docs/rules.md, reshard.md, pipeline.md and
parallel.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import torch
import disttensor as dt
from disttensor import Partial, Replicate, Shard
mesh = dt.init_mesh((1, 1), ("dp", "tp"))
"""

OP = """
import ops
ops.rule(torch.embedding, "v d, ... -> ... d", unsplittable={"v"})
table = dt.ones(7, 3, mesh=mesh)
rows = dt.zeros(4, mesh=mesh, placements=[Shard(0), Replicate()], dtype=torch.int64)
with dt.debugging.strict():
    assert torch.embedding(table, rows).placements == rows.placements
"""

RESHARD = """
from dataclasses import dataclass
import reshard
@dataclass(frozen=True)
class Reversed(Shard):
    "Rank i of n holds piece n - 1 - i."
@reshard.register(Replicate, Reversed, kind="slice")
def pick(x, src, dst, axes):
    n = src.mesh.shape[axes[0]]
    return x.chunk(n)[n - 1 - src.mesh.coordinate[axes[0]]]
x = dt.reshard(dt.ones(4, mesh=mesh), mesh, [Reversed(0), Replicate()])
assert x.placements[0] == Reversed(0)
"""

SCHEDULE = """
from disttensor import pipeline
def one_after_the_other(stages, micro_batches, chunks=1):
    order = " ".join(f"F{m} B{m}" for m in range(micro_batches))
    return pipeline.Schedule([order] * stages)
w = dt.ones(3, mesh=mesh, requires_grad=True)
def step(x):
    loss = (w * x).sum()
    loss.backward()
    return loss
made = pipeline.named(one_after_the_other, 2, 3)
assert str(made) == str(pipeline.Schedule(["F0 B0 F1 B1 F2 B2"] * 2))
"""

POLICY = """
from disttensor.fsdp.segment_policy import SegmentPolicy, one_each
class EachLinear(SegmentPolicy):
    def assign(self, nodes):
        one_each(nodes, [n for n in nodes if isinstance(n.module, torch.nn.Linear)])
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
dt.shard_module(net, mesh, {})
dt.shard_data_parallel(net, shard_axis="dp", segments=EachLinear())
net(dt.ones(2, 4, mesh=mesh)).sum().backward()
assert net[0].weight.grad is not None
"""


@pytest.mark.parametrize(
    "text", [OP, RESHARD, SCHEDULE, POLICY], ids=["op", "reshard", "schedule", "segment policy"]
)
def test_a_new_one_is_one_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(HEAD + text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "new.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
