"""python -m disttensor.run, disttensor.doctor, and the calls in a notebook."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from disttensor import doctor, run
from disttensor.dispatch import native
from disttensor.launching import script
from tests.support import forked

FAILING = """
import os, sys, time
print(sys.argv[1:], flush=True)
open("printed" + os.environ["RANK"], "w").close()
def fail():
    {error}
if os.environ["RANK"] == "1":
    while not os.path.exists("printed0"):  # its end would end rank 0
        time.sleep(0.01)
    fail()
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (
            "__import__('json').loads('[')",
            1,
            "failing.py:6, in fail: __import__('json').loads('[')\n",
        ),
        ("sys.exit('no data')", 1, "error: no data\n"),
        ("sys.exit(5)", 5, ""),
    ],
)
@pytest.mark.parametrize("how", ["script", "module"])
def test_the_first_error_is_printed_once(
    how: str, error: str, status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(FAILING.format(error=error))
    monkeypatch.chdir(tmp_path)
    command = ["-m", "failing"] if how == "module" else ["failing.py"]
    code, out = forked.run(lambda: run.main(["--nproc", "2", *command, "--lr", "1"]))
    assert code == status and words in out, out
    assert out.count("['--lr', '1']") == 2 and out.count("rank 1: ") == bool(words), out
    assert "runpy" not in out and "script.py" not in out, out


def test_a_rank_ends_whose_launcher_has_ended_before_it_started(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    (tmp_path / "rank.py").write_text("import time\ntime.sleep(60)")
    command = [sys.executable, script.__file__, str(tmp_path / "rank.py")]
    env = {**os.environ, "DISTTENSOR_PARENT": str(launcher.pid)}
    assert subprocess.run(command, env=env, timeout=40).returncode == 1


def test_a_restarted_rank_prints_its_error_itself(tmp_path: Path) -> None:
    """The launcher knows the error of the last attempt only."""
    once = tmp_path / "once.py"
    once.write_text(
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('once')"
    )
    code, out = forked.run(lambda: run.main(["--nproc=1", "--max-restarts=1", str(once)]))
    assert code == 0 and out.count("ValueError: once") == 1, out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc", "0", __file__], "--nproc 0: a whole number from 1 up is expected"),
        (["--nproc", "two", __file__], "--nproc two: a whole number from 1 up is expected"),
        (["--nproc", "2", "nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_a_command_line_that_cannot_run_is_one_error(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(options)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_the_doctor_reports_versions_the_machine_and_an_all_reduce(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main() == 0
    out = capsys.readouterr().out
    for name in ("disttensor", "torch", "python", "calls run in", "shared memory", "loopback"):
        assert f"\n{name}:" in f"\n{out}", out
    assert "all-reduce gives [3.0, 3.0] in" in out and out.endswith("\nall is well\n")


def test_the_doctor_says_what_is_wrong_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise TimeoutError("ranks [1] had not ended")

    monkeypatch.setattr(doctor, "launch", fails)
    monkeypatch.setattr(native, "why", "it was compiled from another native.c: run make native")
    assert doctor.main() == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert wrong == [
        "WRONG  calls run in: it was compiled from another native.c: run make native",
        "WRONG  two ranks: the all-reduce failed, see above",
    ]


CELLS = [
    """
import disttensor as dt
def total(n):
    x = dt.ones(n, mesh=dt.init_mesh((2,)), placements=[dt.Shard(0)])
    print("of", n)
    return x.sum().item()
dt.launch(total, 2, (5,))
""",
    """
with dt.local_ranks(2, output="all") as rank:
    x = dt.arange(3, mesh=dt.init_mesh((2,)), placements=[dt.Shard(0)])
    print("rank", rank, dt.debugging.pieces(x))
""",
    "def bad(): raise ValueError('a bad value')\ndt.launch(bad, 2)",
    "dt.launch(total, 2, (3,))",
]


@pytest.mark.skipif(not importlib.util.find_spec("nbclient"), reason="needs nbclient")
def test_ranks_start_in_a_notebook() -> None:
    nbformat, nbclient = (importlib.import_module(name) for name in ("nbformat", "nbclient"))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=60, allow_errors=True).execute()
    values, texts, errors = [], [], []
    for outputs in (cell.outputs for cell in book.cells):
        values.append([o.data["text/plain"] for o in outputs if o.output_type == "execute_result"])
        text = "".join(o.text for o in outputs if o.output_type == "stream")
        texts.append(sorted(line for line in text.splitlines() if line))
        errors.append([o.evalue for o in outputs if o.output_type == "error"])
    assert values == [["[5.0, 5.0]"], [], [], ["[3.0, 3.0]"]], book
    pieces = "[tensor([0, 1]), tensor([2])]"
    assert texts[:2] == [["of 5"] * 2, [f"[rank 1] rank 1 {pieces}", f"rank 0 {pieces}"]]
    assert not errors[0] and not errors[1] and "ValueError: a bad value" in errors[2][0]
