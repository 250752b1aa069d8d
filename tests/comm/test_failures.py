"""One rank fails: all end, soon, with an error that names it. Real scripts in processes of their
own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
import disttensor as dt

dt.init_mesh((3,), ("all",))
stages = [dt.ProcessMesh([rank], ("x",)) for rank in range(3)]
w = [dt.ones(4, 4, mesh=stage, requires_grad=True) for stage in stages]


def fails(g):
    raise ValueError("out of cheese")


x = dt.ones(2, 4, mesh=stages[0])
for number, stage in enumerate(stages):
    x = dt.reshard(x, stage) @ w[number]
    if number == 1 and stage.coordinate is not None:
        WHERE
x.sum().backward()
"""


def run_script(tmp_path, text):
    """(exit status, stderr) of three ranks, and how long it took."""
    file = tmp_path / "script.py"
    file.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, file], env={**env, "RANK": str(r)}, stderr=subprocess.PIPE, text=True
        )
        for r in range(3)
    ]
    try:
        started = time.monotonic()
        outs = [rank.communicate(timeout=80)[1] for rank in ranks]
        return [(rank.returncode, out) for rank, out in zip(ranks, outs, strict=True)], (
            time.monotonic() - started
        )
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.limit(100)
@pytest.mark.parametrize(
    "where", ['raise ValueError("out of cheese")', "x.register_hook(fails)"], ids=str
)
def test_the_rank_that_failed_is_named_by_all(tmp_path, where):
    """In the forward, where a later stage waits; in the backward, where an earlier one does."""
    ranks, seconds = run_script(tmp_path, SCRIPT.replace("WHERE", where))
    assert ranks[1][0] == 1 and "ValueError: out of cheese" in ranks[1][1]
    waiting = [0, 2] if "raise" in where else [0]
    for rank in waiting:
        status, text = ranks[rank]
        assert status == 1, text
        assert "CommError" in text and "rank 1 failed first: ValueError: out of cheese" in text
    assert seconds < 60
