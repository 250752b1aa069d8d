"""publish and receive: between worlds of other sizes and strategies, which come, go and die."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import Shard
from disttensor.comm.process_group import open_store
from disttensor.publishing.exchange import PieceExchange
from disttensor.publishing.lifeline import Lifeline
from disttensor.publishing.world_tensor import WorldTensor, plan_pieces
from tests.publishing.worlds import STEPS, STRATEGIES, mlp
from tests.support.pages import ROOT
from tests.support.part import part
from tests.support.pool import on_ranks

LOSSES = ["between-kill-1", "receive-kill-0", "between-end-1"]  # of a receiver
ENDS = ["send-kill-1", "send-kill-0", "idle-end-1"]  # of the publisher
ALWAYS = ["pp3", "dp"]


@pytest.fixture(scope="module")
def worlds() -> dict[str, dict[str, list[tuple[int | None, float, str]]]]:
    """{case: {world: (exit status, seconds, stderr) of each rank}}: one start for all."""
    some = [name for name in STRATEGIES if name not in ALWAYS]
    names = [*ALWAYS, *part(some, 2), *LOSSES, *ENDS]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.publishing.worlds", *names]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=380
    )
    result: Any = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.limit(400)
def test_worlds_of_other_sizes_and_strategies_have_each_step_whole(worlds: Any) -> None:
    """Four receivers at once: a regular module, two ranks, three ranks, and other names."""
    for case in [name for name in worlds if name in STRATEGIES]:
        ranks = [(world, *rank) for world, found in worlds[case].items() for rank in found]
        assert all(status == 0 for _, status, _, _ in ranks), (case, ranks)
        sent = [int(text.split()[1]) for _, _, _, text in ranks if text.startswith("sent")]
        received = [int(t.split()[1]) for _, _, _, t in ranks if t.startswith("received")]
        assert len(sent) == 4 and len(received) == 7 and sum(sent) == sum(received) > 0
        if case == "dp":  # replicas share the sending
            assert max(sent) < 1.5 * sum(sent) / 4, sent


@pytest.mark.slow
@pytest.mark.limit(400)
@pytest.mark.parametrize("case", LOSSES)
def test_a_lost_receiver_is_named_and_the_publisher_goes_on(worlds: Any, case: str) -> None:
    """All ranks raise at the same step. A receiver that comes later gets the weights."""
    dying = int(case.split("-")[2])
    ranks = worlds[case]
    said = [text.strip().splitlines()[-1] for _, _, text in ranks["publishing"]]
    assert [status for status, _, _ in ranks["publishing"]] == [0, 0], ranks
    gone = rf"receiver \d was lost: rank {dying if dying else '[01]'} of receiver \d is gone"
    assert said[0] == said[1] and re.search(gone, said[0]), said  # rank 0 keeps the store of rank 1
    assert ranks["later"][0][0] == 0, ranks
    other = ranks["first"][1 - dying]
    assert other[0] in (0, 1) and f"rank {dying} " in other[2], ranks


@pytest.mark.slow
@pytest.mark.limit(400)
@pytest.mark.parametrize("case", ENDS)
def test_a_lost_publisher_is_named_and_the_weights_stay_whole(worlds: Any, case: str) -> None:
    dying = case.split("-")[2]
    words = f"rank {dying} of publisher is gone"
    if dying == "0":
        words = "has ended: the store is gone, which its rank 0 keeps"
    for status, seconds, text in (*worlds[case]["first"], *worlds[case]["later"]):
        assert status == 0 and words in text and seconds < 30, worlds[case]


@pytest.mark.feature("Publishing")
@on_ranks(4)
def test_a_version_is_what_the_model_was_when_it_was_sent():
    """Both worlds may be one launch. Writes after ``send`` do not reach the receiver."""
    mesh = dt.init_mesh((2, 2), ("a", "b"))
    model = dt.shard_module(mlp(), mesh, {"*.weight": [Shard(0), Shard(1)]})
    copy = dt.shard_module(mlp(), dt.ProcessMesh([3, 0, 1], ("c",)), {"*.weight": [Shard(1)]})
    publisher = dt.publish(model, "127.0.0.1:0", timeout=20)
    receiver = dt.receive(copy, publisher.address, timeout=20)
    assert receiver.update(wait=False) is None and receiver.step is None
    for step in (3, 4):
        with torch.no_grad():
            model[0].weight.add_(1)
        before = model[0].weight.full_tensor()
        publisher.send(step)
        with torch.no_grad():
            model[0].weight.mul_(0)
        assert receiver.update(wait=step == 3) == receiver.step == step
        got = copy[0].weight.full_tensor()  # rank 2 is off its mesh
        assert torch.equal(got, before) or (torch.distributed.get_rank() == 2 and not got.numel())
    assert receiver.update(wait=False) is None and receiver.step == 4
    receiver.close()
    with pytest.raises(dt.errors.CommError, match="has left"):
        receiver.update()
    publisher.close()
    with pytest.raises(dt.errors.CommError, match="was closed"):
        publisher.send(5)


@on_ranks(2)
def test_names_shapes_and_addresses_that_do_not_fit_are_errors_on_all_ranks():
    mesh = dt.init_mesh((2,), ("a",))
    model = dt.shard_module(nn.Linear(4, 3), mesh)
    publisher = dt.publish(model, "127.0.0.1:0", timeout=20)
    with pytest.raises(dt.errors.CommError, match="there is a publisher at"):
        dt.publish(model, publisher.address, timeout=20)
    for other, words in (
        (nn.Linear(4, 5), r"'weight' is \[5, 4\] in the model, and \[3, 4\] in weight"),
        (nn.Sequential(nn.Linear(4, 3)), "the tensors of the publisher lack .'0.weight', '0.bias'"),
        (nn.Linear(4, 3, bias=False), "the model has no .'bias'."),
        (nn.Linear(4, 3, device="meta"), "'weight' is on the meta device"),
    ):
        with pytest.raises(ValueError, match=f"receive: .*{words}"):
            dt.receive(other, publisher.address, timeout=20)
    model.weight = nn.Parameter(dt.ones(3, 5, mesh=mesh))
    with pytest.raises(ValueError, match="have changed since publish"):
        publisher.send(1)
    publisher.close()
    with pytest.raises(dt.errors.CommError, match="receive"):
        dt.receive(nn.Linear(4, 3), publisher.address, timeout=1)
    tied, two = (nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]) for _ in range(2))
    tied[1].weight = tied[0].weight
    publisher = dt.publish(dt.shard_module(two, mesh), "127.0.0.1:0", timeout=20)
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' are one tensor"):
        dt.receive(tied, publisher.address, timeout=20)
    publisher.close()


def test_each_piece_is_planned_once_and_replicas_share() -> None:
    """Rows over 2 x 3 ranks (5 over 3: 2, 2, 1) to columns over 2 ranks, and to one."""
    sent = [WorldTensor((5, 4), "float32", ((1,), ()), (2, 3), range(6))] * 3
    for ranks, dims in ((2, ((), (0,))), (1, ((), ()))):
        wanted = WorldTensor((5, 4), "float32", dims, (ranks,), range(ranks))
        received = [wanted._replace(parts=[(i, 0, 5)]) for i in range(3)]
        plan = plan_pieces(sent, received, 6)
        boxes = [(to, piece.received, piece.target) for (_, to), ps in plan.items() for piece in ps]
        assert len(boxes) == len({*boxes}) == 3 * 3 * ranks
        assert sum(piece.nbytes for pieces in plan.values() for piece in pieces) == 3 * 5 * 4 * 4
        each = [
            sum(p.nbytes for (s, _), ps in plan.items() for p in ps if s == r) for r in range(6)
        ]
        assert max(each) <= 2 * 2 * 4 * 4, each  # two of the three tensors at most


@on_ranks(2)
def test_a_pending_value_is_reduced_and_a_pending_receiver_refused():
    mesh = dt.init_mesh((2,), ("a",))
    model, copy = nn.Linear(4, 3), nn.Linear(4, 3)
    dt.shard_module(model, mesh)
    model.register_buffer("total", dt.reshard(dt.ones(3, mesh=mesh), mesh, [dt.Partial()]))
    copy.register_buffer("total", torch.zeros(3))
    publisher = dt.publish(model, "127.0.0.1:0", timeout=20)
    receiver = dt.receive(copy, publisher.address, timeout=20)
    publisher.send(STEPS)
    assert receiver.update() == STEPS and torch.equal(copy.total, model.total.full_tensor())
    with pytest.raises(ValueError, match="'total' is pending"):
        dt.receive(model, publisher.address, timeout=20)
    receiver.close()
    publisher.close()


class Holder(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, x in tensors.items():
            self.register_buffer(name, x)


@on_ranks(2)
def test_joined_parts_of_other_dtypes_are_exact() -> None:
    few, many = torch.full((3,), 1.5, dtype=torch.bfloat16), torch.full((4,), 1 + 2**-20)
    publisher = dt.publish(Holder(few=few, many=many), "127.0.0.1:0", timeout=20)
    copy = Holder(both=torch.zeros(7))
    receiver = dt.receive(copy, publisher.address, names={"both": ["few", "many"]}, timeout=20)
    publisher.send(1)
    assert receiver.update() == 1 and torch.equal(copy.both, torch.cat((few.float(), many)))
    receiver.close()
    publisher.close()


@on_ranks(2)
def test_regular_models_that_differ_between_ranks_are_refused_on_all() -> None:
    """A receiver would get a part of its weights from each of them."""
    rank, errors = torch.distributed.get_rank(), dt.errors
    with pytest.raises(errors.MismatchError, match="publish: model differs between the ranks"):
        dt.publish(Holder(x=torch.ones(3 + rank)), "127.0.0.1:0", timeout=20)
    publisher = dt.publish(Holder(x=torch.ones(3) * rank), "127.0.0.1:0", timeout=20)
    with pytest.raises(errors.MismatchError, match=r"send at .*it is \[0, .* on rank 0, and \[1, "):
        publisher.send(1)
    for x, words in (
        (torch.zeros(3 + rank), r"receive \(rank 1\): .*'x' is \[4\]"),
        (torch.zeros(3, dtype=(torch.float32, torch.float64)[rank]), "receive: model differs"),
    ):
        with pytest.raises((ValueError, errors.MismatchError), match=words):
            dt.receive(Holder(x=x), publisher.address, timeout=20)
    publisher.close()


@on_ranks(2)
def test_a_receiver_that_was_interrupted_has_left() -> None:
    """It would wait for messages of the interrupted version for ever."""
    publisher = dt.publish(Holder(x=torch.ones(3)), "127.0.0.1:0", timeout=3)
    receiver = dt.receive(Holder(x=torch.zeros(3)), publisher.address, timeout=3)
    publisher.send(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PieceExchange, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            receiver.update()
    with pytest.raises(dt.errors.CommError, match="has left"):
        receiver.update()
    publisher.close()


def interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def test_a_post_to_a_store_that_ends_at_this_moment_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next read names the publisher."""
    store = open_store("127.0.0.1", 0, keeps=True)
    line = Lifeline("127.0.0.1", store.port, "receiver 0", 0, 1)
    line.stopped.set()
    monkeypatch.setattr(line, "_has_store", lambda: True)
    del store
    line.post("leave", "receiver 0")
