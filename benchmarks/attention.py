"""Causal attention over a split sequence, forward and backward: each policy of disttensor beside
torch's context parallelism and a ring written by hand.

    python benchmarks/attention.py                               # 2 and 4 ranks, 4k to 32k tokens
    python benchmarks/attention.py --ranks 2 --tokens 4096       # one line
    python benchmarks/attention.py --check                       # small; are all sides exact?
    python benchmarks/attention.py --markdown docs/long_context.md

Processes over gloo with one thread each. All sides run in the same processes and take turns, so
that noise hits them alike; of every side the best step counts, and of a step the slowest rank.

torch's ``context_parallel`` has no kernel for CPU, so what is called is the ring that it runs on
CUDA (``_templated_ring_attention``), with the kernel that all sides have here. It and the one by
hand begin with a sequence that was dealt out before (rank i has the chunks i and 2 n - 1 - i), and
leave their results so. So does "balanced", the ring on rows that ``dt.attention.Balanced`` dealt
out; other sides of disttensor take contiguous pieces and give them back.
"""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as theirs
import torch.nn.functional as F
from replicas import on_ranks
from table import machine, write_between
from torch import Tensor

import disttensor as dt
from disttensor.torch_private import flash_on_cpu, flash_on_cpu_backward

POLICIES = ("auto", "ring", "balanced", "heads", "gather")
PEERS = ("torch's ring", "by hand")
MARKS = "<!-- measured: begin -->", "<!-- measured: end -->"


# The sides ----------------------------------------------------------------------------------------


class ByHand(torch.autograd.Function):
    """Ring attention as one would write it for [b, h, 2 chunks, e] that were dealt out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, n, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2
        kv = torch.stack([k, v])
        out = lse = None
        for step in range(n):
            works, coming = _shifted(kv) if step + 1 < n else ([], kv)
            rows, keys = _part(rank, step, half)
            o, s = flash_on_cpu(q[:, :, rows], *kv[:, :, :, keys], 0.0, step == 0)
            if out is None:
                out, lse = o, s
            else:
                old_out, old = out[:, :, rows], lse[:, :, rows]
                weight = torch.sigmoid(s - old).unsqueeze(-1)
                old_out += weight * (o - old_out)
                old.copy_(torch.logaddexp(old, s))
            for work in works:
                work.wait()
            kv = coming
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        rank, n, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2
        grad, kv, of_q = grad.contiguous(), torch.stack([k, v]), torch.zeros_like(q)
        arriving, back = torch.zeros_like(kv), []
        for step in range(n):
            works, coming = _shifted(kv) if step + 1 < n else ([], kv)
            rows, keys = _part(rank, step, half)
            parts = (x[:, :, rows].contiguous() for x in (out, lse))
            more = flash_on_cpu_backward(
                grad[:, :, rows], q[:, :, rows], *kv[:, :, :, keys], *parts, 0.0, step == 0
            )
            of_q[:, :, rows] += more[0]
            for work in back:
                work.wait()
            of_kv = arriving
            of_kv[0, :, :, keys] += more[1]
            of_kv[1, :, :, keys] += more[2]
            back, arriving = _shifted(of_kv)
            for work in works:
                work.wait()
            kv = coming
        for work in back:
            work.wait()
        return of_q, *arriving


def _part(rank: int, step: int, half: int) -> tuple[slice, slice]:
    """The rows and the keys of a step, of two chunks each: keys of an earlier rank are seen by all
    rows, their late chunk by none; keys of a later one by the late rows only."""
    whole, early, late = slice(None), slice(0, half), slice(half, None)
    return (whole, whole) if step == 0 else (whole, early) if step <= rank else (late, whole)


def _shifted(x: Tensor) -> tuple[list[Any], Tensor]:
    rank, n, into = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % n),
        dist.P2POp(dist.irecv, into, (rank - 1) % n),
    ]
    return dist.batch_isend_irecv(ops), into


class Theirs(torch.autograd.Function):
    """torch's ring, with the kernel for CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = dist.group.WORLD
        out, lse = theirs._templated_ring_attention(
            group, 2, _kernel, q, k, v, is_causal=True
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return theirs._templated_ring_attention_backward(
            dist.group.WORLD, 2, _kernel_backward, grad, "grad_out", q, k, v, out, lse, True
        )


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
    out, lse = flash_on_cpu(q, k, v, 0.0, is_causal)
    return out, lse.contiguous()


def _kernel_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor,
    is_causal: bool,
) -> Any:  # fmt: skip
    return flash_on_cpu_backward(
        grad_out.contiguous(), query, key, value, out.contiguous(), logsumexp, 0.0, is_causal
    )


