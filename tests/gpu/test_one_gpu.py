"""One process with NCCL, a world of one: the bits of plain PyTorch on the same device, the same
memory, and a training step that a CUDA graph captures."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

START = """
import gc, sys
sys.path.insert(0, "examples")
import torch
import torch.nn.functional as F
from torch import nn
from gpt import GPT, GPTConfig, init_weights
import disttensor as dt

mesh = dt.init_mesh((1,), ("fsdp",), device_type="cuda")
assert "cuda:nccl" in torch.distributed.get_backend_config()

def make(ours, stage=None):
    torch.manual_seed(0)
    model = GPT(GPTConfig(256, 2, 64, 4, 32, False)).cuda()
    init_weights(model)
    if ours and stage is None:
        dt.shard_module(model, mesh)
    elif ours:
        dt.shard_data_parallel(model, mesh, stage=stage)
    return model

def batches(ours, n=3):
    draw = torch.Generator().manual_seed(1)
    for _ in range(n):
        x = torch.randint(0, 256, (4, 33), generator=draw).cuda()
        yield dt.shard_tensor(x, mesh) if ours else x

def loss_of(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

def train(ours, stage=None, capture=False):
    model = make(ours, stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=capture)
    losses = []
    for x in batches(ours):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses

def local(x):
    return x.full_tensor() if isinstance(x, dt.DistTensor) else x

def same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(local(x), local(y)), (local(x), local(y))
"""


def run(text: str, timeout: float = 100.0) -> str:
    """Runs the program in a process of its own, and returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(text)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_training_gives_the_bits_of_plain_torch(stage):
    run(f"""
        plain, want = train(False)
        ours, got = train(True, {stage})
        same(got, want)
        same(ours.parameters(), plain.parameters())
        assert all(p.grad.is_cuda for p in ours.parameters())
    """)


def test_replay_gives_the_bits_of_plain_torch():
    run("""
        plain, ours = make(False), make(True)
        fast = dt.replay(ours)
        for x, y in zip(batches(False, 6), batches(True, 6), strict=True):
            for model, forward, ids in ((plain, plain, x), (ours, fast, y)):
                model.zero_grad()
                F.cross_entropy(forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            same([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
        assert ours.forward.replays, ours.forward.why()
    """)


def test_a_step_takes_the_memory_of_plain_torch():
    out = run("""
        peaks = []
        for ours in (False, True):
            train(ours)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model, _ = train(ours)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del model
        print(*peaks)
        assert peaks[1] <= peaks[0] + 2**16, peaks
    """)
    print(out)


def test_a_captured_step_gives_the_bits_of_an_eager_one():
    run("""
        def steps(capture):
            model = make(True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
            given = list(batches(True, 8))
            static = given[0].clone()

            def step():
                optimizer.zero_grad(set_to_none=True)
                loss = loss_of(model, static)
                loss.backward()
                optimizer.step()
                return loss.detach()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for x in given[:3]:
                    static.copy_(x)
                    step()
            torch.cuda.current_stream().wait_stream(side)
            losses = []
            if capture:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    loss = step()
                for x in given[3:]:
                    static.copy_(x)
                    graph.replay()
                    losses.append(loss.clone())
            else:
                for x in given[3:]:
                    static.copy_(x)
                    losses.append(step().clone())
            return losses, list(model.parameters())

        eager, captured = steps(False), steps(True)
        same(captured[0], eager[0])
        same(captured[1], eager[1])
    """)


CAPTURED = """
def step_of(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss
    return step

def trained(capture, stage, **options):
    model = make(True, stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True, **options)
    step = step_of(model, optimizer)
    step = dt.capture(step) if capture else step
    losses = [step(x).detach().clone() for x in batches(True, 8)]
    assert not capture or step.graph is not None
    return [*losses, *model.parameters()]
"""


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_capture_gives_the_bits_of_eager_steps(stage):
    run(
        CAPTURED
        + textwrap.dedent(f"""
        for options in ({{"fused": True}}, {{"foreach": True}}):
            same(trained(True, {stage}, **options), trained(False, {stage}, **options))
    """)
    )


def test_capture_refuses_a_step_before_its_capture():
    run(
        CAPTURED
        + textwrap.dedent("""
        model = make(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True, fused=True)
        plain, x = step_of(model, optimizer), next(batches(True))
        for inside, text in (
            (lambda: plain(x).item(), "reads a value on the host"),
            (lambda: plain(x).full_tensor().to("cpu"), "copies between host and device"),
            (lambda: torch.tensor(1.0, device="cuda"), "copies between host and device"),
        ):
            step = dt.capture(inside)
            for i in range(5):
                try:
                    step()
                except dt.errors.CaptureError as error:
                    assert i >= 3 and text in str(error), str(error)
                else:
                    assert i < 3
        step = dt.capture(plain)
        for _ in range(6):
            loss = step(x)
        value, weight = loss.item(), next(model.parameters())
        step(x)
        assert loss.item() < value  # the memory of the last result has the new one
        weight.data = weight.data.clone()
        try:
            step(x)
        except dt.errors.CaptureError as error:
            assert "was replaced since the last call" in str(error)
        else:
            raise AssertionError("a graph that reads an old parameter was replayed")
    """)
    )


def test_nccl_runs_the_collectives():
    """In groups of one rank nothing is sent, so these calls are made below that shortcut."""
    run("""
        from disttensor.comm import collectives as c
        group = c.world_group()
        x = torch.randn(1 << 22, device="cuda")
        for async_op in (False, True):
            go = c.start if async_op else c.run
            for kind, fn, options in (
                ("all_gather", c.all_gather_single, "AllgatherOptions"),
                ("reduce_scatter", c.reduce_scatter_single, "ReduceScatterOptions"),
            ):
                busy = torch.randn(4096, 4096, device="cuda")
                for _ in range(5):
                    y = (busy @ busy).view(-1)[: x.numel()] * 0 + x  # is ready late
                    out = torch.empty_like(y)
                    args = (torch.distributed.group.WORLD, out, y, c._options(options, async_op))
                    work = go(kind, group, y, 0.0, fn, args, lambda out=out: out)
                    del y, args
                    other = torch.full_like(x, 7.0)  # may get memory that is still in use
                    got = work.wait() if async_op else work
                    assert torch.equal(got, x), kind
    """)


def test_the_example_trains():
    done = subprocess.run(
        [sys.executable, "examples/train_gpt.py", "--steps", "3", "--device", "cuda"],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
