"""local_ranks: a block of a program runs as several ranks, of which one is this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.launching import local_ranks as module
from disttensor.launching.local_ranks import FOREVER
from disttensor.torch_private import default_group, timeout_of
from tests.support import forked
from tests.support.pages import ROOT

SUM = 10.0


def a_sum(size: int) -> tuple[dt.DistTensor, float]:
    x = dt.arange(5, mesh=dt.init_mesh((size,)), placements=[dt.Shard(0)])
    return x, x.sum().item()


def is_one_process() -> bool:
    return not torch.distributed.is_initialized() and "RANK" not in os.environ


def train(mesh: dt.ProcessMesh | None) -> list[float]:
    """Losses of SGD; the weights and the data come from torch's generator."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    model = model.double()
    if mesh is not None:
        dt.shard_module(model, mesh, {"0.*": [dt.Replicate(), dt.Shard(0)]})
    losses = []
    for _ in range(4):
        x = torch.randn(7, 6, dtype=torch.float64)
        if mesh is not None:
            x = dt.shard_tensor(x, mesh, [dt.Shard(0), dt.Replicate()])
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        losses.append(loss.item())
    return losses


def test_a_training_loop_has_the_losses_of_one_process() -> None:
    """Also after this process has used threads, which a fork does not have; and the generator goes
    on where that of one process does."""
    torch.set_num_threads(2)
    try:
        big = torch.randn(700, 700, requires_grad=True)
        (big @ big).sum().backward()
        torch.manual_seed(1)
        one, following = train(None), torch.rand(1)
        torch.manual_seed(1)
        with dt.local_ranks(4):
            losses = train(dt.init_mesh((2, 2), ("dp", "tp")))
            assert torch.get_num_threads() == 1
        assert losses == pytest.approx(one, rel=0, abs=1e-12) and len({*losses}) == 4
        assert torch.rand(1).equal(following)
        assert torch.get_num_threads() == 2 and is_one_process()
    finally:
        torch.set_num_threads(1)


def test_a_block_can_return_and_be_followed_by_another() -> None:
    """The second one frees tensors and process groups of the first in its forks."""

    def block(size: int, old: Any = None) -> tuple[Any, int, list[Any]]:
        with dt.local_ranks(size) as rank:
            del old
            x, total = a_sum(size)
            assert total == SUM
            return x, rank, dt.debugging.pieces(x)

    x, rank, pieces = block(3)
    assert rank == 0 and is_one_process()
    assert [p.tolist() for p in pieces] == [[0, 1], [2, 3], [4]] and x.to_local().tolist() == [0, 1]
    x, _, pieces = block(2, x)
    assert [p.tolist() for p in pieces] == [[0, 1, 2], [3, 4]]
    assert block(1)[2][0].tolist() == [0, 1, 2, 3, 4] and is_one_process()


def test_pieces_of_ranks_outside_the_mesh_are_none() -> None:
    with dt.local_ranks(3):
        dt.init_mesh((3,))
        mesh = dt.ProcessMesh([2, 1])
        x = dt.reshard(dt.ones(3, mesh=mesh), mesh, [dt.Partial()])
        pieces = dt.debugging.pieces(x)
    assert pieces[0] is None and [p.tolist() for p in pieces[1:]] == [[0.0] * 3, [1.0] * 3]


def test_the_first_rank_prints_or_all_do(capfd: pytest.CaptureFixture[str]) -> None:
    print("before, unflushed")
    with dt.local_ranks(3) as rank:
        print("rank", rank)
    with dt.local_ranks(3, output="all") as rank:
        sys.stdout.write(f"number {rank}\n")
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines[2:]) == ["[rank 1] number 1", "[rank 2] number 2", "number 0"]
    assert lines[:2] == ["before, unflushed", "rank 0"]


def test_an_error_of_this_process_leaves_the_block_as_it_is() -> None:
    for error in (ZeroDivisionError, KeyboardInterrupt):
        start = time.monotonic()
        with pytest.raises(error), dt.local_ranks(3) as rank:
            if rank:
                time.sleep(100)
            raise error
        assert is_one_process() and time.monotonic() - start < 5
    with pytest.raises(SystemExit), dt.local_ranks(2):
        sys.exit(0)
    assert is_one_process()


