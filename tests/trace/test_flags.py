"""The settings of torch that a recorded program depends on are those that Dynamo guards."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import disttensor as dt
from disttensor.settings import snapshot
from tests.support.pool import on_ranks


def _attribute(owner, name, value):
    def enter(stack):
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    return enter


def _called(function, value, before):
    def enter(stack):
        stack.callback(function, before)
        function(value)

    return enter


def _entered(make):
    return lambda stack: stack.enter_context(make())


# What Dynamo guards -> how it is changed here; None: no program is recorded or run under it.
GUARDED = {
    "grad_mode": _entered(torch.no_grad),
    "autocast_state": _entered(lambda: torch.autocast("cpu", torch.bfloat16)),
    "default_dtype": _called(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic_algorithms": _called(torch.use_deterministic_algorithms, True, False),
    "deterministic_algorithms_warn_only": _entered(lambda: _warn_only()),
    "num_threads": _called(torch.set_num_threads, 2, 1),
    "allow_tf32": _called(torch.set_float32_matmul_precision, "high", "highest"),
    "allow_fp16_reduce": _attribute(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "allow_bf16_reduce": _attribute(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "torch_function": None,
    "torch_function_all_disabled": None,
}
OTHERS = {
    "attention": _entered(lambda: sdpa_kernel(SDPBackend.MATH)),
    "order of attention": _entered(
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True)
    ),
    "mkldnn": _called(torch._C._set_mkldnn_enabled, False, True),
    "cudnn": _called(torch._C._set_cudnn_benchmark, True, False),
    "inference": _entered(torch.inference_mode),
    "fill": _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "rng": _entered(lambda: dt.random.rng("invariant")),
    "attention of ours": _entered(lambda: dt.attention.policy("gather")),
}


class _warn_only:
    def __enter__(self):
        torch.use_deterministic_algorithms(True)
        self.before = snapshot("cuda")
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *exc):
        torch.use_deterministic_algorithms(False)


def test_these_are_all_that_dynamo_guards():
    guarded = json.loads(torch._C._dynamo.guards.GlobalStateGuard().__getstate__())
    assert set(guarded) <= set(GUARDED)


@pytest.mark.parametrize("name", [*GUARDED, *OTHERS])
def test_each_is_a_part_of_the_key(name):
    change = {**GUARDED, **OTHERS}[name]
    before = snapshot("cuda")
    with ExitStack() as stack:
        if change is not None:
            change(stack)
            assert snapshot("cuda") != before
    assert snapshot("cuda") == before


@on_ranks(1)
@pytest.mark.parametrize("name", ["attention", "mkldnn", "order of attention"])
def test_a_forward_that_sets_one_is_not_recorded(name):
    def forward(x):
        with ExitStack() as stack:
            OTHERS[name](stack)
            return x.relu()

    replayed = dt.replay(forward)
    x = dt.ones(3, mesh=dt.init_mesh((1,)))
    for _ in range(3):
        assert replayed(x).equal(x)
    assert replayed.replays == 0 and "a setting inside" in replayed.why()[0]
