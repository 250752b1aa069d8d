"""A training step of a GPT on one GPU: plain PyTorch, disttensor (eager, replayed, captured in a
CUDA graph) and DTensor, all in a world of one with NCCL: one run, one table.

python benchmarks/gpu.py [--steps N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from table import markdown
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.experimental import implicit_replication

import disttensor as dt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig, init_weights

BYTES = 256
SIZES = {  # layers, width, heads, context, sequences in a batch
    "4 layers, width 128, 2 x 64 tokens": (4, 128, 4, 64, 2),
    "12 layers, width 768, 8 x 512 tokens": (12, 768, 12, 512, 8),
    "24 layers, width 2048, 8 x 1024 tokens": (24, 2048, 16, 1024, 8),
}
Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps in a timing (20)")
    steps = parser.parse_args().steps
    mesh = dt.init_mesh((1,), ("dp",), device_type="cuda")
    theirs = init_device_mesh("cuda", (1,))
    sides: dict[str, Callable[..., Step]] = {
        "plain": lambda *size: plain(*size),
        "plain, captured": lambda *size: captured(plain(*size)),
        "disttensor": lambda *size: ours(mesh, *size),
        "disttensor, replay": lambda *size: ours(mesh, *size, replay=True),
        "disttensor, captured": lambda *size: captured(ours(mesh, *size)),
        "torch DTensor": lambda *size: of_dtensor(theirs, *size),
    }
    rows = []
    for name, size in SIZES.items():
        took, losses = {}, {}
        for side, build in sides.items():
            torch.manual_seed(0)
            try:
                took[side], losses[side] = timed(build(*size), steps)
            except RuntimeError as error:
                print(f"{name}: {side} failed: {error}", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
        for side, loss in losses.items():
            if "captured" not in side:  # those have made some steps more
                torch.testing.assert_close(loss, losses["plain"], rtol=5e-2, atol=5e-2)
        rows.append([name, *[cell(took.get(side), took["plain"]) for side in sides]])
        print(rows[-1], file=sys.stderr, flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(markdown(["forward, backward, AdamW in bf16", *sides], rows))
    dist.destroy_process_group()


def cell(seconds: float | None, base: float) -> str:
    return "error" if seconds is None else f"{seconds * 1e3:.2f} ms ({seconds / base:.2f}x)"


def model_of(layers: int, width: int, heads: int, context: int, batch: int) -> GPT:
    model = GPT(GPTConfig(BYTES, layers, width, heads, context, False)).cuda()
    init_weights(model)
    return model.bfloat16()


def ids_of(context: int, batch: int) -> Tensor:
    return torch.randint(0, BYTES, (batch, context + 1), device="cuda")


def step_of(model: nn.Module, forward: Callable[[Tensor], Tensor], ids: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone().flatten()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(inputs).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plain(*size: int) -> Step:
    model = model_of(*size)
    return step_of(model, model, ids_of(*size[3:]))


def ours(mesh: dt.ProcessMesh, *size: int, replay: bool = False) -> Step:
    model = dt.shard_module(model_of(*size), mesh)
    if replay:
        dt.replay(model)
    return step_of(model, model, dt.shard_tensor(ids_of(*size[3:]), mesh))


def of_dtensor(mesh: object, *size: int) -> Step:
    model = distribute_module(model_of(*size), mesh)
    ids = DTensor.from_local(ids_of(*size[3:]), mesh, [Replicate()], run_check=False)
    step = step_of(model, model, ids)

    def replicating() -> Tensor:
        with implicit_replication():  # of the positions, which the model makes
            return step()

    return replicating


def captured(step: Step) -> Step:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replayed() -> Tensor:
        graph.replay()
        return loss

    return replayed


def timed(step: Step, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step, the best of three timings, and the loss after them all."""
    best = float("inf")
    for turn in range(4):  # the first one warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        torch.cuda.synchronize()
        if turn:
            best = min(best, (time.perf_counter() - start) / steps)
    value = loss.full_tensor() if isinstance(loss, (DTensor, dt.DistTensor)) else loss
    return best, value.item()


if __name__ == "__main__":
    main()
