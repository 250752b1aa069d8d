"""Programs in which bugs are planted: the first tensor that differs is named, by real processes; a
program without a bug computes what one process computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import disttensor as dt
from disttensor.verification.fit import Batch, fits, share_batch
from tests.support.part import part
from tests.verify.planted import PROGRAMS, names

ROOT = Path(__file__).resolve().parents[2]
BUGS = [name for name in names() if "." in name]
SOME = 4  # bugs in a run, and half as many programs without one


def run(*command, folder=ROOT):
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, *command]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=1200
    )


@pytest.mark.slow
@pytest.mark.limit(1300)
def test_the_first_tensor_that_differs_is_named():
    chosen = [*part(BUGS, SOME), *part(PROGRAMS, SOME // 2)]
    done = run("-m", "tests.verify.planted", *chosen)
    assert done.returncode == 0, done.stderr
    said = {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}
    for name in chosen:
        program, _, bug = name.partition(".")
        if bug:
            place, kind = PROGRAMS[program][2][bug]
            assert f"first difference: {place}" in said[name] and kind in said[name], said[name]
        else:
            assert " ranks compute what one process computes" in said[name], said[name]


SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    x = torch.randn(4, 3)
    net(x.chunk(world)[rank]).square().mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= int(sys.argv[2]) or world
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("divisor", [0, 1])
def test_a_script_is_verified_without_changes(tmp_path, divisor):
    """A plain script of torch.distributed, with arguments of its own."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run(
        "-m", "disttensor.verify", "--nproc", "2", "--steps", "2", str(script), "5", str(divisor)
    )
    if divisor:
        assert done.returncode == 1
        assert "step 1, gradient: the gradient of weight at the optimizer step" in done.stderr
        assert "it is 2 times that of one process" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "2 ranks compute what one process computes" in done.stdout
        assert "of 2 steps" in done.stdout


WAITS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    dist.recv(torch.ones(1), 0)
dist.all_reduce(torch.ones(2))
"""


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_ended(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    done = run("-m", "disttensor.verify", "--nproc", "2", "--timeout", "8", str(script))
    assert done.returncode == 1 and "ranks [0, 1] of 2 had not ended after 8 s" in done.stderr
    assert "rank 1 waits for a message of rank 0, which waits in all_reduce" in done.stderr
    assert "Traceback" not in done.stderr


ROWS = """
import torch, torch.distributed as dist
def whole(name, phase, pieces):
    out = torch.empty(6, 2, dtype=torch.float64)
    for rank, piece in pieces.items():
        out[rank :: len(pieces)] = piece
    return out
if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    w = torch.nn.Parameter(torch.arange(12.0).view(6, 2)[rank::world].clone())
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1).step()
"""


@pytest.mark.slow
def test_a_module_is_verified_with_a_function_that_puts_pieces_together(tmp_path):
    (tmp_path / "rows_in_turn.py").write_text(ROWS)
    command = ["-m", "disttensor.verify", "--nproc", "3", "--whole", "rows_in_turn.py:whole"]
    done = run(*command, "-m", "rows_in_turn", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 tensors of 1 steps" in done.stdout


def test_a_script_that_is_not_there():
    done = run("-m", "disttensor.verify", "--nproc", "2", "never.py")
    assert done.returncode == 2 and "there is no file never.py" in done.stderr


# How pieces fit together --------------------------------------------------------------------------


def ways(one, held, batch, rows=True):
    """The layouts in which these pieces are right."""
    found = fits(one, held, dict.fromkeys(held), [batch], rows)
    return [fit.way for fit in found if max(fit.errors().values()) < 1e-9]


ONE = torch.arange(24.0).view(4, 6)


def test_rows_of_a_sampler_are_found_in_the_batch():
    batch = share_batch([ONE], {0: [ONE[[2, 0]]], 1: [ONE[[2, 0]]], 2: [ONE[[3]]], 3: [ONE[[1]]]})
    assert batch == Batch([[0, 1], [2], [3]], [[2, 0], [3], [1]])
    hidden = ONE @ torch.randn(6, 4)
    halves = [x[[2, 0]] for x in hidden.chunk(2, 1)]
    held = {0: halves[0], 1: halves[1]}
    assert ways(hidden, held, Batch([[0, 1]], [[2, 0]])) == []  # two rows are missing
    held |= {2: hidden[[3]], 3: hidden[[1]]}
    assert ways(ONE, {0: ONE[[2, 0]], 1: ONE[[2, 0]], 2: ONE[[3]], 3: ONE[[1]]}, batch) == [
        "pieces"
    ]


def test_batches_that_do_not_add_up():
    assert share_batch([ONE], {0: [ONE[:2]], 1: [ONE[:2]]}) is None
    assert share_batch([ONE], {0: [ONE], 1: [ONE + 1]}) is None
    assert share_batch([ONE], {0: [ONE], 1: [ONE]}) == Batch([[0, 1]])


def test_a_fused_projection_is_split_in_each_of_its_parts():
    held = {r: torch.cat([c.chunk(2)[r] for c in torch.arange(12.0).chunk(3)]) for r in range(2)}
    assert ways(torch.arange(12.0), held, Batch([[0, 1]]), rows=False) == ["pieces"]


def test_parts_of_a_sum_are_told_from_pieces():
    assert ways(ONE, {0: ONE / 4, 1: ONE * 3 / 4}, Batch([[0, 1]])) == ["sum"]
    assert ways(ONE[1, :1], {0: ONE[1, :1] - 1, 1: ONE[1, :1] + 1}, Batch([[0], [1]])) == ["mean"]


def test_a_function_puts_pieces_together(tmp_path):
    """Rows that are dealt out in turn, of a parameter: no layout that is tried."""

    def train(learns):
        torch.distributed.init_process_group("gloo")
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        w = torch.nn.Parameter(torch.arange(12.0).view(6, 2)[rank::world].clone())
        w.grad = torch.ones_like(w) * (1 + rank * (not learns))
        torch.optim.SGD([w], lr=0.1).step()

    def whole(name, phase, pieces):
        out = torch.empty(6, 2, dtype=torch.float64)
        for rank, piece in pieces.items():
            out[rank :: len(pieces)] = piece
        return out

    text = dt.verify(train, 2, (True,), whole=whole)
    assert "2 tensors of 1 steps" in text
    with pytest.raises(
        dt.errors.VerifyError, match="gradient of parameter 0 at the optimizer step"
    ):
        dt.verify(train, 2, (False,), whole=whole)


def test_complex_values_are_compared():
    def train():
        torch.distributed.init_process_group("gloo")
        w = torch.nn.Parameter(torch.full((3,), 0.1 + 0.1j))
        w.grad = torch.full_like(w, 0.1 * torch.distributed.get_world_size())
        torch.optim.SGD([w], lr=0.1).step()

    with pytest.raises(dt.errors.VerifyError, match=r"gradient of parameter 0 .*\n.*is 2 times"):
        dt.verify(train, 2, steps=1)