# One measurement ----------------------------------------------------------------------------------


def dealt(x: Tensor) -> Tensor:
    """This rank's two chunks of a sequence."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(2 * n, 2)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], 2)


def sides(full: list[Tensor], mesh: dt.ProcessMesh) -> dict[str, Callable[[], list[Tensor]]]:
    """Name -> one forward and backward, which gives the result and gradients of this rank."""
    grad = full[3]

    def ours(policy: str) -> Callable[[], list[Tensor]]:
        placement = dt.attention.Balanced(2) if policy == "balanced" else dt.Shard(2)
        leaves = [dt.shard_tensor(x, mesh, [placement]).requires_grad_() for x in full[:3]]
        seed = dt.shard_tensor(grad, mesh, [placement])

        def step() -> list[Tensor]:
            for x in leaves:
                x.grad = None
            with dt.attention.policy("ring" if policy == "balanced" else policy):
                out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            out.backward(seed)
            return [x.to_local() for x in (out.detach(), *(x.grad for x in leaves))]

        return step

    def peer(function: type[torch.autograd.Function]) -> Callable[[], list[Tensor]]:
        leaves = [dealt(x).contiguous().requires_grad_() for x in full[:3]]
        seed = dealt(grad).contiguous()

        def step() -> list[Tensor]:
            for x in leaves:
                x.grad = None
            out = function.apply(*leaves)
            out.backward(seed)
            return [out.detach(), *(x.grad for x in leaves)]

        return step

    return {policy: ours(policy) for policy in POLICIES} | dict(
        zip(PEERS, (peer(Theirs), peer(ByHand)), strict=True)
    )


def compare(steps: dict[str, Callable[[], list[Tensor]]], full: list[Tensor]) -> None:
    """Raise AssertionError where a side is not exact."""
    rank, n = dist.get_rank(), dist.get_world_size()
    leaves = [x.clone().requires_grad_() for x in full[:3]]
    want = F.scaled_dot_product_attention(*leaves, is_causal=True)
    want.backward(full[3])
    whole = [want.detach(), *(x.grad for x in leaves)]
    for name, step in steps.items():
        for got, one in zip(step(), whole, strict=True):
            contiguous = name in POLICIES and name != "balanced"
            mine = one.chunk(n, 2)[rank] if contiguous else dealt(one)
            torch.testing.assert_close(got, mine, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: n + m)


def rank_main(rank: int, n: int, port: int, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(n), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", rank=rank, world_size=n)
    theirs._cp_options.rotate_method = theirs._RotateMethod.ALL_TO_ALL
    mesh = dt.init_mesh((n,), ("cp",))
    for tokens in args.tokens:
        torch.manual_seed(0)
        full = [torch.randn(1, args.heads, tokens, args.width) for _ in range(4)]
        steps = sides(full, mesh)
        if args.check:
            compare(steps, full)
            results[n, tokens] = dict.fromkeys(steps, (0.0, 0))
            continue
        best = dict.fromkeys(steps, float("inf"))
        sent = {}
        for name, step in steps.items():
            with dt.debugging.record_comms() as log:
                step()
            sent[name] = log.total_bytes
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
    names = [*POLICIES, *PEERS]
    lines = ["| ranks, tokens | " + " | ".join(names) + " | balanced / the better peer |"]
    lines.append("| --- |" + " ---: |" * (len(names) + 1))
    for (n, tokens), found in sorted(results.items()):
        cells = []
        for name in names:
            seconds, nbytes = found[name]
            said = f", {nbytes / 1e6:.1f} MB" if name in POLICIES else ""
            cells.append(f"{seconds * 1e3:.0f} ms{said}")
        peer = min(found[name][0] for name in PEERS)
        ratio = found["balanced"][0] / peer if peer else 0.0
        lines.append(f"| {n}, {tokens:,} | " + " | ".join(cells) + f" | {ratio:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare values, of 64 tokens")
    parser.add_argument(
        "--markdown", metavar="FILE", help="write the table between its marks there"
    )
    args = parser.parse_args()
    if args.check:
        args.tokens = [64]
    found = on_ranks(args.ranks, rank_main, args)
    if args.check:
        print(f"all sides agree with one process on {args.ranks} ranks")
        return
    size = f"{args.heads} heads of {args.width}, float32, forward and backward; {machine()}"
    text = f"{table(found)}\n\n{textwrap.fill(f'{size}.', 100)}"
    print(text)
    if args.markdown:
        write_between(MARKS, Path(args.markdown), text)


if __name__ == "__main__":
    main()
