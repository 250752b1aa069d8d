"""Programs whose ranks wait for ever: the rank that differs is named, by real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from disttensor.hangs import flight, watcher
from disttensor.hangs.diagnosis import diagnose, situation
from disttensor.hangs.flight import StartedCollective, show_ranks
from disttensor.hangs.status import WAITS, Status
from disttensor.hangs.watcher import Watch
from disttensor.simulate.world import simulated_rank
from tests.hangs.planted import PROGRAMS
from tests.support.part import part
from tests.support.pool import on_ranks

ROOT = Path(__file__).resolve().parents[2]
SOME = 4  # of all programs, in a run


def run(command, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.limit(400)
def test_the_cause_is_named():
    names = part(PROGRAMS, SOME)
    done = run([sys.executable, "-m", "tests.hangs.planted", *names])
    told = json.loads(done.stdout)
    for name in names:
        assert PROGRAMS[name][1] in told[name], f"{name}\n{told[name]}"


@pytest.mark.slow
def test_a_script_is_watched_without_changes(tmp_path):
    """A plain script of torch.distributed, which goes on after a rank was slow."""
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(10)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "time.sleep(3)\n"
    )
    command = [sys.executable, "-m", "disttensor.watch", "--nproc", "2", str(script)]
    done = run(command, DISTTENSOR_WATCH="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "rank 1 has not started all_reduce of [3] float (#1 of ranks 0, 1)" in done.stderr
    assert f"it sleeps at {script}:4" in done.stderr
    assert "watch: rank 0 goes on" in done.stderr


def test_a_look_at_the_collectives_imports_nothing(tmp_path):
    """An import in the thread that watches, beside one of the program, could break both."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from disttensor.hangs.flight import collectives, start_recorder\n"
        "from disttensor.torch_private import import_names_of_lines\n"
        "start_recorder()\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "before = {*sys.modules}\n"
        "assert not any(c.line for c in collectives()) and {*sys.modules} == before\n"
        "import_names_of_lines()\n"
        "print([c.line for c in collectives()])\n"
    )
    done = run([sys.executable, str(program)], PYTHONPATH=str(ROOT))
    assert done.stdout == f"['{program}:6']\n", done.stderr


def status(rank, doing=WAITS, **kwargs):
    base = Status(rank, f"a.py:{rank}", "f(x)", "", doing, 5.0, -1, "", [])
    return base._replace(**kwargs)


def call(number, words="all_reduce of [8] float", is_done=False, ranks=(0, 1, 2)):
    return StartedCollective("0", list(ranks), number, words, f"b.py:{number}", 5.0, is_done)


@on_ranks(2)
def test_a_simulation_does_not_end_the_watch(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    watch = Watch(1.0)
    reports = watch._connect()
    with simulated_rank(0, 4, data=True):
        assert watch._connect() is reports
    assert watch._connect() is reports is not None


@on_ranks(2)
def test_a_rank_that_ended_elsewhere_while_it_asked_silences_nobody(monkeypatch):
    monkeypatch.setattr(watcher, "_ANSWERS", 0.0)
    watch = Watch(1.0)
    reports = watch._connect()
    if not torch.distributed.get_rank():
        reports.store.set("asker", "7 0")  # which has no process here
        watch._ask(reports, status(0))
        assert not reports.store.add("asked", 0)
        watch._ask(reports, status(0))
        assert reports.store.add("asked", 0) == 1 and not reports.store.check(["asker"])
    torch.distributed.barrier()


def test_a_rank_that_lags_is_named_with_its_last_call():
    found = {0: status(0, collectives=[call(3)]), 2: status(2, collectives=[call(3)])}
    found[1] = status(1, "computes", error="ValueError: x", collectives=[call(2, is_done=True)])
    text = diagnose(found, {})
    assert "rank 1 has not started all_reduce of [8] float (#3 of ranks 0 to 2), in which ranks " \
        "0, 2 wait: it handles ValueError: x, and computes at a.py:1; its last of this group " \
        "is #2 at b.py:2" in text  # fmt: skip


def test_ranks_that_parted_are_told_apart():
    found = {r: status(r, collectives=[call(3, "barrier" if r == 2 else "sum")]) for r in range(3)}
    assert "ranks 0, 1 sum at b.py:3; rank 2 barrier at b.py:3" in diagnose(found, {})


def test_ranks_that_do_not_answer():
    found = {0: status(0, collectives=[call(1)])}
    text = diagnose(found, {1: "T", 2: ""})
    assert "rank 1 is stopped" in text and "rank 2 is gone" in text


def test_collectives_of_all_groups_are_in_the_order_of_their_start(monkeypatch):
    """The oldest one that has not ended is the one that a rank waits in."""

    def entry(group, number, retired):
        return {
            "process_group": (group, ""), "is_p2p": False, "collective_seq_id": number,
            "profiling_name": "gloo:all_reduce", "input_sizes": [[8]], "input_dtypes": ["Float"],
            "time_created_ns": 0, "retired": retired, "state": "scheduled", "frames": [],
        }  # fmt: skip

    record = [entry("b", n, n > 1) for n in range(1, 50)] + [entry("a", 1, False)]
    monkeypatch.setattr(flight, "flight_record", lambda: record)
    monkeypatch.setattr(flight, "members_of", lambda: {"a": [0, 1], "b": [0, 2]})
    found = flight.collectives()
    assert [(c.group, c.number) for c in found] == [
        ("b", 1),
        *[("b", n) for n in range(18, 50)],
        ("a", 1),
    ]
    assert status(0, collectives=found).pending() == found[0]


def test_a_situation_is_told_once():
    found = {0: status(0, collectives=[call(1)])}
    later = {0: status(0, seconds=9.0, collectives=[call(1)._replace(age=9.0)])}
    assert situation(found, {}) == situation(later, {})
    assert situation(found, {}) != situation({0: status(0, collectives=[call(2)])}, {})


def test_names_of_ranks():
    assert [show_ranks(r) for r in ([3], [0, 1], [2, 0, 1])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0 to 2",
    ]
