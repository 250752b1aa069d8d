"""Replicas start alike and stay so; communicators are made up front, or it is said who is
missing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import runtime
from disttensor.comm import collectives, rendezvous
from disttensor.comm.log import record_comms
from disttensor.comm.rendezvous import create_groups
from disttensor.core.mesh import ProcessMesh
from disttensor.errors import CommError
from disttensor.fsdp import replicas
from disttensor.fsdp.replicas import broadcast_replicas, check_replicas
from tests.support import pool
from tests.support.pool import fake_world, on_ranks, run_on_ranks

GRIDS = [[[0, 1], [2, 3]], [[3, 1], [2, 0]]]


def model_on(mesh):
    """Tensor parallel on the axis tp (uneven), replicated on dp; the norm and its buffers on
    both."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    return dt.shard_module(model, mesh, {"0.*": [dt.Replicate(), dt.Shard(0)]})


def tensors_of(model):
    return [*model.parameters(), *model.buffers()]


def stir(model):
    """Other values on each rank."""
    with torch.no_grad():
        for x in tensors_of(model):
            if x.is_initialized:
                x.local.add_(dist.get_rank() + 1)


@pytest.mark.parametrize("ranks", GRIDS, ids=str)
@on_ranks(4)
def test_replicas_take_the_values_of_the_first_rank(ranks):
    mesh = ProcessMesh(ranks, ("dp", "tp"))
    model = model_on(mesh)
    plain = [x.local.detach().clone() for x in tensors_of(model)]
    stir(model)
    with record_comms() as log:
        broadcast_replicas(tensors_of(model) * 2)  # a tensor that comes twice goes once
    first_row, first = ranks[0][mesh.coordinate[1]], ranks[0][0]
    for x, was in zip(tensors_of(model), plain, strict=True):
        source = first_row if x.dims_mapping[:1] == [1] else first
        was.add_(source + 1)  # as stir has done there
        assert torch.equal(x.local, was) and x.local.shape == was.shape
    assert [(r.kind, r.axis, r.dtype) for r in log] == [
        ("broadcast", "dp", torch.float32),
        ("broadcast", "dp+tp", torch.float32),
        ("broadcast", "dp+tp", torch.int64),
    ]
    assert [r.shape for r in list(log)[1:]] == [(20,), (1,)]
    check_replicas(model)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@on_ranks(2)
def test_ranks_outside_do_nothing_and_pieces_stay():
    one = ProcessMesh([1], ("dp",))
    both = ProcessMesh([0, 1], ("dp",))
    x = dt.shard_tensor(torch.arange(5.0), both, [dt.Shard(0)])
    y = dt.ones(3, mesh=one)
    if dist.get_rank() == 1:
        y.local.mul_(7)
    with record_comms() as log:
        broadcast_replicas([x, y])
        check_replicas([x, y, torch.full((2,), float(dist.get_rank()))])
    assert [r.kind for r in log] == ["all_gather"]  # that nobody has found anything
    assert x.full_tensor().tolist() == [0, 1, 2, 3, 4]


@on_ranks(4)
def test_a_large_model_goes_in_several_broadcasts():
    mesh = ProcessMesh([2, 0, 3, 1], ("dp",))
    xs = [dt.ones(n, mesh=mesh) for n in (6, 0, 5, 20, 1)]
    for x in xs:
        x.local.mul_(dist.get_rank())
    before, replicas._FLAT = replicas._FLAT, 48
    try:
        with record_comms() as log:
            broadcast_replicas(xs)
    finally:
        replicas._FLAT = before
    assert [r.shape for r in log] == [(11,), (20,), (1,)]
    assert all((x.local == 2).all() for x in xs)


def perturb(ranks, name, victim, at):
    mesh = ProcessMesh(ranks, ("dp", "tp"))
    model = model_on(mesh)
    broadcast_replicas(tensors_of(model))
    check_replicas(model)
    if dist.get_rank() == victim:
        with torch.no_grad():
            local = (
                model.get_buffer(name).local
                if "running" in name
                else model.get_parameter(name).local
            )
            local.view(-1)[at] = -0.0 if name == "1.bias" else float("nan")
    with pytest.raises(RuntimeError) as caught:
        check_replicas(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "name", "victim", "line"),
    [
        (GRIDS[0], "0.weight", 3, "0.weight f32[5@tp, 3]: ranks [3] differ from rank 1 (over dp)"),
        (GRIDS[1], "0.bias", 2, "0.bias f32[5@tp]: ranks [2] differ from rank 3 (over dp)"),
        (GRIDS[1], "1.bias", 1, "ranks [1] differ from rank 3 (over dp+tp)"),
        (GRIDS[0], "1.running_var", 0, "ranks [1, 2, 3] differ from rank 0 (over dp+tp)"),
    ],
    ids=["sharded weight", "sharded bias", "minus zero", "buffer"],
)  # fmt: skip
def test_one_perturbed_rank_is_named_on_all_ranks_alike(ranks, name, victim, line):
    messages = run_on_ranks(4, perturb, ranks, name, victim, 1)
    assert len(set(messages)) == 1, messages
    assert line in messages[0] and name in messages[0]
    assert messages[0].count("differ from") == 1
    assert "dt.shard_data_parallel broadcasts" in messages[0]


@on_ranks(2)
def test_tensors_that_one_rank_lacks_are_named():
    mesh = ProcessMesh([0, 1], ("dp",))
    xs = [dt.ones(2, mesh=mesh) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"tensors\[2\] .*ranks \[1\] have no such tensor"):
        check_replicas(xs[: 3 - dist.get_rank()])


