"""A simulated step against the same step on four or eight gloo processes: each collective, the
FLOPs and the memory of every rank."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.simulate import devices, simulate
from tests.simulate import gpt_training
from tests.simulate.measured import measured
from tests.support.part import EVERYTHING, part
from tests.support.pool import run_on_ranks

# of weights whose gradients a schedule does not put off
pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")

DTYPES = torch.float32, torch.bfloat16, torch.float16
CPU = devices.Device(
    name="a CPU", peak=dict.fromkeys(DTYPES, 1e11), bandwidth=1e10, launch=5e-6, type="cpu"
)

STRATEGIES = [
    "--dp=4 --batch=8 --accumulate=2 --recompute",
    "--dp=2 --tp=2 --batch=4",
    "--tp=4 --batch=3 --amp=bf16",
    "--sharding=4 --zero=1 --batch=8",
    "--sharding=4 --zero=2 --batch=8 --accumulate=2",
    "--sharding=4 --zero=3 --batch=8 --segment-mb=0.02",
    "--sharding=2 --dp=2 --batch=8 --accumulate=2 --amp=bf16",
    "--sharding=2 --tp=2 --zero=3 --batch=4 --recompute --tie",
    "--sharding=2 --cp=2 --zero=2 --batch=4",
    "--pp=4 --batch=8",
    "--pp=2 --tp=2 --batch=6 --accumulate=3 --schedule=gpipe",
    "--pp=2 --sharding=2 --batch=8 --tie --amp=fp16",
    "--pp=2 --dp=2 --batch=8 --schedule=interleaved_1f1b --recompute",
    "--pp=2 --tp=2 --batch=6 --accumulate=3 --schedule=zbv",
    "--pp=4 --batch=10 --accumulate=10",  # few micro-batches are run
    "--dp=4 --batch=6 --width=36 --heads=3",  # pieces of 2, 2, 1 and 1
]


# Of eight processes.
EIGHT = [
    "--pp=2 --dp=2 --tp=2 --batch=8 --accumulate=2",
    "--pp=4 --tp=2 --batch=8 --accumulate=4",
    "--sharding=8 --zero=3 --batch=8 --segment-mb=0.02",
    "--pp=2 --sharding=4 --zero=2 --batch=16 --accumulate=4 --schedule=interleaved_1f1b",
]

# Of Hugging Face transformers: the name of a model, and its Strategy.
MODELS = [
    "llama dp=2 tp=2",
    "gpt2 sharding=4 zero_stage=3",
    "bert sharding=2 dp=2 zero_stage=2 accumulate_steps=2",
]


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("options", part(STRATEGIES, 2))
def test_a_simulated_step_is_that_of_real_ranks(options: str) -> None:
    check(gpt_training.build, options)


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.skipif(
    (os.cpu_count() or 1) < 4 and not EVERYTHING,
    reason="eight ranks want four cores to start in time",
)
@pytest.mark.parametrize("options", part(EIGHT, 1))
def test_a_simulated_step_is_that_of_eight_real_ranks(options: str) -> None:
    check(gpt_training.build, options, world=8)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("options", part(MODELS, 1))
def test_a_simulated_step_of_a_known_model_is_that_of_real_ranks(options: str) -> None:
    training = importlib.import_module("tests.simulate.huggingface_training")
    check(training.build, options)


def check(build: Any, options: str, world: int = 4) -> None:
    real = run_on_ranks(world, measured, build, options, timeout=150)
    report = simulate(functools.partial(build, options), world=world, device=CPU)
    for rank, (comms, flops, memory, messages) in enumerate(real):
        kind = report.kind_of(rank)
        mine = list(kind.comms)
        if rank != kind.rank:  # other ranks of the kind send to other ranks
            assert [_alike(c) for c in mine] == [_alike(c) for c in comms]
        else:
            assert mine == comms
        assert kind.flops == flops
        # A real rank holds messages on their way, and gloo's thread may hold what it has reduced or
        # gathered: of that as much as a tenth is granted.
        gathered = 2 * max((c.bytes for c in comms if c.kind != "send"), default=0)
        in_flight = max(messages, min(gathered, int(0.08 * memory.peak)))
        off = memory.peak - kind.peak_memory
        assert -0.02 * memory.peak <= off <= 0.02 * memory.peak + in_flight


def _alike(c: dt.debugging.CommRecord) -> tuple[object, ...]:
    axis = "" if c.kind == "send" else c.axis
    return c.kind, axis, c.bytes, c.phase, c.where, c.shape, c.dtype
