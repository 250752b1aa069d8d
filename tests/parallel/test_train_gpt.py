"""examples/train_gpt.py as users run it: the same losses on any mesh, and a quick clear end."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import disttensor as dt
from tests.support.examples import example, printed_by
from tests.support.part import part
from tests.support.pool import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LAUNCH = [sys.executable, "-m", "disttensor.run", "--nproc", "4"]
TINY = [
    "--layers=2", "--width=32", "--heads=4", "--context=16", "--batch=4", "--bytes=200000",
    "--lr=1e-3",
]  # fmt: skip

PATIENCE = 100.0  # seconds for a job that is not stuck
SECONDS = 20.0  # "within seconds": torchrun waits 30 s for ranks that do not end


@contextlib.contextmanager
def job(command: list[str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A running job. However the block ends, no process of it is left."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    pipe = subprocess.PIPE
    # A shell has SIGINT ignored in what it runs in the background, and a child inherits that. What
    # is caught here is not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        try:
            yield process
        finally:
            ranks = ranks_of(process.pid)
            process.kill()
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that ``launcher`` has started, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


# On the workers of tests/support/pool.py: what takes long is to start processes -------------------


def short_run(options: str, folder: str) -> tuple[list[float], str]:
    """On a rank of a running world: the losses, the validation's behind them, and what the model
    writes."""
    file = Path(folder, f"{time.monotonic_ns()}-{os.getpid()}.json")
    sys.modules.setdefault("matplotlib.figure", None)  # type: ignore[arg-type]  # no curve
    short = ["--steps=2", "--checks=1", "--sample=2", "--plot=", f"--losses={file}"]
    try:
        out = printed_by("train_gpt", *TINY, *short, *options.split())
    finally:
        if sys.modules["matplotlib.figure"] is None:
            del sys.modules["matplotlib.figure"]
    written = json.loads(file.read_text())
    return [*written["losses"], *written["validation"]], out.partition(" a prompt ")[2]


@functools.cache
def short_run_of_one(options: str, folder: str) -> tuple[list[float], str]:
    return run_on_ranks(1, short_run, options, folder, timeout=PATIENCE)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("short"))


EXACT = "--dtype=float64 --batch=8"
# Of losses of 5.5; measured for bf16 and fp16: 2e-4 and 4e-5.
INEXACT = {"bf16": 1e-3, "fp16": 2e-4, "float32": 1e-5}


STRATEGIES = [
    ("--dp=4 --accumulate=2 --segment-mb=0.02 --recompute", "--dtype=float64 --batch=6"),
    ("--dp=2 --tp=2", "--dtype=float32 --batch=8"),
    ("--sharding=4 --zero=1", EXACT),
    ("--sharding=4 --zero=3 --accumulate=2", EXACT),
    ("--sharding=4 --zero=2 --segment-mb=0.02 --accumulate=2", EXACT),
    ("--sharding=4 --anchors blocks.1 norm --accumulate=2", "--dtype=float64 --batch=6"),
    ("--sharding=2 --dp=2 --accumulate=2 --segment-mb=0.02", EXACT),
    ("--sharding=2 --tp=2 --zero=3 --recompute", f"{EXACT} --tie"),
    ("--sharding=2 --cp=2 --zero=2 --attention=ring", EXACT),
    ("--sharding=2 --tp=2 --recompute", f"{EXACT} --experts=5"),
    ("--pp=2 --dp=2 --accumulate=2", f"{EXACT} --experts=4"),
    ("--pp=4", EXACT),
    ("--pp=2 --dp=2 --schedule=gpipe --accumulate=2", EXACT),
    ("--pp=2 --dp=2 --schedule=zero_bubble", f"{EXACT} --tie"),
    ("--pp=2 --tp=2 --recompute", f"{EXACT} --tie"),
    ("--pp=2 --sharding=2", f"{EXACT} --tie"),
    ("--pp=2 --sharding=2 --zero=1 --segment-mb=0.01", EXACT),
    ("--pp=2 --sharding=2 --zero=2 --schedule=interleaved_1f1b --recompute", EXACT),
    ("--dp=2 --sharding=2 --accumulate=2", "--amp=bf16 --batch=8"),
    ("--sharding=2 --tp=2 --zero=2", "--amp=fp16 --batch=8"),
    ("--pp=2 --sharding=2 --recompute", "--amp=fp16 --batch=8"),
]


@pytest.mark.limit(240)
@pytest.mark.parametrize(("mesh", "model"), part(STRATEGIES, 7))
def test_any_strategy_has_the_losses_of_one_process(mesh: str, model: str, folder: str) -> None:
    expected, its_text = short_run_of_one(model, folder)
    ranks = run_on_ranks(4, short_run, f"{mesh} {model}", folder, timeout=PATIENCE)
    losses, text = ranks[0]
    assert len(losses) == 3 and len(set(losses)) == 3
    assert all(other == ranks[0] for other in ranks)
    inexact = next((name for name in INEXACT if name in model), None)
    assert losses == pytest.approx(expected, rel=0, abs=INEXACT[inexact] if inexact else 1e-12)
    assert text == its_text or inexact


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_rank_that_dies_is_followed_by_a_restart_from_the_newest_checkpoint(
    folder: str, tmp_path: Path
) -> None:
    """Under torchrun; and then another strategy goes on with what that has saved."""
    options = f"{EXACT} --tie --steps=40 --save={tmp_path}/run --every=10"
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=3", SCRIPT, "--sharding=2", *TINY]
    command += [*options.split(), "--checks=1", "--sample=2", "--losses=losses.json"]
    with job(command, tmp_path) as process:
        while not list(tmp_path.glob("run/0*-step-10")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert re.search(r"going on after step [123]0, from", out), out
    assert all(words in out for words in ("40/40", "tokens/s", "validation loss", "loss curve"))
    expected, its_text = short_run_of_one(f"{EXACT} --tie --steps=40", folder)
    assert "Warning" not in err, err
    written = json.loads((tmp_path / "losses.json").read_text())
    assert (len(written["losses"]), len(written["validation"])) == (40, 1)
    losses = [*written["losses"], *written["validation"]]
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)
    assert losses[39] < losses[0] - 0.1
    assert out.partition(" a prompt ")[2].startswith(its_text)  # what the model writes
    for other in run_on_ranks(4, short_run, f"--pp=2 --tp=2 {options}", folder, timeout=PATIENCE):
        assert other[0][:40] == losses[:40] and other[1] == its_text
        assert other[0] == pytest.approx(losses, rel=0, abs=1e-12)


LOOP = """
import disttensor as dt

