"""examples/train_gpt.py as users run it: the same losses on any mesh, and a quick clear end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
ONE = [sys.executable, SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
FOUR = [*TORCHRUN, SCRIPT, "--dp=2", "--tp=2"]
LAUNCH = [sys.executable, str(ROOT / "examples" / "launch.py"), "4", SCRIPT, "--dp=2", "--tp=2"]
TINY = ["--layers=2", "--width=32", "--heads=4", "--context=16", "--batch=4", "--bytes=200000"]

PATIENCE = 100.0  # seconds for a job that is not stuck
SECONDS = 10.0  # "within seconds"


@contextlib.contextmanager
def job(command: list[str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A running job. However the block ends, no process of it is left."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            ranks = ranks_of(process.pid)
            process.kill()
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def finished(command: list[str], cwd: Path) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)"""
    with job(command, cwd) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that ``launcher`` has started, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def example(name: str) -> ModuleType:
    """A module of examples/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-8), ("float32", 1e-3)])
def test_one_process_and_a_2x2_mesh_have_the_same_losses(
    dtype: str, tolerance: float, tmp_path: Path
) -> None:
    losses, validation = [], []
    for name, command in (("one", ONE), ("four", FOUR)):
        options = [f"--dtype={dtype}", "--steps=50", "--sample=8", f"--losses={name}.json"]
        status, out, err = finished([*command, *TINY, *options], tmp_path)
        assert status == 0, err
        assert "Warning" not in err, err
        assert "50/50" in out and "tokens/s" in out and "validation loss" in out, out
        assert "loss curve" in out, out
        written = json.loads((tmp_path / f"{name}.json").read_text())
        losses.append(written["losses"])
        validation.append(written["validation"])
    assert len(losses[0]) == 50
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=tolerance)
    assert validation[1] == pytest.approx(validation[0], rel=0, abs=tolerance)
    assert losses[0][-1] < losses[0][0] - 1.0


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize(
    ("victim", "by", "message"),
    [
        ("rank 2", signal.SIGKILL, "was killed by SIGKILL"),
        ("launcher", signal.SIGINT, "interrupted: all 4 processes have ended"),
    ],
    ids=["killed rank", "ctrl-c"],
)
def test_all_ranks_end_within_seconds_with_one_line(
    victim: str, by: signal.Signals, message: str, tmp_path: Path
) -> None:
    with job([*LAUNCH, *TINY, "--steps=100000"], tmp_path) as process:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if "tokens/s" in line:
                break
        else:
            assert process.stderr is not None
            pytest.fail(seen + process.stderr.read())
        ranks = ranks_of(process.pid)
        assert len(ranks) == 4
        os.kill(process.pid if victim == "launcher" else ranks[2], by)
        killed = time.monotonic()
        _, err = process.communicate(timeout=PATIENCE)
        took = time.monotonic() - killed
    assert took < SECONDS
    assert process.returncode not in (0, None)
    assert message in err
    assert len(err.split("\n")) <= 3, err  # an empty line, the message, its end
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def test_a_mesh_that_does_not_fit_is_refused_with_those_that_do() -> None:
    mesh_shape = example("options").mesh_shape
    assert mesh_shape(None, None, 4) == (4, 1)
    assert mesh_shape(2, None, 4) == (2, 2)
    assert mesh_shape(None, 4, 4) == (1, 4)
    with pytest.raises(ValueError, match=r"needs 6 processes, but 4 started.*--dp 2 --tp 2"):
        mesh_shape(2, 3, 4)
    with pytest.raises(ValueError, match=r"needs 3 processes, but 4 started"):
        mesh_shape(None, 3, 4)


def test_a_batch_depends_on_seed_and_step_only(tmp_path: Path) -> None:
    text = example("text")
    (tmp_path / "a").write_bytes(bytes(range(200)))
    data = text.read_text([tmp_path / "a"])
    inputs, targets = text.sample_batch(data, 3, 5, seed=1, step=7)
    again, _ = text.sample_batch(data, 3, 5, seed=1, step=7)
    other, _ = text.sample_batch(data, 3, 5, seed=1, step=8)
    assert inputs.shape == targets.shape == (3, 5)
    assert inputs.equal(again) and not inputs.equal(other)
    assert targets.equal(inputs + 1)  # in this text each byte is one more than the one before


def test_text_that_is_too_short_is_refused_with_the_length_it_needs() -> None:
    text = example("text")
    with pytest.raises(SystemExit, match=r"has 100 bytes, and with a context of 64 .* 130"):
        text.split(text.torch.zeros(100, dtype=text.torch.uint8), context=64)


def test_help_lists_the_options(tmp_path: Path) -> None:
    status, out, err = finished([*ONE, "--help"], tmp_path)
    assert status == 0, err
    for option in ("--dp", "--tp", "--layers", "--data", "--steps", "--dtype", "--losses"):
        assert option in out
