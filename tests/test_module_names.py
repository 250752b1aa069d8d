"""A user's own module named ``ops`` or ``reshard`` is refused, with the file and the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import ROOT


def own(folder: Path, name: str, is_package: bool) -> Path:
    """Makes a module that notes that it has run."""
    file = folder / name / "__init__.py" if is_package else folder / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("print('it ran')\n\ndef mine(): ...\n")
    return file


def run(path: list[Path], code: str) -> subprocess.CompletedProcess[str]:
    """Runs code with these folders on ``sys.path`` before the packages of this environment."""
    first = f"import sys; sys.path[:0] = {[*map(str, path)]}; "
    command = [sys.executable, "-c", first + code]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=100)


def folder_of(name: str) -> str:
    return f"disttensor needs its package {name!r} ({ROOT / name}), but another module of this name"


@pytest.mark.parametrize("is_package", [False, True])
@pytest.mark.parametrize("name", ["ops", "reshard"])
def test_a_module_that_hides_ours_is_refused_before_it_runs(
    name: str, is_package: bool, tmp_path: Path
) -> None:
    file = own(tmp_path, name, is_package)
    done = run([tmp_path, ROOT], "import disttensor")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {folder_of(name)} stands before that package on sys.path")
    assert repr(str(file)) in last and last.endswith(f"`from mypackage import {name}`.")
    assert "it ran" not in done.stdout and done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("is_package", [False, True])
def test_a_module_that_was_imported_before_is_refused(is_package: bool, tmp_path: Path) -> None:
    file = own(tmp_path, "ops", is_package)
    done = run([tmp_path, ROOT], "import ops, disttensor")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {folder_of('ops')} was imported before disttensor")
    assert repr(str(file)) in last and "Rename that module" in last


AFTER = """
import disttensor, ops, reshard, pickle
sys.path.insert(0, {folder!r})
assert not hasattr(ops, "mine") and hasattr(ops, "linalg")
from ops import linalg
for code in "ops.mine()", "from ops import mine", "reshard.mine()", "from reshard import mine":
    try:
        exec(code)
    except Exception as error:
        print(type(error).__name__, error, sep=": ")
"""


@pytest.mark.limit(100)
def test_a_module_that_ours_hides_is_named_where_its_names_are_missed(tmp_path: Path) -> None:
    files = own(tmp_path, "ops", False), own(tmp_path, "reshard", True)
    done = run([ROOT], AFTER.format(folder=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["AttributeError", "ImportError"] * 2
    for line, file in zip(lines, (files[0], files[0], files[1], files[1]), strict=True):
        name = "ops" if file == files[0] else "reshard"
        assert f"this is disttensor's package ({ROOT / name}), which was imported first" in line
        assert f"is {file}. Rename that module" in line


def test_other_folders_and_other_installations_are_no_conflict(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    (data / "ops").mkdir(parents=True)  # a folder of data, without Python
    (other / "disttensor").mkdir(parents=True)
    own(other / "disttensor", "versions", is_package=False)
    own(other, "ops", is_package=True)
    code = f"import ops; sys.path.append({str(other)!r}); print(ops.__file__); ops.mine"
    done = run([data, ROOT], code)
    assert done.stdout.strip() == str(ROOT / "ops" / "__init__.py")
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'ops' has no attribute 'mine'"
