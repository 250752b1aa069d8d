"""Where the backend needs it, messages there and back go over two process groups. (Here gloo is
said to need it.)"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor import pipeline, runtime
from disttensor.comm import directions, p2p
from tests.support.oracle import randn
from tests.support.pool import fake_world, on_ranks

CPU = torch.device("cpu")


def lanes():
    """The process groups of directions in this world: (both ranks, the sender)."""
    groups = runtime.current_runtime().groups
    return {
        (pair, int(lane.split()[-1])): pg
        for (pair, lane), pg in groups.items()
        if lane.startswith("messages from")
    }


@on_ranks(4)
def test_there_and_back_go_over_two_groups():
    """A ring: each rank sends to the next one, twice, and every other one gets an answer."""
    me = dist.get_rank()
    after, before = (me + 1) % 4, (me - 1) % 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directions, "needs_directions", lambda device: True)
        for i in range(2):
            sends = [(after, torch.full((3,), me + i))] + [(before, torch.ones(3).long())] * i
            receives = [(before, (3,))] + [(after, (3,))] * i
            pending = p2p.transfer(sends, receives, torch.int64, CPU, p2p.next_tag())
            assert [x.wait().tolist() for x in pending] == [[before + i] * 3] + [[1] * 3] * i
        p2p.flush(30)
        mine = lanes()
        pairs = {tuple(sorted((me, other))) for other in (before, after)}
        assert set(mine) == {(pair, sender) for pair in pairs for sender in pair}
        assert len(set(map(id, mine.values()))) == 4
        assert all(dist.get_process_group_ranks(pg) == [*pair] for (pair, _), pg in mine.items())
        assert directions.group(me, after) is mine[tuple(sorted((me, after))), me]
    for (pair, sender), pg in mine.items():
        dist.destroy_process_group(pg)
        del runtime.current_runtime().groups[pair, f"messages from {sender}"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@on_ranks(2)
def test_a_schedule_over_two_groups_gives_the_same_gradients(schedule):
    meshes = [dt.ProcessMesh([rank], ("x",)) for rank in range(2)]
    stages = pipeline.visits(meshes, schedule)
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipeline.split(model, stages)
    data = [randn(3, 4, seed=i, dtype=torch.float32) for i in range(4)]
    for x in data:
        plain(x).square().mean().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directions, "needs_directions", lambda device: True)
        pipeline.run(
            lambda x: model(dt.shard_tensor(x, stages[0])).square().mean(), data, schedule,
            stages=stages,
        )  # fmt: skip
        p2p.flush(30)
    assert set(lanes()) == {((0, 1), 0), ((0, 1), 1)}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.is_initialized:
            torch.testing.assert_close(p.grad.to_local(), q.grad)


def test_a_large_world_makes_groups_for_pairs_that_talk_and_they_end_with_it(monkeypatch):
    monkeypatch.setattr(directions, "needs_directions", lambda device: True)
    with fake_world(1024, rank=5):
        a, b = (dt.ProcessMesh(list(range(i, i + 4)), ("x",)) for i in (4, 8))
        x = dt.shard_tensor(torch.ones(8, 2), a, [dt.Shard(0)], requires_grad=True)
        for _ in range(3):
            dt.reshard(x, b, [dt.Shard(0)]).sum().backward()
        assert set(lanes()) == {((5, 9), 5), ((5, 9), 9)}
    assert not runtime.current_runtime().groups and not dist.is_initialized()
