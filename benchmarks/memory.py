"""What a rank holds and sends under each strategy, measured on four processes and beside the
formula.

    python benchmarks/memory.py --markdown docs/numbers/parallel.md

writes the table into the page, between its two marks; without the option it is printed. The model
is the GPT of examples/, in float32 with AdamW. Figures are those of rank 0 in the third step. It
fails where a figure is off its formula.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from table import machine

import disttensor as dt
from disttensor import pipeline
from disttensor.fsdp.all_gather_buffer import AllGatherBuffer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, GPTConfig, init_weights
from train_gpt import LAYERS, PLAN

Tensor = torch.Tensor
RANKS, BATCH = 4, 16
CONFIG = GPTConfig(vocab=256, layers=4, width=128, heads=4, context=64)
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WRONG: list[str] = []  # figures that are not what their formula says
COLUMNS = {
    "parameters": "parameters", "gradients": "gradients", "state": "optimizer",
    "gathered": "gathered at most",
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce",
    "send": "send",
    "kept": "kept for backward",
}  # fmt: skip
# Of a figure: a number for each parameter, the loss, norms that tensor parallelism leaves whole.
SLACK = 0.02


@dataclass(frozen=True)
class Row:
    """A strategy, and what each figure should be: see ``letters``. Columns without a formula are 0,
    but ``kept``."""

    name: str
    fields: dict[str, Any]
    formulas: dict[str, str] = field(default_factory=dict)


def rows() -> list[Row]:
    zero3 = {"parameters": "M/4", "gradients": "M/4", "state": "2*M/4", "gathered": "2*B"}
    both = {"all_gather": "3/2*M", "reduce_scatter": "3/4*M", "all_reduce": "3/2*E"}
    half = {"parameters": "M/2", "gradients": "M/2", "state": "M", "gathered": "2*B"}
    hybrid = {"all_gather": "K*M", "reduce_scatter": "K*M/2"}
    return [
        Row("dp 4", {"dp": 4, "sharding": 1},
            {"parameters": "M", "gradients": "M", "state": "2*M", "all_reduce": "3/2*M"}),
        Row("sharding 4, stage 1", {"sharding": 4, "zero_stage": 1},
            {"parameters": "M/4+M", "gradients": "M", "state": "2*M/4", "all_gather": "3/4*M",
                "all_reduce": "3/2*M"}),
        Row("sharding 4, stage 2", {"sharding": 4, "zero_stage": 2},
            {"parameters": "M/4+M", "gradients": "M/4", "state": "2*M/4", "all_gather": "3/4*M",
             "reduce_scatter": "3/4*M"}),
        Row("sharding 4, stage 3", {"sharding": 4}, {**zero3, **both}),
        Row("the same, amp bf16", {"sharding": 4, "amp": "bf16"},
            {**zero3, **both, "gathered": "2*B/2", "all_gather": "3/2*M/2",
                "all_reduce": "3/2*E/2"}),
        Row("the same, recompute", {"sharding": 4, "recompute": ["blocks.*"]}, {**zero3, **both}),
        Row("dp 2 x sharding 2", {"dp": 2, "sharding": 2},
            {**half, **hybrid, "all_reduce": "M/2+K*3/2*E"}),
        Row("the same, accumulate 4", {"dp": 2, "sharding": 2, "accumulate_steps": 4},
            {**half, **hybrid, "all_reduce": "M/2+K*3/2*E"}),
        Row("sharding 2 x tp 2", {"sharding": 2, "tp": 2},
            {**half, **hybrid, "all_reduce": "(4*L+2)*A+E"}),
        Row("pp 2 x sharding 2, 4 micro-batches", {"pp": 2, "sharding": 2, "accumulate_steps": 4},
            {**half, **hybrid, "all_reduce": "K*E", "send": "A"}),
    ]  # fmt: skip


def letters(model: Any, strategy: dt.Strategy) -> dict[str, float]:
    """Bytes, in float32: M the parameters of a rank if nothing were sharded; B of them in a block;
    A what goes from block to block, of the rank's part of the batch; E the table of positions. L:
    blocks. K: micro-batches."""
    degrees, K = strategy.degrees(), strategy.accumulate_steps
    here = {name: _unsharded(p) for name, p in model.named_parameters() if p.is_initialized}
    tokens = BATCH * CONFIG.context // (degrees.dp * degrees.sharding)
    return {
        "M": 4 * sum(here.values()),
        "B": 4 * sum(n for name, n in here.items() if name.startswith("blocks.0.")),
        "A": 4 * tokens * CONFIG.width,
        "E": 4 * CONFIG.context * CONFIG.width,
        "L": CONFIG.layers,
        "K": K,
    }


def _unsharded(p: Any) -> int:
    """Elements of the part that tensor parallelism gives a rank."""
    mesh = p.process_mesh
    split = p.placements[mesh.dim_names.index("tp")]
    return p.numel() // (mesh.shape[-1] if isinstance(split, dt.Shard) else 1)


# Measuring ----------------------------------------------------------------------------------------


def measure(row: Row) -> tuple[dict[str, float], dict[str, float]]:
    """(the figures of this rank, the letters of the formulas)"""
    dt.manual_seed(0)
    segments = ("tok", "pos", "blocks.*", "norm", "head")
    strategy = dt.Strategy(segments=segments, **row.fields)
    stages = strategy.stages()
    with torch.device("meta"):
        model = GPT(CONFIG)
    strategy.apply(model, plan=PLAN, layers=LAYERS)
    init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(
        256, (2, BATCH, CONFIG.context), generator=torch.Generator().manual_seed(0)
    )
    parts = list(zip(*(half.chunk(strategy.accumulate_steps) for half in data), strict=True))

    def share_of_loss(batch: Any) -> Tensor:
        inputs = dt.shard_tensor(batch[0], stages[0], strategy.batch())
        targets = dt.shard_tensor(batch[1], stages[-1], strategy.batch())
        with strategy.autocast():
            logits = model(inputs).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(parts)

    def backward() -> None:
        if len(stages) > 1:
            pipeline.run(share_of_loss, parts, stages=stages)
            return
        for i, part in enumerate(parts):
            with strategy.accumulate(model, i):
                share_of_loss(part).backward()

    cut = model.__dict__["_data_parallel"].segments
    buffers = [b for s in cut for b in s.buffers]
    always = sum(b.nbytes for s in cut for b in s.buffers if s.persist)
    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    figures: dict[str, float] = {}
    with dt.debugging.record_comms() as comms, peak(buffers) as most:
        backward()
        figures["gradients"] = held(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    state = [v for of in optimizer.state.values() for v in of.values() if torch.is_tensor(v)]
    figures |= {"parameters": held(model.parameters()) + always, "state": held(state)}
    figures["gathered"] = 0 if always else max(most, default=0)
    own = [p.to_local() for p in model.parameters() if p.is_initialized]
    own += [b.memory for b in buffers]
    figures["kept"] = kept(share_of_loss, parts[0], own)
    sent: Counter[str] = Counter()
    for record in comms:
        sent[record.kind] += record.bytes
    unknown = sent.keys() - COLUMNS.keys()
    assert not unknown, unknown
    return {**dict.fromkeys(COLUMNS, 0), **figures, **sent}, letters(model, strategy)


def held(tensors: Iterable[Any]) -> int:
    """Bytes of the memory behind these tensors on this rank, each once."""
    memory = {}
    for t in tensors:
        if t is None or (isinstance(t, dt.DistTensor) and not t.is_initialized):
            continue
        local = t.to_local() if isinstance(t, dt.DistTensor) else t
        storage = local.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values())


@contextmanager
def peak(buffers: list[AllGatherBuffer]) -> Iterator[list[int]]:
    """Bytes of gathered parameters, each time that some have come or gone."""
    seen: list[int] = []
    originals = {name: getattr(AllGatherBuffer, name) for name in ("start", "finish", "free")}

    def looking(original: Any) -> Any:
        def run(self: AllGatherBuffer) -> None:
            original(self)
            arriving = sum(b._arriving[1].nbytes for b in buffers if b._arriving)
            here = [b.nbytes for b in buffers if b.memory.untyped_storage().nbytes()]
            seen.append(arriving + sum(here))

        return run

    for name, original in originals.items():
        setattr(AllGatherBuffer, name, looking(original))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(AllGatherBuffer, name, original)


def kept(program: Any, batch: Any, parameters: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps of one forward, without parameters."""
    own = {p.untyped_storage()._cdata for p in parameters}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        program(batch)
    return sum(found.values())


