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


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any]]:
    """(with disttensor, without), each in a process of its own."""
    found = []
    for which in ("with", "without"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.patches.plain_programs", which],
            capture_output=True, text=True, cwd=ROOT, timeout=500,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found[0], found[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_plain_tensors_as_without_disttensor(results: Any, name: str) -> None:
    ours, torchs = results
    assert ours[name] == torchs[name]


MISTAKES = {
    "checkpoint_that_changes": "CheckpointError",
    "checkpoint_that_fails": "ValueError: in the forward",
    "clip_error_if_nonfinite": "RuntimeError: The total norm",
    "clip_value_of_nothing": "RuntimeError",
    "compile_trunc_normal": "Unsupported",
    "custom_once_differentiable": "RuntimeError",
    "scaler_unscales_once": "RuntimeError: unscale_() has already been called",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_run(results: Any, name: str) -> None:
    """Each says something: only those that are mistakes end with an error."""
    found = results[1][name]
    assert str(found).startswith(MISTAKES.get(name, "[")), found
