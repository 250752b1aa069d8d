"""Builds the packages of a release, and checks them: ``make dist``.

    python -m tests.packages dist       an sdist, and a wheel for each tested Python of this machine

The tools of the extra ``dist`` are needed, and the network: pip builds each wheel from the sdist in
an environment of its own. The C code includes no header of torch and needs only libc, so a wheel
serves every torch, and every Linux with glibc 2.17 or newer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

from tests.environments import (
    PROJECT,
    ROOT,
    NoInterpreterError,
    interpreter,
    pythons,
)
from tests.test_typing import SCRIPT, WRONG

SOURCE = "disttensor/dispatch/native.c"
COMPILED = re.compile(r"disttensor/dispatch/_native\.[\w.-]+\.so")
PIP = ("-m", "pip", "--disable-pip-version-check")
SITES = [entry for entry in sys.path if Path(entry).name == "site-packages"]
BESIDE = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}

# The C module alone, which needs no torch: does it load in this Python?
LOAD = """
import glob, importlib.util, sys
(file,) = glob.glob(sys.argv[1] + "/disttensor/dispatch/_native.*.so")
spec = importlib.util.spec_from_file_location("_native", file)
importlib.util.module_from_spec(spec)
"""


def packaged() -> set[str]:
    """The files of the checkout that a wheel holds: the code of the packages, and its types."""
    found = (
        file
        for package in ("disttensor", "ops", "reshard")
        for file in (ROOT / package).rglob("*")
        if file.suffix in (".py", ".pyi") or file.name == "py.typed"
    )
    return {file.relative_to(ROOT).as_posix() for file in found}


def check_sdist(file: Path) -> None:
    """Raises AssertionError if the sdist lacks a file, or holds one that is not ours to ship."""
    with tarfile.open(file) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    held = {name for name in names if not name.startswith("disttensor.egg-info/")} - made
    _same(file, held, packaged() | BESIDE | {SOURCE})


def check_wheel(file: Path, *, compiled: bool = True) -> None:
    """Raises AssertionError unless the wheel holds the packages, the C module, the licence and
    the data of the project, and nothing else."""
    with zipfile.ZipFile(file) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        data = HeaderParser().parsestr(archive.read(f"{folder}/METADATA").decode())
    native = {name for name in names if COMPILED.fullmatch(name)}
    assert len(native) == compiled, f"{file.name} holds {len(native)} C modules"
    assert f"{folder}/licenses/LICENSE" in names, f"{file.name} has no licence"
    held = {name for name in names - native if not name.startswith(f"{folder}/")}
    _same(file, held, packaged())
    wanted = {
        "Version": re.escape(file.name.split("-")[1]),
        "Requires-Python": re.escape(PROJECT["requires-python"]),
        "License-Expression": re.escape(PROJECT["license"]),
        "Requires-Dist": "torch.*",
        "Description-Content-Type": "text/markdown",
    }
    for name, pattern in wanted.items():
        assert re.fullmatch(pattern, data[name] or ""), f"{file.name}: {name}: {data[name]}"


def _same(file: Path, held: set[str], wanted: set[str]) -> None:
    lacks, more = sorted(wanted - held), sorted(held - wanted)
    assert not (lacks or more), f"{file.name} lacks {lacks[:5]}, and holds besides {more[:5]}"


def bare_environment(
    folder: Path, source: str | Path, sites: Iterable[str], cwd: Path = ROOT
) -> Path:
    """Makes an environment, runs ``pip install SOURCE`` in the folder ``cwd`` for it, and shows it
    the packages of other environments.

    The folders stand in a .pth file, whose folders' own .pth files are not read: an editable
    checkout stays unseen. A build is done with the packages of the running Python.

    Returns:
        The interpreter.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3*/site-packages")
    options = ("--no-index", "--no-build-isolation", "--no-deps", "--no-compile", "-q")
    run(sys.executable, *PIP, "install", str(source), *options, "--target", str(site), cwd=cwd)
    (site / "others.pth").write_text("".join(f"{other}\n" for other in sites))
    return python


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    """Runs a command without PYTHONPATH. Returns its output, or raises an error that holds it."""
    ours = {"OMP_NUM_THREADS": "1", "DISTTENSOR_PYTHON": "0"}
    environment = {**os.environ, **ours, **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check_types(wheel: Path) -> None:
    """Runs mypy on programs of a user against the installed wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = bare_environment(folder / "environment", wheel, SITES)
        options = ("--python-executable", str(python), "--cache-dir", str(ROOT / ".mypy_cache"))
        for program in ("right", "wrong"):
            (folder / f"{program}.py").write_text(SCRIPT if program == "right" else WRONG)
            try:
                run(sys.executable, "-m", "mypy", *options, f"{program}.py", cwd=folder)
                found = ""
            except RuntimeError as error:
                found = str(error)
            errors = re.findall(r"error: (.*)", found)
            assert bool(errors) == (program == "wrong"), f"the {program} program: {errors}"
    assert any('"DistTensor" has no attribute "full_tensr"' in error for error in errors), errors


def copy_checkout(folder: Path) -> Path:
    """Copies the checkout without the files that builds have left. Returns the copy."""
    made = (".*", "build", "dist", "out", "*.egg-info", "*.so", "__pycache__")
    return shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*made))


def make_sdist(folder: Path) -> Path:
    """Builds the sdist from a copy of the checkout."""
    with tempfile.TemporaryDirectory() as name:
        copy = copy_checkout(Path(name))
        run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(folder), cwd=copy)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def make_wheel(python: str, sdist: Path, folder: Path, *options: str, **variables: str) -> Path:
    command = (python, *PIP, "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), *options)
    run(*command, str(sdist), **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build(folder: Path) -> list[Path]:
    """Builds the sdist, and of it a wheel for each tested Python that the machine has."""
    sdist = make_sdist(folder)
    check_sdist(sdist)
    print(f"{sdist.name}: {sdist.stat().st_size // 1024} KiB", flush=True)
    for version in pythons():
        try:
            python = str(interpreter(version))
        except NoInterpreterError as error:
            print(f"no wheel for Python {version}: {error}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as name:
            made = make_wheel(python, sdist, Path(name))
            # names the oldest glibc that has the symbols of the C module
            tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            repair = ("-m", "auditwheel", "repair", "--strip", "--wheel-dir", str(folder))
            run(sys.executable, *repair, str(made), PATH=tools)
            (wheel,) = folder.glob(f"*-cp{version.replace('.', '')}-*.whl")
            check_wheel(wheel)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(name)
            run(python, "-c", LOAD, name)
        print(f"{wheel.name}: {wheel.stat().st_size // 1024} KiB", flush=True)
    return [sdist, *sorted(folder.glob("*.whl"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where they are written: empty, or not there yet")
    folder = parser.parse_args().folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty: delete it first, or an older package is checked too")
    files = build(folder)
    print(run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files)), end="")
    own = f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
    check_types(next(file for file in files if own in file.name))
    print("mypy reads the types of the installed wheel")


if __name__ == "__main__":
    main()