x = dt.ones(5, mesh=dt.init_mesh((4,), ("dp",)), placements=[dt.Shard(0)])
print(x.sum().item(), "tokens/s", flush=True)
while True:
    x.sum().item()
"""


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """As in a job of a shell that was started with &."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.usefixtures("in_the_background")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize(
    ("script", "victim", "by", "message"),
    [
        ("loop.py", "rank 2", signal.SIGKILL, "was killed by SIGKILL"),
        (SCRIPT, "launcher", signal.SIGINT, "interrupted: all 4 processes have ended"),
    ],
    ids=["killed rank", "ctrl-c"],
)
def test_all_ranks_end_within_seconds_with_one_line(
    script: str, victim: str, by: signal.Signals, message: str, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    with job([*LAUNCH, script, "--pp=2", "--tp=2", *TINY, "--steps=100000"], tmp_path) as process:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if "tokens/s" in line:
                break
        else:
            assert process.stderr is not None
            pytest.fail(seen + process.stderr.read())
        ranks = ranks_of(process.pid)
        assert len(ranks) == 4
        os.kill(process.pid if victim == "launcher" else ranks[2], by)
        killed = time.monotonic()
        _, err = process.communicate(timeout=PATIENCE)
        took = time.monotonic() - killed
    assert took < SECONDS
    assert process.returncode not in (0, None)
    assert message in err
    assert len(err.split("\n")) <= 3, err  # an empty line, the message, its end
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--batch=6 --accumulate=4", "--batch 6 is not a multiple of --accumulate 4"),
        ("--width=30 --heads=4", "--width 30 is not a multiple of --heads 4"),
        ("--schedule=2f2b", "invalid choice: '2f2b'"),
        ("--pp=2", "pp=2 needs a multiple of 2 processes, and the world has 1. Start 2, or"),
        ("--dp=2 --tp=3", "dp=2 x tp=3"),
        ("--zero=4", "--zero: invalid choice: "),
        ("--zero=2 --sharding=1", "--zero 2 splits over --sharding, which is 1"),
        ("--segment-mb=8 --anchors blocks.1", "--anchors: not allowed with argument --segment-mb"),
        ("--segment-mb=0", "a positive size"),
        ("--anchors blocks.6", "--anchors blocks.6: the layers are tok, pos, blocks.0"),
        ("--anchors norm norm", "twice"),
        ("--amp=fp16 --dtype=float64", "--amp fp16 and --dtype float64 exclude each other"),
        ("--pp=8 --layers=2", "--layers 2 are too few for --pp 8"),
    ],
)
def test_options_that_do_not_fit(options: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options.split()])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match=re.escape(words)):
        example("options").parse_args()


