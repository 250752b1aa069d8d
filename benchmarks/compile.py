"""torch.compile beside eager: a model of DistTensors, whose graphs break at every call, and code of
plain locals inside ``local_map``, which compiles whole.

    python benchmarks/compile.py
    python benchmarks/compile.py --markdown docs/performance.md  # and write the section

One process, rank 0 of a world of one. It needs a C++ compiler, for inductor.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from table import CHECKPOINTS, machine, markdown
from timing import FULL, best_times
from torch import Tensor, nn
from torch._dynamo.utils import counters

import disttensor as dt

BEGIN = "## torch.compile\n"
BACKENDS = ("eager", "inductor")
S0, R = dt.Shard(0), dt.Replicate()


class Row(NamedTuple):
    """eager and compiled: CPU seconds of a forward and a backward. first: seconds of the first
    call. graphs, broken: how many Dynamo made, and where it had to stop."""

    name: str
    backend: str
    eager: float
    compiled: float
    first: float
    graphs: int
    broken: int

    def cells(self) -> list[str]:
        ratio = f"{self.compiled / self.eager:.2f}x"
        return [
            self.name, self.backend, f"{self.eager * 1e3:.2f} ms", f"{self.compiled * 1e3:.2f} ms",
            ratio, f"{self.first:.1f} s", str(self.graphs), str(self.broken),
        ]  # fmt: skip


COLUMNS = ("", "backend", "eager", "compiled", "ratio", "first call", "graphs", "breaks")


class Block(nn.Module):
    """[n, 64] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """[n, d], [n, d], [n, d] -> [n, d]: nothing but memory traffic, which inductor fuses."""
    h = F.silu(gate) * up
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) + x).tanh()


def rows() -> list[Row]:
    torch.manual_seed(0)
    mesh = dt.init_mesh((1,), ("dp",))
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    ours = dt.shard_module(nn.Sequential(*(Block() for _ in range(4))), mesh, {})
    x = torch.randn(64, 64)
    pieces = [torch.randn(512, 512, requires_grad=True) for _ in range(3)]
    tensors = [dt.shard_tensor(t.detach(), mesh, [S0]).requires_grad_() for t in pieces]

    def mapped(fn: Any) -> Any:
        return dt.local_map(fn, in_placements=[[S0]] * 3, out_placements=[S0])

    out = []
    for backend in BACKENDS:

        def compiled(fn: Any, backend: str = backend) -> Any:
            return torch.compile(fn, backend=backend)

        out += [
            _row("plain model", backend, blocks, compiled(blocks), [x]),
            _row("model of DistTensors", backend, ours, compiled(ours),
                 [dt.shard_tensor(x, mesh, [S0])]),
            _row("plain function", backend, swiglu, compiled(swiglu), pieces),
            _row("the same in local_map", backend, mapped(swiglu), mapped(compiled(swiglu)),
                 tensors),
        ]  # fmt: skip
    return out


def _row(
    name: str, backend: str, eager: Callable[..., Any], compiled: Callable[..., Any], inputs: Any
) -> Row:
    def step(fn: Callable[..., Any]) -> None:
        fn(*inputs).square().mean().backward()
        for t in inputs:
            t.grad = None

    torch._dynamo.reset()
    counters.clear()
    start = time.monotonic()
    step(compiled)
    first = time.monotonic() - start
    graphs, broken = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    best = best_times({"eager": lambda: step(eager), "it": lambda: step(compiled)}, FULL)
    return Row(name, backend, best["eager"], best["it"], first, graphs, broken)


def text(found: list[Row]) -> str:
    return f"""
CPU time of a forward and a backward, compiled and eager. A call on a DistTensor breaks the graph,
and frames of disttensor are not compiled, so a model of DistTensors runs as it does eagerly. Code
between its calls, on regular tensors, and the local code of `local_map` are compiled.

{markdown(COLUMNS, [row.cells() for row in found], texts=(0, 1))}

- {machine()}.
- Command: `python benchmarks/compile.py --markdown docs/performance.md`.
- *graphs*: made by Dynamo in the first call. *breaks*: places where it returned to Python.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", type=Path, help="the page whose section is written")
    page = parser.parse_args().markdown
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    written = text(rows())
    print(written)
    if page is not None:
        before, _, rest = page.read_text(encoding="utf-8").partition(CHECKPOINTS)
        before = before.partition(BEGIN)[0]
        page.write_text(f"{before}{BEGIN}{written}\n{CHECKPOINTS}{rest}", encoding="utf-8")


if __name__ == "__main__":
    main()
