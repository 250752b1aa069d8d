"""The pool itself: what it gives back; every failure of a rank is named, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import RanksFailed, fake_world, on_ranks, run_on_ranks

SCALES = [lambda x: 2 * x, lambda x: 3 * x]


def sum_of_ranks() -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def on_rank_1(act: Any) -> None:
    """``act`` on rank 1, while the others wait for it."""
    if dist.get_rank() == 1:
        act()
    dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_gives_its_result(world: int) -> None:
    assert run_on_ranks(world, dist.get_rank) == list(range(world))
    assert run_on_ranks(world, sum_of_ranks) == [world * (world - 1) / 2] * world


@on_ranks(4)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("word", ["a", "b"])
def test_parameters_and_fixtures_reach_the_ranks(word: str, scale: Any, tmp_path: Path) -> None:
    assert dist.get_world_size() == 4
    assert word in ("a", "b") and tmp_path.is_dir() and scale(1) in (2, 3)
    assert torch.get_num_threads() == 1


def test_workers_are_kept_between_calls() -> None:
    assert run_on_ranks(2, os.getpid) == run_on_ranks(2, os.getpid)


def test_every_call_starts_from_the_same_seed() -> None:
    first, second = (run_on_ranks(2, torch.rand, 3) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], first[1])


def test_what_a_body_has_patched_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_ranks(2)
    def body(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "sleep", None)
        monkeypatch.setenv("PATCHED", "1")

    body(monkeypatch)
    assert run_on_ranks(2, lambda: time.sleep is None or "PATCHED" in os.environ) == [False] * 2


def test_functions_without_a_name_travel() -> None:
    offset = 10
    assert run_on_ranks(2, lambda step=1: dist.get_rank() * step + offset) == [10, 11]


def test_exception_on_one_rank_is_named() -> None:
    def act() -> None:
        raise ValueError("no such placement")

    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(4, on_rank_1, act)
    text = str(failure.value)
    assert text.startswith("rank 1 of 4 raised:")
    assert "in act" in text and "ValueError: no such placement" in text
    assert run_on_ranks(4, dist.get_rank) == [0, 1, 2, 3]


def test_equal_failures_stand_together() -> None:
    def body() -> None:
        assert dist.get_world_size() == 3, "wrong world"

    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(2, body)
    assert str(failure.value).startswith("ranks 0, 1 of 2 raised:")
    assert str(failure.value).count("wrong world\nassert 2 == 3") == 1


def test_hanging_rank_is_ended_and_named() -> None:
    def nap() -> None:
        time.sleep(1000)

    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(2, lambda: nap() if dist.get_rank() == 1 else None, timeout=3)
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert text.startswith("rank 1 of 2 hung:\nstill running after 3 s")
    assert "in nap" in text and "rank 0" not in text
    assert run_on_ranks(2, dist.get_rank) == [0, 1]


def test_rank_that_waits_in_a_collective_is_shown() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(RanksFailed, match=r"rank 0 of 2 hung:\n(.*\n)+.*in barrier"):
        run_on_ranks(2, body, timeout=3)


def test_dying_rank_is_named() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_on_ranks(4, on_rank_1, lambda: os._exit(7))
    assert "rank 1 of 4 died:\nthe process ended (exit code 7)" in str(failure.value)
    assert run_on_ranks(4, dist.get_rank) == [0, 1, 2, 3]


def test_warning_on_a_rank_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="UserWarning: look"):
        run_on_ranks(2, warnings.warn, "look")


@pytest.mark.filterwarnings("ignore:look:UserWarning")
def test_warning_filters_of_the_test_hold_on_ranks() -> None:
    run_on_ranks(2, warnings.warn, "look")


def test_skip_on_all_ranks_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="no device"):
        run_on_ranks(2, pytest.skip, "no device")


def test_workers_end_with_the_process_that_started_them() -> None:
    script = (
        "import os; from tests.support.pool import run_on_ranks;"
        "print(*run_on_ranks(2, os.getpid), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    end = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if _alive(pid)]}"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_fake_world_is_large_and_leaves_nothing_behind() -> None:
    with fake_world(1024, rank=5):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 1024)
        dist.all_reduce(torch.ones(3))
        with pytest.raises(RuntimeError, match="already has a process group of 1024"):
            fake_world(2).__enter__()
    assert not dist.is_initialized()


def test_decorated_test_fails_with_the_text_of_its_ranks() -> None:
    @on_ranks(2)
    def test() -> None:
        raise ValueError("no such placement")

    text = r"ranks 0, 1 of 2 raised:(.|\n)*no such placement"
    with pytest.raises(pytest.fail.Exception, match=text) as failure:
        test()
    assert failure.value.__context__ is None