@on_ranks(2)
def test_replicas_in_every_dtype():
    mesh = ProcessMesh([1, 0], ("dp",))
    dtypes = [torch.bool, torch.bfloat16, torch.complex64, torch.int16, torch.float8_e4m3fn]
    xs = [
        dt.from_local(torch.tensor([[1, dist.get_rank()]] * 3).to(d).t(), mesh, [dt.Replicate()])
        for d in dtypes
    ]
    with pytest.raises(RuntimeError) as caught:
        check_replicas(xs)
    assert str(caught.value).count("ranks [0] differ from rank 1") == len(xs)
    broadcast_replicas(xs)
    check_replicas(xs)
    assert all(x.local.tolist() == torch.ones(2, 3).to(x.dtype).tolist() for x in xs)


def test_a_world_of_one_has_no_replicas():
    with record_comms() as log:
        mesh = ProcessMesh([[0]], ("dp", "tp"))
        model = model_on(mesh)
        broadcast_replicas(model.parameters())
        check_replicas(model)
    assert len(log) == 0


# Communicators up front ---------------------------------------------------------------------------


def groups_of(ranks, purpose=""):
    mesh = ProcessMesh(ranks, ("dp", "tp"))
    rows = [(list(map(int, row)), ("tp",), purpose) for row in mesh.mesh]
    columns = [(list(map(int, column)), ("dp",), purpose) for column in mesh.mesh.T]
    return [*rows, *columns, (mesh.ranks, ("dp", "tp"), purpose), ((0,), ("tp",), purpose)]


@pytest.mark.parametrize("ranks", GRIDS, ids=str)
@on_ranks(4)
def test_groups_made_up_front_are_found_later(ranks):
    wanted = [*groups_of(ranks, f"up front {ranks}"), *groups_of(ranks)]
    create_groups(wanted if dist.get_rank() % 2 else wanted[::-1], timeout=20)
    made = len(runtime.current_runtime().groups)
    mesh = ProcessMesh(ranks, ("dp", "tp"))
    for axes in ((0,), (1,), (0, 1)):
        group = mesh.group(axes, f"up front {ranks}")
        assert collectives.all_reduce(torch.ones(1), "sum", group).item() == group.size
        mesh.group(axes)
    assert len(runtime.current_runtime().groups) == made
    create_groups(wanted, timeout=20)  # again: nothing is new
    assert len(runtime.current_runtime().groups) == made


def stay_away():
    if dist.get_rank() == 2:
        return ""
    with pytest.raises(CommError) as caught:
        create_groups(groups_of(GRIDS[0], "away"), timeout=1)
    return str(caught.value)


def come_late():
    """Rank 2 comes when the others have given up: an error there too, no wait."""
    if dist.get_rank() == 2:
        time.sleep(3)
    with pytest.raises(CommError) as caught:
        create_groups(groups_of(GRIDS[0], "late"), timeout=1 if dist.get_rank() != 2 else 1000)
    return str(caught.value)


def want_another():
    wanted = groups_of(GRIDS[0], "another")
    if dist.get_rank() == 1:
        wanted[0] = ((0, 1), ("cp",), "another")
    with pytest.raises(CommError) as caught:
        create_groups(wanted, timeout=20)
    return str(caught.value)


def fail_half_way():
    """Rank 3 ends between two groups of its own."""
    if dist.get_rank() == 3:
        made = rendezvous.process_group

        def once(members, axes, purpose="", timeout=None):
            if members == (2, 3):
                raise CommError("no memory")
            return made(members, axes, purpose, timeout)

        rendezvous.process_group = once
    with pytest.raises(CommError) as caught:
        create_groups(groups_of(GRIDS[0], "half way"), timeout=3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            stay_away,
            [
                "ranks [2] did not come",
                "dp (for away) of ranks [0, 2]",
                "tp (for away) of ranks [2, 3]",
            ],
        ),
        (come_late, ["ranks [2]"]),
        (
            want_another,
            [
                "ranks [0, 2, 3]: tp (for another) of ranks [0, 1]",
                "ranks [1]: cp (for another) of ranks [0, 1]",
            ],
        ),
        (fail_half_way, ["rank 3 could not make the group tp (for half way) of ranks [2, 3]"]),
    ],
    ids=["missing", "late", "different", "half way"],
)
def test_who_keeps_the_others_from_making_groups_is_named(body, words):
    try:
        messages = run_on_ranks(4, body, timeout=40)
    finally:
        pool.stop(4)  # its ranks are out of step now
    for message in filter(None, messages):
        for word in words:
            assert word in message, message


def test_groups_up_front_in_a_fake_world_and_in_a_world_of_one():
    create_groups([((0,), ("dp",), "")])
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] of mesh axes dp .* ranks 0 to 0"):
        create_groups([((0, 1), ("dp",), "")])
    with fake_world(32, rank=5):
        ranks = torch.arange(32).view(4, 8).tolist()
        create_groups(groups_of(ranks, "lane"))
        keys = set(runtime.current_runtime().groups)
        assert keys == {
            (tuple(range(8)), "lane"), ((5, 13, 21, 29), "lane"), (tuple(range(32)), "lane"),
        }  # fmt: skip
        with pytest.raises(ValueError, match="not different ranks"):
            create_groups([((0, 0), ("dp",), "")])