def bad(rank: int) -> None:
    if rank == 2:
        raise ValueError("a bad value")


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_error_of_another_rank_is_raised_with_its_traceback(waits: bool) -> None:
    """Also if the other ranks wait for the one that failed, and fail too."""
    with pytest.raises(dt.errors.RankError) as caught, dt.local_ranks(3) as rank:
        dt.init_mesh((3,))
        bad(rank)
        if waits:
            a_sum(3)
    assert caught.value.rank == 2 and is_one_process()
    words = r"^local_ranks: rank 2 of 3: ValueError: a bad value\n\nTraceback .* in bad\n"
    assert re.match(words, str(caught.value), re.DOTALL), caught.value


def test_a_rank_that_dies_before_it_makes_a_mesh_is_missed() -> None:
    with (
        pytest.raises(dt.errors.RankError, match=r"rank 1 of 3 \(process \d+\) was killed by SIGK"),
        dt.local_ranks(3) as rank,
    ):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        a_sum(3)
    assert is_one_process()


@pytest.mark.parametrize("communicated", [False, True])
def test_ranks_that_wait_for_this_one_after_the_block_get_an_error(
    communicated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.3)
    words = "rank 0 has ended its program before the others"
    with pytest.raises(dt.errors.RankError, match=words), dt.local_ranks(2) as rank:
        dt.init_mesh((2,))
        if communicated:
            a_sum(2)
        if rank:
            a_sum(2)
    assert is_one_process()


def test_this_process_waits_for_ranks_that_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.3)
    read, write = os.pipe()
    with dt.local_ranks(2) as rank:
        a_sum(2)
        if rank:
            time.sleep(1)
            os.write(write, b"done")
    os.close(write)
    with os.fdopen(read) as file:
        assert file.read() == "done"


def test_a_waiting_rank_has_no_time_limit_and_ignores_ctrl_c_at_a_prompt() -> None:
    with dt.local_ranks(2) as rank:
        if rank:
            os.kill(os.getpid(), signal.SIGINT)
            assert breakpoint() is None  # type: ignore[func-returns-value]
        dt.init_mesh((2,))
        assert timeout_of(default_group()).total_seconds() == FOREVER


def test_what_cannot_be_forked_is_refused_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(words: str) -> None:
        before = dict(os.environ), torch.get_num_threads()
        with pytest.raises(RuntimeError, match=words), dt.local_ranks(2):
            pass
        assert before == (dict(os.environ), torch.get_num_threads())

    with dt.local_ranks(2):
        refused("local_ranks: this process is rank [01] of 2 already")
        assert a_sum(2)[1] == SUM
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(r"started as a rank \(WORLD_SIZE in the environment\)")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refused("has used CUDA, which its forks could not use")
    monkeypatch.undo()
    monkeypatch.delattr(os, "fork")
    refused("this system cannot fork")


PROGRAM = """
import disttensor as dt, pdb
with dt.local_ranks(3) as rank:
    x = dt.arange(6, mesh=dt.init_mesh((3,)), placements=[dt.Shard(0)])
    pdb.set_trace()  # Python 3.13 stops here, and older ones at the next line
    step = 1
    y = x * 2
    total = y.sum().item()
    print("total", total)
print("after")
"""
SESSION = "b 7\nc\np x\nn\np y.to_local()\np y.sum().item()\nn\nn\np total\nb 10\nc\nc\n"


def test_a_debugger_steps_through_the_first_rank(tmp_path: Path) -> None:
    """A stop, a step over a collective, an error at the prompt, and a breakpoint."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], input=SESSION, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    prompts = [text.strip() for text in done.stdout.split("(Pdb)")]
    assert prompts[1].startswith("Breakpoint 1") and prompts[2].endswith("-> y = x * 2")
    assert "rank 0: tensor([0, 1])" in prompts[3] and "total = y.sum()" in prompts[4]
    assert prompts[5] == "tensor([0, 2])"
    assert "pending at the debugger's prompt: only rank 0 is here" in prompts[6]
    assert 'print("total", total)' in prompts[7] and prompts[8].startswith("total 30")
    assert prompts[9] == "30" and prompts[10].startswith("Breakpoint 2")
    assert '-> print("after")' in prompts[11] and prompts[12] == "after"


def test_ranks_end_with_a_process_that_is_in_a_block() -> None:
    """The output is at its end when no process is left: a prompt may be left by Ctrl-D."""

    def program() -> None:
        with dt.local_ranks(2):
            sys.stdin.readline()
            raise EOFError

    status, out = forked.run(program, "")
    assert status == 1 and "EOFError" in out