def test_options_are_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "--pp=2 --dp=3 --sharding=4 --cp=1 --tp=2 --zero=2 --segment-mb=8 --amp=bf16 --recompute"
    said += " --attention=heads"
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *said.split()])
    monkeypatch.setenv("WORLD_SIZE", "48")
    args = example("options").parse_args()
    assert (args.accumulate, args.visits) == (4, 1)
    assert args.strategy == dt.Strategy(
        pp=2, dp=3, sharding=4, cp=1, tp=2, zero_stage=2, segments=dt.fsdp.SegmentBySize(8.0),
        accumulate_steps=4, attention="heads", amp="bf16", recompute=["blocks.*"],
    )  # fmt: skip
    other = "--anchors blocks.1 norm --accumulate=2"
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *other.split()])
    assert example("options").parse_args().strategy == dt.Strategy(
        pp=1, segments=dt.fsdp.SegmentByAnchors(["blocks.1", "norm"]), accumulate_steps=2
    )


def test_a_batch_depends_on_seed_and_step_only(tmp_path: Path) -> None:
    text = example("text")
    (tmp_path / "a").write_bytes(bytes(range(200)))
    data = text.read_text([tmp_path / "a"])
    inputs, targets = text.sample_batch(data, 3, 5, seed=1, step=7)
    again, _ = text.sample_batch(data, 3, 5, seed=1, step=7)
    other, _ = text.sample_batch(data, 3, 5, seed=1, step=8)
    assert inputs.shape == targets.shape == (3, 5)
    assert inputs.equal(again) and not inputs.equal(other)
    assert targets.equal(inputs + 1)  # in this text each byte is one more than the one before


def test_text_that_is_too_short_is_refused_with_the_length_it_needs() -> None:
    text = example("text")
    with pytest.raises(SystemExit, match=r"has 100 bytes, and with a context of 64 .* 130"):
        text.split(text.torch.zeros(100, dtype=text.torch.uint8), context=64)


def test_help_lists_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        example("options").parse_args()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for option in (
        "--pp",
        "--dp",
        "--sharding",
        "--zero",
        "--segment-mb",
        "--anchors",
        "--accumulate",
        "--amp",
        "--recompute",
        "--tp",
        "--schedule",
        "--layers",
        "--data",
        "--steps",
        "--dtype",
        "--save",
        "--every",
        "--losses",
    ):
        assert option in out
