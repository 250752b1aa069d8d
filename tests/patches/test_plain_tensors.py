"""``import disttensor`` changes nothing for plain tensors: what it changes in torch gives the same
results, the same errors, and compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patches.plain_programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]


def run(which: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.plain_programs", which],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def without() -> Any:
    return run("without")


@pytest.fixture(scope="module")
def with_disttensor() -> Any:
    return run("with")


MISTAKES = {
    "checkpoint_that_changes": "CheckpointError",
    "checkpoint_that_fails": "ValueError: in the forward",
    "clip_error_if_nonfinite": "RuntimeError: The total norm",
    "clip_value_of_nothing": "RuntimeError",
    "compile_trunc_normal": ("Unsupported", "["),
    "custom_once_differentiable": "RuntimeError",
    "scaler_unscales_once": "RuntimeError: unscale_() has already been called",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_run(without: Any, name: str) -> None:
    """Only those that are mistakes end with an error."""
    assert str(without[name]).startswith(MISTAKES.get(name, "[")), without[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_plain_tensors_as_without_disttensor(without: Any, with_disttensor: Any, name: str) -> None:
    assert with_disttensor[name] == without[name]


for _test in (test_the_programs_run, test_plain_tensors_as_without_disttensor):
    _test.on_ranks_timeout = 300.0  # type: ignore[attr-defined]  # to compile takes its time
