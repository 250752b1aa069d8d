"""The packages of a release: they hold what they should, install without a compiler, and run
README's program where no checkout is in sight. ``make dist`` builds and checks the real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from disttensor.versions import __version__
from tests import environments, packages
from tests.support.pages import ROOT, program

# Of the running Python, as it is: the sdist without the network.
OFFLINE = ("--no-index", "--no-build-isolation")
COMPILES = find_spec("disttensor.dispatch._native") is not None
ACTIVE = "from disttensor.dispatch import native; print(native.active(), native.__file__)"


(INSTALL,) = re.findall(
    "<!-- install: begin -->\n```sh\n(.*)\n```", (ROOT / "README.md").read_text()
)


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
def test_readme_runs_after_its_command(wheel: Path, tmp_path: Path) -> None:
    """The command as it is written, in a copy of the checkout; the wheel takes the place of a
    package index."""
    *command, source = INSTALL.split("#")[0].split()
    assert command == ["pip", "install"] and source in (".", "disttensor")
    checkout = packages.copy_checkout(tmp_path)
    given = source if source == "." else wheel
    python = packages.bare_environment(
        tmp_path / "environment", given, newest_sites(), cwd=checkout
    )
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


def test_the_command_of_an_installation_stands_in_one_place() -> None:
    """The pages of the site include it, and the page of a release says what changes there."""
    for page in ("docs/index.md", "docs/start/install.md"):
        assert 'README.md\n:start-after: "<!-- install: begin -->"' in (ROOT / page).read_text()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    assert sum(bool(re.match(r"pip install (\.|disttensor)( |$)", line)) for line in lines) == 1


def test_the_workflows_run_what_the_pages_say() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / ".github" / "workflows"
    ci, release = (yaml.safe_load((folder / f"{n}.yml").read_text()) for n in ("ci", "release"))
    steps = {name: job["steps"] for jobs in (ci, release) for name, job in jobs["jobs"].items()}
    assert steps["ci"][-1] == {"run": ".ci/run"}
    assert {"run": "make dist"} in steps["build"]
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as True
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    (pythons,) = (s["with"]["python-version"] for s in steps["build"] if "setup-python" in str(s))
    assert sorted(pythons.split()) == environments.pythons()
    (checks,) = (s["run"] for s in steps["build"] if "tag" in s.get("name", ""))
    for tag, status in (("v" + __version__, 0), ("v9.9.9", 1)):
        variables = {"PATH": os.environ["PATH"], "GITHUB_REF_NAME": tag}
        assert subprocess.run(["sh", "-c", checks], cwd=ROOT, env=variables).returncode == status
