"""Ranks that leave the common program are found at the next optimizer step; values that one rank
asks for alone are no difference."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import disttensor as dt
from disttensor import runtime
from disttensor.comm import compare_programs
from disttensor.comm.compare_programs import CALLS, CallFingerprint, CallSignature, difference
from tests.support.pool import fake_world, on_ranks


def test_what_one_rank_asks_for_alone_is_no_difference():
    base = CallFingerprint(made=9, calls=1, effects=2, nodes=7)
    assert base.agrees(base._replace(nodes=8))  # pieces differ: so may the nodes that they take
    assert base.agrees(base._replace(made=11, calls=3))
    assert not base.agrees(base._replace(calls=3))  # another call in place of one
    assert not base.agrees(base._replace(made=11, calls=3, nodes=9))  # it is in a graph
    assert not base.agrees(base._replace(made=11, calls=3, effects=4))


@on_ranks(2)
def test_calls_that_are_no_longer_kept_are_no_difference():
    """More calls than are kept between two steps, and some of one rank alone."""
    start_anew()
    mesh = dt.init_mesh((2,), ("dp",))
    w = dt.ones(4, mesh=mesh, placements=[dt.Shard(0)], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    CALLS.clear()
    for i in range(3):
        with torch.no_grad():
            x = w * 2
            for entry in ([*CALLS][-1:] * (CALLS.maxlen // 2 + 9)) * 2 if i == 1 else ():
                CALLS.append(entry)
            (x + 1) * (x + 3)
            if dist.get_rank() == 0 and i == 1:
                x.sum()
        w.sum().backward()
        optimizer.step()
        steps = runtime.current_runtime().steps
        assert steps.compared.wait(30)
        dist.barrier()
        time.sleep(0.2)
        assert not steps.error, steps.error
    assert [step.number for step in steps.kept] == [1, 2, 3]


@on_ranks(2)
def test_a_rank_that_is_many_steps_ahead_gets_the_error(monkeypatch):
    """As with an optimizer for each layer. Nothing in these steps waits for the other rank."""
    start_anew()
    monkeypatch.setattr(compare_programs, "_PATIENCE", 0.5)
    mesh = dt.init_mesh((2,), ("dp",))
    w = dt.ones(4, mesh=mesh, placements=[dt.Shard(0)], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def train(count):
        for _ in range(count):
            (w * 2).sum().backward()
            optimizer.step()

    train(20)
    if dist.get_rank() == 0:
        train(20)
    dist.barrier()
    if dist.get_rank() == 1:
        with torch.no_grad():
            w.mul_(2)
    with pytest.raises(dt.errors.MismatchError, match="before optimizer step 21 differ"):
        for _ in range(300):
            time.sleep(0.1 * (dist.get_rank() == 0))
            train(1)
    start_anew()


def test_another_thread_may_record_calls_during_a_step():
    mesh = dt.ProcessMesh([0], ("dp",))

    class Entry:
        @property
        def call(self):
            CALLS.append(self)
            return CallSignature(str, mesh, 0, "a.py:1")

    with compare_programs.preserve_calls():
        CALLS.extend([Entry(), Entry()])
        assert len(compare_programs.recorded_calls()) >= 2


def test_a_difference_is_told_by_camps_with_the_lines_of_both():
    calls = [["torch.add(f32[4])", "a.py:1"], ["torch.mul(f32[4])", "a.py:2"]]
    notes = {r: ["SGD.step at a.py:9", calls[: 1 if r == 2 else 2]] for r in range(4)}
    text = difference("ProcessMesh(dp=4)", 3, notes)
    assert "Before optimizer step 3, after 1 calls that are the same" in text
    assert "ranks [0, 1, 3] ran torch.mul(f32[4]) (a.py:2)" in text
    assert "rank 2 made no further call before the step (SGD.step at a.py:9)" in text
    assert difference("ProcessMesh(dp=4)", 3, dict.fromkeys(range(2), notes[0])) == ""


def test_a_backward_is_one_call_for_each_line_that_makes_it():
    with fake_world(2):
        loss = dt.ones(4, mesh=dt.ProcessMesh([0, 1], ("dp",)), requires_grad=True).sum()
        CALLS.clear()
        for _ in range(2):
            loss.backward(retain_graph=True)
        loss.backward()
        noted = [n for n in CALLS if "backward" in n.call.words()]
    first, second, other = (n.call.where.rpartition(":") for n in noted)
    assert noted[0] is noted[1] and first == second
    assert first[0] == other[0] == __file__ and int(other[2]) == int(first[2]) + 1


def start_anew():
    """Forget what has been found, on all ranks."""
    dist.barrier()
    now = runtime.current_runtime()
    if now.watcher:
        now.watcher.stop()
    now.watcher = now.steps = None
    now.name = ""
    now.meshes.clear()  # ranks of the meshes of other tests would not be compared with each other
    dist.barrier()


def train(mesh, stage, rows, change, quiet=False, folder=None):
    """Steps of which the last one is changed; then, when all ranks know, one more."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    if stage:
        dt.shard_data_parallel(model, mesh, shard_axis="dp", stage=stage)
    else:
        dt.shard_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for last in (False, True):
        x = dt.shard_tensor(torch.ones(rows(last), 4), mesh, [dt.Shard(0)], check=False)
        y = model(x)
        if last and change == "forward":
            y = y * 2
        if change.startswith("policy"):
            with dt.attention.policy("gather" if last and change == "policy gather" else "auto"):
                y = F.scaled_dot_product_attention(y, y, y)
        y.square().mean().backward()
        if last and change == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if last and change == "write":
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
        if last and change == "look":
            with torch.no_grad():
                assert (next(model.parameters()) * 2).shape
            assert y.detach().relu().shape
        if last and change == "late":  # the others know of the difference before it comes here
            time.sleep(2.5)
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        dt.Checkpointer(folder).save(1, model=model)
    dist.barrier()
    steps = runtime.current_runtime().steps
    steps.compared.wait(10)
    end = time.monotonic() + (0.5 if quiet else 30)
    while not steps.error and time.monotonic() < end:
        time.sleep(0.05)
    optimizer.step()


