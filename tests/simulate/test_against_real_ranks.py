"""A simulated step against the same step on four gloo processes: each collective, the FLOPs and the
memory of every rank."""

from __future__ import annotations

import os
import random

import pytest
import torch

import disttensor as dt
from tests.opinfo.test_opinfo import commit
from tests.simulate.gpt_training import build, measured
from tests.support.pool import run_on_ranks

DTYPES = torch.float32, torch.bfloat16, torch.float16
CPU = dt.devices.Device(
    name="a CPU", peak=dict.fromkeys(DTYPES, 1e11), bandwidth=1e10, launch=5e-6, asynchronous=False
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
    "--dp=4 --batch=6 --width=36 --heads=3",  # pieces of 2, 2, 1 and 1
]
SOME = 4  # of these for each commit; EVERY_STRATEGY=1 for all
CHOSEN = (
    STRATEGIES
    if "EVERY_STRATEGY" in os.environ
    else random.Random(commit()).sample(STRATEGIES, SOME)
)


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.parametrize("options", CHOSEN)
def test_a_simulated_step_is_that_of_real_ranks(options: str) -> None:
    real = run_on_ranks(4, measured, options, timeout=150)
    report = dt.simulate(lambda: build(options), world=4, device=CPU)
    for rank, (comms, flops, memory) in enumerate(real):
        kind = report.kind_of(rank)
        mine = list(kind.comms)
        if rank != kind.rank:  # other ranks of the kind send to other ranks
            assert [_alike(c) for c in mine] == [_alike(c) for c in comms]
        else:
            assert mine == comms
        assert kind.flops == flops
        assert kind.peak_memory == pytest.approx(memory.peak, rel=0.05)


def _alike(c: dt.CommRecord) -> tuple[object, ...]:
    axis = "" if c.kind == "send" else c.axis
    return c.kind, axis, c.bytes, c.phase, c.where, c.shape, c.dtype
