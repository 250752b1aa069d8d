"""The recipes of examples/recipes/: the same losses on one process and on four, and the page of
each shows what it prints."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.support.examples import printed_by
from tests.support.pages import ROOT, blocks
from tests.support.pool import run_on_ranks

FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))
NEEDS = {
    name: re.findall(r"^from (transformers|peft) import", (FOLDER / f"{name}.py").read_text(), re.M)
    for name in RECIPES
}


def printed(name: str, *options: str) -> str:
    """PEFT warns of what transformers calls by its old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return printed_by(f"recipes/{name}", *options)


def output(ranks: int, name: str, *options: str) -> str:
    """What rank 0 prints."""
    if not all(map(importlib.util.find_spec, NEEDS[name])):
        pytest.skip(f"not installed: one of {', '.join(NEEDS[name])}")
    return run_on_ranks(ranks, printed, name, *options, timeout=120)[0]


def steps(text: str) -> tuple[list[str], list[float]]:
    """The words and the numbers of the lines that show a step."""
    lines = " ".join(line for line in text.splitlines() if line.startswith("step"))
    return re.findall("[a-z]+", lines), [float(number) for number in re.findall(r"[\d.]+", lines)]


def same_losses(one: str, other: str) -> None:
    (words, numbers), (expected_words, expected) = steps(one), steps(other)
    assert words == expected_words and numbers
    assert numbers == pytest.approx(expected, abs=3e-4)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("own_model", "resume")])
@pytest.mark.limit(240)
def test_a_recipe_has_the_same_losses_on_one_process_and_on_four(name: str) -> None:
    one, four = (output(n, name) for n in (1, 4))
    same_losses(one, four)
    shows(name, four)


@pytest.mark.limit(240)
def test_your_own_model_is_the_same_in_two_stages_and_resumes_in_one_process(
    tmp_path: Path,
) -> None:
    one, four = output(1, "own_model"), output(4, "own_model", str(tmp_path))
    same_losses(one, four)
    shows("own_model", four)
    assert output(1, "own_model", str(tmp_path)).splitlines() == four.splitlines()[-1:]


def shows(name: str, text: str) -> None:
    """The page of a recipe shows what the recipe prints."""
    (shown,) = (text for kind, _, text in blocks(f"docs/recipes/{name}.md") if kind == "text")
    assert re.findall("[a-z]+", shown) == re.findall("[a-z]+", text)
    same_losses(shown, text)


@pytest.mark.limit(240)
def test_resume_goes_on_as_without_the_interruption(tmp_path: Path) -> None:
    whole = output(1, "resume", str(tmp_path / "whole"), "6")
    parts = [output(n, "resume", str(tmp_path / "parts"), end) for n, end in ((4, "3"), (1, "6"))]
    assert [len(part.splitlines()) for part in parts] == [3, 3]
    same_losses(whole, "".join(parts))
    shows("resume", "".join(parts))


@pytest.mark.limit(240)
def test_the_slurm_script_starts_two_nodes(tmp_path: Path) -> None:
    """Slurm's two commands are replaced: both nodes are this machine."""
    put(tmp_path / "scontrol", "echo 127.0.0.1; echo 127.0.0.2")
    put(tmp_path / "srun", '"$@" & "$@"; code=$?; wait $! && exit $code')
    put(tmp_path / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_GPUS_ON_NODE": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", str(FOLDER / "multi_node.sbatch")],
        cwd=ROOT, env={**os.environ, **slurm, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    same_losses(output(1, "multi_node"), done.stdout)


def put(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/bash\n{command}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_and_has_a_page(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 60
    page = (ROOT / "docs" / "recipes" / f"{name}.md").read_text()
    assert f"[examples/recipes/{name}.py](../../examples/recipes/{name}.py)\n" in page
    assert f"]({name}.md)" in (ROOT / "docs" / "recipes" / "index.md").read_text()