# Showing ------------------------------------------------------------------------------------------


def cells(row: Row, figures: dict[str, float], known: dict[str, float]) -> list[str]:
    """``0.81 (M/4)``: megabytes, and their formula. Raises where they differ."""
    out = [row.name]
    for column in COLUMNS:
        value, formula = figures[column], row.formulas.get(column, "0")
        if column == "kept":
            out.append(f"{value / 1e6:.2f}")
            continue
        want = eval(formula, {}, known)
        if abs(value - want) > SLACK * max(want, known["M"] / 4):
            wrong = f"{row.name}: {column}: measured {value:,.0f}, {formula} is {want:,.0f}"
            WRONG.append(wrong)
        shown = formula.replace("*", " ")
        out.append("-" if formula == "0" else f"{value / 1e6:.2f} ({shown})")
    return out


def table(lines: list[list[str]]) -> str:
    lines = [["MB (formula)", *COLUMNS.values()], *lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def text(line: list[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join([line[0].ljust(widths[0]), *rest]) + " |"

    return "\n".join([text(lines[0]), text(rule), *map(text, lines[1:])])


def run(rank: int, port: int, only: str, markdown: str | None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    lines = []
    for row in rows():
        if only in row.name:
            figures, known = measure(row)
            gc.collect()
            lines.append(cells(row, figures, known) if rank == 0 else [])
    if rank == 0:
        print(f"{machine()}\n\n{table(lines)}")
        if WRONG:
            raise SystemExit("\n".join(WRONG))
        if markdown:
            page = Path(markdown).read_text()
            before, _, rest = page.partition(BEGIN)
            after = rest.partition(END)[2]
            whole = f"{table(lines)}\n\nOn torch {torch.__version__}."
            Path(markdown).write_text(f"{before}{BEGIN}\n{whole}\n{END}{after}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--markdown", metavar="FILE", help="write the table into this page")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (port, args.only, args.markdown), nprocs=RANKS)


if __name__ == "__main__":
    main()
