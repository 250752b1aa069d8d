"""A mixture of experts split by expert over the axis of its tokens, forward and backward:
``dispatch_tokens`` beside a layer written by hand with ``all_to_all_single``.

    python benchmarks/experts.py                               # 2 and 4 ranks
    python benchmarks/experts.py --ranks 2 --tokens 4096       # one line
    python benchmarks/experts.py --check                       # small; are both sides exact?
    python benchmarks/experts.py --markdown docs/experts.md

Processes over gloo with one thread each. Both sides have the same router's choice, compute their
experts by the same function, run in the same processes and take turns, so that noise hits them
alike; of each side the best step counts, and of a step the slowest rank.

The one by hand sends a row for each token and expert, as most layers do: first how many, then the
rows sorted by expert.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from replicas import on_ranks
from table import machine, write_between
from torch import Tensor

import disttensor as dt

MARKS = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS, BY_HAND = "dispatch_tokens", "by hand"
Step = Callable[[], list[Tensor]]


def mlp(rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
    each = zip(rows.split(counts), up.unbind(), down.unbind(), strict=True)
    return torch.cat([F.silu(r @ u) @ d for r, u, d in each])


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, received = ctx.sizes
        return AllToAll.apply(grad, received, sent), None, None


def by_hand(x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [t, d], indices and weights [t, k] of this rank; up and down of its experts."""
    n, k, own = dist.get_world_size(), indices.shape[1], len(up)
    chosen = indices.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=n * own)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    sent, received = (c.view(n, own).sum(1).tolist() for c in (counts, coming))
    rows = AllToAll.apply(x.index_select(0, order // k), sent, received)
    expert = torch.arange(own).repeat(n).repeat_interleave(coming)
    by_expert = expert.argsort(stable=True)
    out = mlp(rows.index_select(0, by_expert), coming.view(n, own).sum(0).tolist(), up, down)
    back = AllToAll.apply(out.index_select(0, by_expert.argsort()), received, sent)
    pairs = back.index_select(0, order.argsort()).view(len(x), k, -1)
    return (pairs * weights.unsqueeze(-1)).sum(1)


def sides(full: list[Tensor], mesh: dt.ProcessMesh) -> dict[str, Step]:
    """Name -> one forward and backward, which gives the result and gradients of this rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    split = [dt.shard_tensor(t, mesh, [dt.Shard(0)]) for t in full]
    pieces = [t.chunk(n)[rank].contiguous() for t in full]

    def step_of(run: Callable[..., Any], tensors: list[Any]) -> Step:
        *given, seed = tensors
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in given]

        def step() -> list[Tensor]:
            for x in leaves:
                x.grad = None
            out = run(*leaves)
            out.backward(seed)
            results = [out.detach(), *(x.grad for x in leaves if x.requires_grad)]
            return [x.to_local() if isinstance(x, dt.DistTensor) else x for x in results]

        return step

    def ours(x: Any, indices: Any, weights: Any, up: Any, down: Any) -> Any:
        sent = dt.experts.dispatch_tokens(x, indices, up.shape[0]).apply(mlp, up, down)
        return dt.experts.combine_tokens(sent, weights)

    return {OURS: step_of(ours, split), BY_HAND: step_of(by_hand, pieces)}


def rank_main(rank: int, n: int, port: int, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(n), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", rank=rank, world_size=n)
    mesh = dt.init_mesh((n,), ("ep",))
    for tokens in args.tokens:
        torch.manual_seed(0)
        scores = torch.randn(tokens, args.experts)
        weights, indices = scores.softmax(-1).topk(args.choices)
        up = torch.randn(args.experts, args.width, args.hidden) / args.width**0.5
        down = torch.randn(args.experts, args.hidden, args.width) / args.hidden**0.5
        x, seed = torch.randn(2, tokens, args.width).unbind()
        steps = sides([x, indices, weights, up, down, seed], mesh)
        if args.check:
            for one, other in zip(*(step() for step in steps.values()), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            results[n, tokens] = {}
            continue
        best, sent = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, 0)
        with dt.debugging.record_comms() as log:
            steps[OURS]()
        sent[OURS] = log.total_bytes
        away = indices.chunk(n)[rank] // (args.experts // n) != rank
        sent[BY_HAND] = int(away.sum()) * args.width * 4 * 4  # there and back, twice
        for _ in range(args.repeats):
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                took = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                best[name] = min(best[name], took.item())
        if rank == 0:
            results[n, tokens] = {name: (best[name], sent[name]) for name in steps}
    dist.barrier()
    dist.destroy_process_group()


def table(results: dict[tuple[int, int], dict[str, tuple[float, int]]]) -> str:
    names = OURS, BY_HAND
    head = " | ".join(("| ranks, tokens", *names, "ratio |"))
    lines = [head, "| --- | ---: | ---: | ---: |"]
    for (n, tokens), found in sorted(results.items()):
        cells = [f"{found[x][0] * 1e3:.1f} ms, {found[x][1] / 1e6:.1f} MB" for x in names]
        ratio = found[OURS][0] / found[BY_HAND][0]
        lines.append(f"| {n}, {tokens:,} | " + " | ".join(cells) + f" | {ratio:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--choices", type=int, default=2, help="experts of a token")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="compare values, of 64 tokens")
    parser.add_argument(
        "--markdown", metavar="FILE", help="write the table between its marks there"
    )
    args = parser.parse_args()
    if args.check:
        args.tokens = [64]
    found = on_ranks(args.ranks, rank_main, args)
    if args.check:
        print(f"both sides agree on {args.ranks} ranks")
        return
    size = (
        f"{args.experts} experts of {args.width} x {args.hidden}, {args.choices} for each token, "
        f"float32, forward and backward; {machine()}"
    )
    text = f"{table(found)}\n\n{fill(f'{size}.', 100)}"
    print(text)
    if args.markdown:
        write_between(MARKS, Path(args.markdown), text)


if __name__ == "__main__":
    main()
