"""The pages for people are true: their code runs on four processes and prints what they show; the
losses of README and of the features are those of one process.

A ``text`` block shows what rank 0 of four prints.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.examples import printed_by
from tests.support.pages import CHANGED, ROOT, blocks, program
from tests.support.pool import run_on_ranks

RUN_PAGES = str(Path(pages.__file__))
PAGES = sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LAUNCH = ["-m", "disttensor.run", "--nproc", "4"]
PATIENCE = 400.0  # seconds: all pages on four processes, which share two cores
PROGRAMS = [p for p in PAGES if program(p) and "coming_from" not in p]  # test_coming_from.py
LOSSES = ["README.md", "docs/features.md"]
EXAMPLES = {"ours.py", "theirs.py", "train.py"}  # files of the reader's own


def run(*command: str) -> str:
    """What a Python command prints. Fails with all its output where it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error::UserWarning",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def same_lines(text: str) -> str:
    """Without what moves when a page is edited (line numbers) or differs in width."""
    return "\n".join(
        " ".join(re.sub(r"(\.py|\.md):\d+", r"\1:N", line).split())
        for line in text.strip().splitlines()
    )


@pytest.fixture(scope="module")
def printed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, str]]:
    """What the pages that this session tests, and README, print on rank 0 of four processes; what
    those with losses print in one: two starts for all pages."""
    folder = tmp_path_factory.mktemp("printed")
    calls = [getattr(i, "callspec", None) for i in request.session.items if i.path == request.path]
    tested = {"README.md", *(call.params.get("page") for call in calls if call)}
    for processes, command in ((1, []), (4, LAUNCH)):
        run(
            *command,
            RUN_PAGES,
            str(folder / str(processes)),
            *filter(tested.__contains__, PROGRAMS if processes == 4 else LOSSES),
            *([CHANGED] if processes == 4 else []),
        )
    return {n: json.loads((folder / str(n)).read_text()) for n in (1, 4)}


@pytest.mark.feature("Extending")
@pytest.mark.limit(440)
@pytest.mark.parametrize("page", PROGRAMS)
def test_a_page_prints_on_four_ranks_what_it_shows(
    page: str, printed: dict[int, dict[str, str]]
) -> None:
    rest = same_lines(printed[4][page])
    for language, first, text in blocks(page):
        if language == "text":
            shown = same_lines(text)
            assert shown in rest, (
                f"{page}:{first} shows\n{shown}\nbut the page (from there) prints\n{rest}"
            )
            rest = rest[rest.index(shown) + len(shown) :]


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\b\d\.\d{4,6}\b", text)]


@pytest.mark.limit(440)
@pytest.mark.parametrize("page", LOSSES)
def test_a_page_gives_the_same_losses_on_one_process_and_on_four(
    page: str, printed: dict[int, dict[str, str]]
) -> None:
    one, four = (losses(printed[n][page]) for n in (1, 4))
    assert len(one) == (10 if page == "README.md" else 1)
    assert one == pytest.approx(four, abs=1.01e-4)  # README prints four digits


@pytest.mark.limit(440)
def test_readme_gives_the_same_losses_when_its_one_line_is_changed(
    printed: dict[int, dict[str, str]],
) -> None:
    assert "strategy = dt.Strategy(tp=2, pp=2)\n" in program(CHANGED)
    one, four = losses(printed[1]["README.md"]), losses(printed[4][CHANGED])
    assert one == pytest.approx(four, abs=1.01e-4)


def test_readme_fits_on_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.limit(440)
def test_megatron_mlp_is_one_all_reduce_each_way() -> None:
    one, four = (run_on_ranks(n, printed_by, "tensor_parallel")[0] for n in (1, 4))
    assert one.splitlines()[0] == four.splitlines()[0]  # the loss
    assert [line.split()[0] for line in one.splitlines()[1:]] == ["kind", "total"]
    calls = [line.split() for line in four.splitlines()[2:-1]]
    assert [(kind, axis, phase) for kind, axis, _, phase, *_ in calls] == [
        ("all_reduce", "tp", "forward"),
        ("all_reduce", "tp", "backward"),
    ]


FILES = [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if ".venv" not in p.parts]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", (ROOT / page).read_text()):
        assert name in EXAMPLES or any(f"/{file}".endswith(f"/{name}") for file in FILES), (
            f"{page} names {name}, and there is no such file"
        )


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    run(str(ROOT / "docs" / "floor_plan.py"), "--check")


def test_the_picture_of_the_ring_is_that_of_its_schedule() -> None:
    run(str(ROOT / "docs" / "ring.py"), "--check")


@pytest.mark.parametrize("page", [p for p in PAGES if p != "docs/operators.md"])
def test_prose_has_one_width(page: str) -> None:
    """100 columns, as in code; not tables, pictures and what stands as it was printed."""
    fenced = False
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        prose = not (fenced or line.startswith(("|", "!", "    ")))
        assert len(line) <= 100 or not prose, f"{page}:{number} has {len(line)} columns"
