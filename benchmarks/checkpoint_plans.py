"""The plans of a save and a load of Llama 405B with AdamW's state, on one of 4,096 ranks.

    python benchmarks/checkpoint_plans.py

The rank runs in PyTorch's fake process group, on meta tensors. Seconds are of one core; the best of
three counts.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from table import machine, markdown

import disttensor as dt
from disttensor.checkpoint.checkpointer import _digest, _facts
from disttensor.checkpoint.folder import LocalFolder
from disttensor.checkpoint.saved_layout import WritePlan, plan_writes
from disttensor.checkpoint.tensor_file import Reader
from disttensor.core.layout import layout_of
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.torch_private import start_fake_world

WIDTH, HIDDEN, KEYS, VOCAB, LAYERS = 16_384, 53_248, 1_024, 128_256, 126
MATRICES = {
    "wq": (WIDTH, WIDTH, 0), "wk": (KEYS, WIDTH, 0), "wv": (KEYS, WIDTH, 0),
    "wo": (WIDTH, WIDTH, 1), "w1": (HIDDEN, WIDTH, 0), "w3": (HIDDEN, WIDTH, 0),
    "w2": (WIDTH, HIDDEN, 1),
}  # fmt: skip


def state(world: int, tp: int, pp: int) -> dict[str, Any]:
    """Returns the parameters, and the state of those on this rank, by name."""
    ranks = torch.arange(world).reshape(pp, -1, tp)
    stages = [ProcessMesh(of, ("sharding", "tp"), "cpu") for of in ranks]
    out: dict[str, Any] = {}

    def add(name: str, stage: int, shape: tuple[int, ...], dim: int | None) -> None:
        rows = [dt.Shard(0, order=1), dt.Shard(0, order=0)]
        columns = [dt.Shard(0), dt.Shard(1)]
        placements: Any = {0: rows, 1: columns, None: [dt.Shard(0), dt.Replicate()]}[dim]
        mesh = stages[stage]
        local = [1] * len(shape)
        if mesh.coordinate is not None:
            layout = layout_of(placements, len(shape), 2)
            local = [*DistSpec(mesh, layout, shape, torch.float32).local_shape]
        for key in ("", ".exp_avg", ".exp_avg_sq") if mesh.coordinate is not None else ("",):
            piece = torch.empty(local, device="meta")
            out[name + key] = dt.from_local(piece, mesh, placements, shape=shape, run_check=False)

    add("tok.weight", 0, (VOCAB, WIDTH), 0)
    for i in range(LAYERS):
        for name, (rows, columns, dim) in MATRICES.items():
            add(f"layers.{i}.{name}.weight", i * pp // LAYERS, (rows, columns), dim)
        for name in ("norm1", "norm2"):
            add(f"layers.{i}.{name}.weight", i * pp // LAYERS, (WIDTH,), None)
    add("norm.weight", pp - 1, (WIDTH,), None)
    add("head.weight", pp - 1, (VOCAB, WIDTH), 0)
    return out


def best(call: Callable[[], Any]) -> tuple[str, Any]:
    """Returns the seconds of the processor, and the result."""
    times, result = [], None
    for _ in range(3):
        start = time.process_time()
        result = call()
        times.append(time.process_time() - start)
    return f"{min(times):.2f} s", result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=5)
    args = parser.parse_args()
    start_fake_world(args.rank, args.world)
    tensors = state(args.world, 8, 1)
    rows = []
    seconds, plan = best(lambda: plan_writes(tensors, {}))
    assert isinstance(plan, WritePlan)
    loads = plan.nbytes_of_ranks().values()
    rows.append(("save: writers", seconds, f"{min(loads):,} to {max(loads):,} bytes of a rank"))

    def digests() -> dict[str, str]:
        facts = _facts({}, {}, tensors, {}, plan)
        return {_digest(ranks): _digest(of) for ranks, of in facts.items()}

    rows.append(("save: digests", best(digests)[0], ""))
    layouts = {name: tuple(of) for name, of in plan.layouts.items()}
    file = io.BytesIO()
    torch.save(layouts, file)
    seconds, layouts = best(lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    rows.append(("load: layouts", seconds, f"{len(file.getvalue()):,} bytes"))
    for tp, pp in ((8, 1), (4, 1), (8, 16)):
        every = state(args.world, tp, pp)
        mine = {name: x for name, x in every.items() if x.is_initialized}
        seconds, reader = best(lambda: Reader(LocalFolder(Path()), Path(), {}, layouts, mine))
        reads = [read for of in reader.reads.values() for read in of]
        needed = sum(x.spec.local_box.numel * x.spec.dtype.itemsize for x in mine.values())
        got = sum(read.part.numel * read.layout.dtype.itemsize for read in reads)
        assert got == needed
        facts = f"{len(reads):,} pieces of {len(reader.reads)} files, {got:,} bytes"
        rows.append((f"load: on pp {pp} x tp {tp}", seconds, facts))
    print(f"{machine()}\n\n{markdown(('', 'time', ''), rows)}")


if __name__ == "__main__":
    main()
