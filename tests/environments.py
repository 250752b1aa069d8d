"""An environment for each torch and Python that is tested, kept in a folder outside of the
checkout.

The folder is ``$DISTTENSOR_ENVIRONMENTS``, or ``disttensor/environments`` where caches are kept
(``$XDG_CACHE_HOME``, or ``~/.cache``). An environment holds what the package and its tests need,
and not the package: that is found by PYTHONPATH, so that all checkouts share it. Made once, and
again when constraints.txt changes. Delete a folder to be rid of it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("test", "examples")
PATIENCE = 1500.0  # seconds for an installation: a build with CUDA is several gigabytes


class UnavailableError(Exception):
    """There is no such environment, and it cannot be made. The message is one line."""


class NoInterpreterError(UnavailableError):
    """The machine does not have this Python."""


def pins(file: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return [line for line in lines if line]


def torches() -> list[str]:
    """The tested versions, the newest first."""
    return [pin.removeprefix("torch==") for pin in pins("constraints-torch.txt")]


def pythons() -> list[str]:
    """The tested versions, the oldest first."""
    found = [re.fullmatch(r".*:: (3\.\d+)", text) for text in PROJECT["classifiers"]]
    return [match[1] for match in found if match]


def folder() -> Path:
    own = os.environ.get("DISTTENSOR_ENVIRONMENTS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else cache / "disttensor" / "environments"


def environment(torch: str, python: str) -> Path:
    """The interpreter of the environment, which is made where it is missing. Raises
    UnavailableError."""
    home = folder() / f"torch-{torch}-python-{python}"
    wanted = [f"torch=={torch}", *(p for p in pins("constraints.txt") if p[:7] != "torch==")]
    text = "".join(f"{pin}\n" for pin in wanted)
    done = home / "installed.txt"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:  # two runs may want the same one
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != text:
            (home / "constraints.txt").write_text(text)
            _install(home, python)
            (home / "constraints.txt").replace(done)
    return home / "bin" / "python"


def _install(home: Path, python: str) -> None:
    needs = [*PROJECT["dependencies"]]
    for extra in EXTRAS:
        needs += PROJECT["optional-dependencies"][extra]
    if not (home / "bin" / "pip").exists():
        _run(str(interpreter(python)), "-m", "venv", str(home))
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    _run(*pip, "--quiet", "--constraint", str(home / "constraints.txt"), *needs)


def interpreter(python: str) -> Path:
    """One that runs: a name on the PATH may be a shim of pyenv's for a version that is not switched
    on."""
    for candidate in _candidates(python):
        code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == python:
            return candidate
    raise NoInterpreterError(
        f"there is no Python {python} here with venv: no python{python} on the PATH"
    )


def _candidates(python: str) -> Iterator[Path]:
    on_path = shutil.which(f"python{python}")
    if on_path:
        yield Path(on_path)
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted(versions.glob(f"{python}.*/bin/python{python}"))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[2]} took longer than {PATIENCE:g} s") from None
    if done.returncode:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        told = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no words"]
        raise UnavailableError(f"{command[2]} failed: {told[-1]}")
