"""Draws docs/experts.svg: which tokens went from rank to rank in a run on four ranks, and to which
experts.

    python docs/experts.py
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import disttensor as dt  # noqa: E402
from disttensor.comm import collectives  # noqa: E402

FILE = ROOT / "docs" / "experts.svg"
RANKS, TOKENS, EXPERTS, WIDTH = 4, 1000, 16, 8
COLORS = ("#3066a6", "#c65d10", "#3b8743", "#8a5aa8")
SIDE, LEFT, TOP, BARS = 62, 110, 84, 480


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Any, scores: Any) -> Any:
        weights, chosen = scores.softmax(-1).topk(2)
        self.sent = dt.experts.dispatch_tokens(x, chosen, EXPERTS).apply(product, self.weight)
        return dt.experts.combine_tokens(self.sent, weights)


def product(rows: torch.Tensor, counts: list[int], weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([r @ w for r, w in zip(rows.split(counts), weight, strict=True)])


def on_rank(rank: int, port: int, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    mesh = dt.init_mesh((RANKS,), ("ep",))
    torch.manual_seed(0)
    model = Mixture()
    dt.shard_module(model, mesh, dt.plans.experts(model, "ep", mesh))
    x, scores = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, EXPERTS) + torch.randn(EXPERTS) / 2
    exchanges: list[list[int]] = []
    exchange = collectives.all_to_all_rows

    def noted(rows: Any, sent: Any, received: Any, group: Any) -> Any:
        exchanges.append(list(sent))
        return exchange(rows, sent, received, group)

    collectives.all_to_all_rows = noted
    model(*(dt.shard_tensor(t, mesh, [dt.Shard(0)]) for t in (x, scores)))
    (load,) = dt.experts.expert_load(model)
    found[rank] = exchanges[0], load.experts
    dist.barrier()
    dist.destroy_process_group()


def run() -> tuple[list[list[int]], tuple[int, ...]]:
    """The tokens that went from rank to rank, and to each expert."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ["PYTHONHASHSEED"] = "0"
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(on_rank, (port, found), nprocs=RANKS)
        return [found[i][0] for i in range(RANKS)], found[0][1]


def label(x: float, y: float, text: object, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{text}</text>'


def picture(sent: list[list[int]], experts: tuple[int, ...]) -> str:
    width, height = BARS + 330, TOP + RANKS * SIDE + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        label(20, 28, "tokens from rank to rank", "start", ' font-size="15"'),
        label(BARS, 28, "tokens of each expert", "start", ' font-size="15"'),
    ]
    most = max(map(max, sent))
    for i, row in enumerate(sent):
        y = TOP + i * SIDE
        out.append(label(LEFT - 10, y + SIDE / 2 + 4, f"from rank {i}", "end"))
        out.append(label(LEFT + (i + 0.5) * SIDE, TOP - 10, f"to {i}"))
        for j, count in enumerate(row):
            x, strength = LEFT + j * SIDE, 0.25 + 0.6 * count / most
            color = "#eee" if i == j else COLORS[j]
            out.append(
                f'<rect x="{x}" y="{y}" width="{SIDE - 3}" height="{SIDE - 3}" fill="{color}" '
                f'fill-opacity="{strength:.2f}"/>'
            )
            out.append(label(x + SIDE / 2 - 1, y + SIDE / 2 + 4, count))
    out.append(label(LEFT, TOP + RANKS * SIDE + 20, "grey: stay where they are", "start"))
    step, longest = RANKS * SIDE / EXPERTS, max(experts)
    for e, count in enumerate(experts):
        y, length = TOP + e * step, 230 * count / longest
        color = COLORS[e * RANKS // EXPERTS]
        out.append(label(BARS + 18, y + 11, e, "end"))
        out.append(
            f'<rect x="{BARS + 26}" y="{y:g}" width="{length:.1f}" height="{step - 3:g}" '
            f'fill="{color}"/>'
        )
        out.append(label(BARS + 32 + length, y + 11, count, "start"))
    for j in range(RANKS):
        mine = sum(experts[e] for e in range(EXPERTS) if e * RANKS // EXPERTS == j)
        said = f"rank {j}: {mine}"
        x = BARS + 20 + 78 * j
        out.append(label(x, TOP + RANKS * SIDE + 20, said, "start", f' fill="{COLORS[j]}"'))
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture(*run()))
