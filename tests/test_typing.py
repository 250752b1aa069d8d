"""A user's script type-checks: mypy finds no error in README's code, in the examples, and in what
scripts do with a DistTensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, program

pytest.importorskip("mypy")

# Beside the options of lint, so that torch and our packages are read once for both: a script is not
# strict.
OPTIONS = """
[[tool.mypy.overrides]]
module = {scripts}
disallow_any_generics = false
disallow_incomplete_defs = false
disallow_untyped_defs = false
warn_unused_ignores = false

[[tool.mypy.overrides]]
module = ["transformers.*", "peft.*", "matplotlib.*"]
ignore_missing_imports = true
"""

SCRIPT = """
from dataclasses import dataclass

import torch
from typing_extensions import assert_type

import disttensor as dt

mesh = dt.init_mesh((1, 1), ("dp", "tp"))


@dataclass(frozen=True)
class Cyclic(dt.Shard):
    pass


x = dt.reshard(dt.ones(4, 6, mesh=mesh, requires_grad=True), mesh, [Cyclic(0), dt.Replicate()])
assert_type(x, dt.DistTensor)
assert_type(x.full_tensor(), torch.Tensor)
assert_type(x.to_local(grad_axes="tp"), torch.Tensor)
assert_type(x.process_mesh, dt.ProcessMesh)
assert_type(x.placements, tuple[dt.Placement, ...])
assert_type(x.grad, dt.DistTensor | None)
assert_type(x.detach(), dt.DistTensor)
assert_type(x.requires_grad_(), dt.DistTensor)
assert_type(x.shape, torch.Size)
assert_type(x.dtype, torch.dtype)
assert_type(x.device, torch.device)
assert_type(x.ndim, int)
assert_type(x.is_leaf, bool)
assert_type(x.nbytes, int)
assert_type(dt.__version__, str)
x.sum().backward()
x.register_hook(lambda g: g * 2)
x.grad = torch.zeros(4, 6)
x.requires_grad = False
for p in torch.nn.Linear(2, 2).parameters():
    if isinstance(p, dt.DistTensor):
        print(p.spec, p.local, p.dims_mapping, p.partial_status, p.item())
"""

WRONG = """
import disttensor as dt

mesh = dt.init_mesh((1,))
dt.reshard(dt.ones(4, mesh=mesh), mesh, ["S(0)"])
dt.ones(4, mesh=mesh).full_tensr()
"""


@pytest.mark.slow
@pytest.mark.limit(600)
def test_scripts_type_check(tmp_path: Path) -> None:
    """One run of mypy: what it costs is to read torch."""
    pages = {"readme": program("README.md"), "features": program("docs/features.md")}
    sources = {**pages, "script": SCRIPT, "wrong": WRONG}
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    files = [*tmp_path.glob("*.py"), *(ROOT / "examples").glob("*.py")]
    config, ours = tmp_path / "pyproject.toml", (ROOT / "pyproject.toml").read_text()
    config.write_text(ours + OPTIONS.format(scripts=[f.stem for f in files]))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=590)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [e for e in errors if "wrong.py" not in e] == [], done.stdout + done.stderr
    assert len(errors) == 2 and '"full_tensr"' in errors[1], done.stdout + done.stderr