@on_ranks(4, timeout=120)
def test_the_rank_that_left_the_program_is_named_at_the_next_step():
    odd = dist.get_rank() == 1
    for change, stage, rows, words in [
        ("length", 0, 6, r"shard_tensor f32\[6@dp, 4\].*rank 1 ran shard_tensor f32\[4@dp, 4\]"),
        ("length", 3, 6, r"shard_tensor f32\[6@dp, 4\].*rank 1 ran shard_tensor f32\[4@dp, 4\]"),
        ("clip", 0, 6, r"rank 1 ran torch._foreach_mul_"),
        ("forward", 0, 6, r"rank 1 ran torch.Tensor.mul\(f32\[6@dp, 2\], int\)"),
        ("write", 0, 6, r"rank 1 ran torch.Tensor.mul_"),
        ("look", 0, 6, ""),
    ]:
        start_anew()
        mesh = dt.init_mesh((4,), ("dp",))

        def length(last, change=change, rows=rows):
            return rows - 2 * (odd and last and change == "length")

        if not words:
            train(mesh, stage, length, change if odd else "", quiet=True)
            continue
        with pytest.raises(dt.errors.MismatchError, match=words) as raised:
            late = "late" if change == "forward" and dist.get_rank() == 3 else ""
            train(mesh, stage, length, change if odd else late)
        assert "ranks [0, 2, 3]" in str(raised.value) and "test_program.py" in str(raised.value)
    start_anew()


@on_ranks(2, timeout=120)
def test_ranks_under_two_attention_policies_are_found_at_the_next_step():
    """Of one head "auto" gathers too, so that nobody waits for nobody."""
    start_anew()
    mesh = dt.init_mesh((2,), ("dp",))
    odd = dist.get_rank() == 1
    with pytest.raises(dt.errors.MismatchError, match=r"rank 1 ran .*attention.*, 'gather'"):
        train(mesh, 0, lambda last: 6, "policy gather" if odd else "policy")
    start_anew()


@pytest.mark.parametrize("stages", [1, 2])  # 2: ranks 2 and 3 do nothing that is compared with 1
@on_ranks(4, timeout=120)
def test_ranks_that_have_left_the_program_write_no_checkpoint(stages: int, tmp_path: Path):
    start_anew()
    mesh = dt.init_mesh((stages, 4 // stages), ("pp", "dp"))[dist.get_rank() * stages // 4]
    late = {1: "write", 2: "late"}.get(dist.get_rank(), "")
    with pytest.raises(dt.errors.MismatchError, match=r"rank 1 ran torch.Tensor.mul_"):
        train(mesh, 0, lambda last: 6, late, folder=tmp_path)
    assert dt.Checkpointer(tmp_path).load(model=nn.Linear(1, 1)) is None
    start_anew()


@on_ranks(2)
def test_ranks_that_seed_apart_are_told_at_the_next_step() -> None:
    start_anew()
    w = dt.ones(4, mesh=dt.ProcessMesh([0, 1], ("dp",)), requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    torch.manual_seed(dist.get_rank())
    F.dropout(w, 0.5).sum().backward()
    optimizer.step()
    dist.barrier()
    steps = runtime.current_runtime().steps
    steps.compared.wait(10)
    end = time.monotonic() + 30
    while not steps.error and time.monotonic() < end:
        time.sleep(0.05)
    said = r"rank 0 ran random call 1 of seed 0.*rank 1 ran random call 1 of seed 1"
    with pytest.raises(dt.errors.MismatchError, match=said):
        optimizer.step()
    start_anew()


@on_ranks(2)
def test_a_collective_of_one_rank_alone_is_told_at_the_next_step() -> None:
    """It meets one of the same size of the other rank, and both have values of two calls."""
    start_anew()
    mesh = dt.ProcessMesh([0, 1], ("dp",))
    w = dt.ones(4, mesh=mesh, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    pending = dt.from_local(torch.ones(4), mesh, [dt.Partial()])
    x = pending * 2
    x.relu()  # keeps the sum for the sigmoid
    if dist.get_rank() == 0:
        x.to_local().add_(1)
    for _ in range(2):  # rank 0 ends the first while rank 1 is in the second
        x.sigmoid()
        (pending * 3).relu()
        w.sum().backward()
        optimizer.step()
        end = time.monotonic() + 4
        while not runtime.current_runtime().steps.error and time.monotonic() < end:
            time.sleep(0.05)
        if runtime.current_runtime().steps.error:
            break
    said = r"ranks \[0, 1\] had started different numbers of collectives before optimizer step 1"
    with pytest.raises(dt.errors.MismatchError, match=said):
        optimizer.step()
    start_anew()
