"""The torch that disttensor runs on: what is tested, and what it says on another."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import disttensor
from disttensor import versions

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PIN = re.compile(r"^torch==([\d.]+)$", re.MULTILINE)


def test_the_version_stands_in_one_place() -> None:
    text = (ROOT / "disttensor" / "versions.py").read_text()
    assert f'\n__version__ = "{disttensor.__version__}"' in text  # a literal: read, not imported
    attribute = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "disttensor.versions.__version__"
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    releases = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == disttensor.__version__
    assert releases == sorted(releases, key=versions.number, reverse=True)


def test_a_deprecation_names_the_release_that_ends_it() -> None:
    """It fails in that release, until what it warns of is removed."""
    this = versions.number(disttensor.__version__)
    files = [*(ROOT / "disttensor").rglob("*.py"), *(ROOT / "ops").rglob("*.py")]
    texts = {file: file.read_text() for file in files}
    warning = {file: text for file, text in texts.items() if "DeprecationWarning," in text}
    for file, text in warning.items():
        ends = re.findall(r"(?:removed|refused) in (\d+\.\d+)", text)
        assert ends, f"{file}: the warning does not say which release ends it"
        assert all(versions.number(end) > this for end in ends), f"{file}: it ends in {ends}"


def import_on(version: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """``import disttensor`` on this torch under the name of another, after the statements
    ``first``."""
    code = f"import torch; torch.__version__ = {version!r}\n{first}\nimport disttensor"
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)


def test_the_lists_of_versions_agree() -> None:
    tested = PIN.findall((ROOT / "constraints-torch.txt").read_text())
    numbers = [tuple(map(int, version.split("."))) for version in tested]
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[-1][:2], numbers[0][:2]) == (versions.OLDEST, versions.NEWEST)
    assert PIN.findall((ROOT / "constraints.txt").read_text())[0] in tested
    oldest = versions.dotted(versions.OLDEST)
    assert [d for d in PROJECT["dependencies"] if d.startswith(f"torch>={oldest},")]


def test_an_older_torch_is_refused_with_the_range() -> None:
    words = r"tested on torch 2\.12 to 2\.15, and this is torch 2\.11\.0\+cpu.*'torch>=2\.12'$"
    with pytest.raises(ImportError, match=words), versions.importing("2.11.0+cpu"):
        pytest.fail("nothing is imported")


def test_an_unknown_newer_torch_imports() -> None:
    done = import_on("2.16.0.dev20270101")
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_newer_torch_without_what_is_needed_is_one_error_with_the_range() -> None:
    done = import_on("2.16.0", "del torch.autograd.Function\nimport ops")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: disttensor is tested on torch 2.12 to 2.15, and does not")
    assert "torch 2.16.0" in last and last.endswith("pip install 'torch<2.16'")
    assert re.search(r"\.py:\d+: AttributeError: .*'Function'", last)
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.parametrize("version", ["2.15.3", "2.12.0", "2.13.0+cpu"])
def test_on_a_tested_torch_an_error_passes_as_it_is(version: str) -> None:
    with pytest.raises(AttributeError, match="here"), versions.importing(version):
        raise AttributeError("here")


@pytest.mark.parametrize("version", ["2.16.0", "3.0.1", "a name of its own"])
def test_a_package_that_is_missing_is_not_torchs_fault(version: str) -> None:
    with pytest.raises(ModuleNotFoundError), versions.importing(version):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
    with pytest.raises(ImportError, match=f"torch {version}, where"), versions.importing(version):
        raise ModuleNotFoundError("No module named 'torch.moved'", name="torch.moved")


class Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return a * by

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, g: torch.Tensor):
        return g * ctx.by, None


def test_custom_functions_on_plain_tensors_stay_what_they_are() -> None:
    """``disttensor.custom`` stands before ``Function.apply``, which is C since torch 2.14."""
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(Scale.apply(x, 3.0).sum(), x)
    assert gradient.tolist() == [3.0] * 3
    assert torch.func.grad(lambda t: Scale.apply(t).sum())(torch.ones(2)).tolist() == [2.0] * 2
    assert torch.func.vmap(Scale.apply)(torch.ones(2, 1)).tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_as_before_the_import(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with versions.importing():
            assert not gc.isenabled()
        with pytest.raises(AttributeError), versions.importing():
            raise AttributeError
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
