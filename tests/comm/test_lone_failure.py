"""A call raises on one rank whose process lives: the other ranks end soon, with its error."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.survivors import PROGRAMS
from tests.support.part import part

ROOT = Path(__file__).resolve().parents[2]
FINE = ["alike-1", "alike-0", "alike_in_a_run-0", "alike_in_a_run-2", "goes_on-1", "all_catch-0"]
FINE += ["in_a_thread-0", "in_a_thread-1"]
# two ranks wait in one collective, this one in another: {name: that one}
OTHER = {"another_call-1": "all_gather", "read_on_one_rank-0": "start of the group"}
OTHER["facts_and_read-1"] = "exchange of facts"
RUNS = [name for name in PROGRAMS if name.endswith("ward") and name != "backward"]
CALLS = ["call-1", "known_call-0", "backward-2", "in_the_background-1"]
ALWAYS = [*CALLS, "zbv forward-1", "1f1b backward-1"]
ALL = [f"{name}-{rank}" for name, rank in itertools.product(RUNS, range(3))]


@pytest.mark.limit(200)
def test_ranks_that_wait_for_a_rank_whose_call_raised_name_it():
    names = list(dict.fromkeys([*ALWAYS, *OTHER, "two_reads-1", "caught-1", *part(ALL, 1), *FINE]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.comm.survivors", *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    for name, ranks in json.loads(done.stdout).items():
        failing = int(name.rsplit("-", 1)[1])
        for rank, (status, seconds, text) in enumerate(ranks):
            told = f"{name}: rank {rank}: {status} after {seconds} s\n{text}"
            if name in FINE:
                assert status == 0, told
            elif name in OTHER:
                assert status == 1, told
                assert "in different collectives" in text and OTHER[name] in text, told
                assert text.count("survivors.py:") >= 2, told
            elif name == "two_reads-1":
                assert status == 1 and "ranks read different values" in text, told
                assert "survivors.py:" in text and "rank 1: f32[]" in text, told
            elif name == "caught-1":
                assert status == 1 and "rank 1: f32[]" in text, told
                assert "after an error: _LinAlgError" in text, told
            elif rank == failing:
                assert status == 1 and "CommError" not in text, told
            elif status == 0:  # it needed nothing of that rank any more
                assert name.rsplit("-", 1)[0] in RUNS, told
            else:
                error = "Failure: out of cheese" if "ward" in name else "_LinAlgError"
                assert "CommError" in text and f"rank {failing} raised {error}" in text, told
                assert "survivors.py:" in text, told
