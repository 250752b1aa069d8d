"""The packages of a release: they hold what they should, install without a compiler, and run
README's program where no checkout is in sight. ``make dist`` builds and checks the real ones."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import environments, packages
from tests.support.pages import program

# Of the running Python, as it is: the sdist without the network.
OFFLINE = ("--no-index", "--no-build-isolation")
COMPILES = find_spec("disttensor.dispatch._native") is not None
ACTIVE = "from disttensor.dispatch import native; print(native.active(), native.__file__)"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packages.make_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packages.make_wheel(sys.executable, sdist, tmp_path_factory.mktemp("wheel"), *OFFLINE)


def newest_sites() -> list[str]:
    """The packages of the environment of ``make newest`` if it is there, else of this one."""
    newest = f"torch-{environments.torches()[0]}-python-{environments.pythons()[0]}"
    home = environments.folder() / newest
    major, minor = sys.version_info[:2]
    found = list(home.glob(f"lib/python{major}.{minor}/site-packages"))
    return [*map(str, found)] if (home / "installed.txt").exists() and found else packages.SITES


@pytest.mark.limit(120)
def test_packages_hold_the_code_the_types_and_the_licence_alone(sdist: Path, wheel: Path) -> None:
    packages.check_sdist(sdist)
    packages.check_wheel(wheel, compiled=COMPILES)


@pytest.mark.limit(120)
def test_the_wheel_runs_readme_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    python = packages.bare_environment(tmp_path / "environment", wheel, newest_sites())
    (tmp_path / "train.py").write_text(f"{program('README.md')}\n{ACTIVE}\n")
    printed = packages.run(str(python), "train.py", cwd=tmp_path).splitlines()
    language, file = printed[-1].split(" ", 1)
    assert file.startswith(f"{tmp_path}/environment/")
    assert language == "C" or not COMPILES


@pytest.mark.limit(120)
def test_without_a_compiler_the_sdist_installs(sdist: Path, tmp_path: Path) -> None:
    wheel = packages.make_wheel(sys.executable, sdist, tmp_path, *OFFLINE, CC="false")
    packages.check_wheel(wheel, compiled=False)
    python = packages.bare_environment(tmp_path / "environment", wheel, packages.SITES)
    printed = packages.run(str(python), "-c", ACTIVE, cwd=tmp_path)
    assert printed.startswith("Python (it was not compiled: no C compiler was found)")
