"""The door: what disttensor exports, and that each name has an example that runs in a world of
one."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
import types

import pytest
import torch

import disttensor as dt
from disttensor.core import placement
from tests.support.pool import on_ranks

NAMES = [
    "Balanced", "Checkpointer", "CommError", "CommLog", "CommRecord", "CustomFunctionError",
    "DistSpec", "DistTensor",
    "Explanation", "FallbackWarning", "Group",
    "Layout", "MismatchError", "Partial", "Placement", "ProcessMesh", "Replicate",
    "SegmentByAnchors", "SegmentBySize", "Shard", "Strategy",
    "StrictError", "accumulate", "arange", "attention_policy", "broadcast_value", "check_replicas",
    "clip_grad_norm_", "combine_tokens", "debug", "dispatch_tokens", "distribute_tensor",
    "empty", "expert_load", "explain", "from_dtensor",
    "from_fn", "from_local", "full", "fully_shard", "info", "init_mesh", "load_pretrained",
    "local_map",
    "manual_seed", "never_skip", "ones", "plan_strategy",
    "rand", "randint", "randn", "randperm",
    "record_comms", "replay", "replicate", "reshard", "rng", "save_pretrained",
    "shard_data_parallel",
    "shard_loader", "shard_module",
    "shard_scaler", "shard_tensor", "simulate", "strict", "sync_gradients",
    "to_dtensor", "unshard", "values_everywhere", "zeros",
]  # fmt: skip


def test_the_door_is_what_it_says():
    assert dt.__all__ == sorted(dt.__all__) == NAMES
    loose = {
        n
        for n, v in vars(dt).items()
        if not n.startswith("_") and not isinstance(v, types.ModuleType)
    }
    assert loose == set(dt.__all__)


def text_of(name: str) -> str:
    """The docstring with the example; of a union of types that is the module's."""
    thing = getattr(dt, name)
    return inspect.getdoc(placement if name == "Placement" else thing) or ""


@pytest.mark.parametrize("name", NAMES)
def test_every_name_says_what_it_is_and_shows_it(name):
    text = text_of(name)
    assert text.split("\n")[0].strip() and ">>> " in text, f"{name} has no example in its docstring"
    assert f"dt.{name}" in text or name == "DistTensor"


@on_ranks(1)
def test_examples_run():
    mesh = dt.init_mesh((1, 1), ("dp", "tp"))
    failed = []
    for name in NAMES:
        test = doctest.DocTestParser().get_doctest(
            text_of(name), {"torch": torch, "dt": dt, "mesh": mesh}, name, None, None
        )
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test, out=report.append)
        if report:
            failed.append("".join(report))
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("package", ["disttensor", "ops", "reshard"])
def test_each_package_can_be_imported_first_and_starts_nothing(package):
    code = (
        f"import {package}, torch.distributed as d, threading;assert not d.is_initialized() and "
        "threading.active_count() == 1; import disttensor, ops, reshard"
    )
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert out.returncode == 0 and not out.stderr, out.stderr
