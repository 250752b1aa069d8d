"""``simulate``: which ranks do the same, what is read of data, what is left behind, errors."""

from __future__ import annotations

import gc
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor import runtime
from disttensor.errors import SimulationError
from disttensor.simulate import shapes, simulate
from disttensor.simulate.kinds import Differences
from disttensor.simulate.rank_run import Grid
from tests.simulate.gpt_training import build as build_gpt
from tests.support.pool import on_ranks


def training(mesh_of, loss=lambda model, x: model(x).square().mean(), rows=6, plan=None):
    """A ``build`` with a small model on the mesh that ``mesh_of()`` makes."""

    def build():
        mesh = mesh_of()
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        model = dt.shard_module(model, mesh, plan or {})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            x = dt.shard_tensor(torch.ones(rows, 5), mesh, [dt.Shard(0)])
            loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def data_parallel(world):
    return lambda: dt.init_mesh((world,), ("dp",))


def test_ranks_whose_pieces_differ_in_size_are_kinds_of_their_own():
    report = simulate(training(data_parallel(8), rows=12), world=8)  # 2 rows for six, then none
    assert [k.ranks for k in report.kinds] == [(0, 1, 2, 3, 4, 5), (6, 7)]
    assert report.kind_of(6) is report.kinds[1] and report.kind_of(2) is report.kinds[0]
    assert report.kinds[0].flops > report.kinds[1].flops == 0
    assert report.flops == 6 * report.kinds[0].flops
    even = simulate(training(data_parallel(8), rows=16), world=8)
    assert [k.ranks for k in even.kinds] == [tuple(range(8))]


def test_stages_and_the_rank_that_tells_the_loss_are_kinds():
    report = simulate(lambda: build_gpt("--pp=2 --dp=4 --batch=16"), world=8)
    assert [k.ranks for k in report.kinds] == [(0, 1, 2, 3), (4,), (5, 6, 7)]
    counts = [k.volume()["stages"][0] for k in report.kinds]
    assert counts[1] == counts[2] + 4  # the loss, to each rank of the other stage
    assert counts[0] == counts[2] == 4  # a message for each micro-batch


def test_ranks_that_send_another_number_of_messages_are_kinds():
    """Two ranks have the tensor and three ranks receive it: one rank sends it twice."""

    def build():
        first, second = dt.ProcessMesh([0, 1], ("x",)), dt.ProcessMesh([2, 3, 4], ("x",))
        w = dt.ones(6, 5, mesh=first, requires_grad=True)
        optimizer = torch.optim.SGD([w])

        def step():
            dt.reshard(w.detach(), second, [dt.Replicate()])
            optimizer.step()

        return step

    report = simulate(build, world=5)
    assert [k.ranks for k in report.kinds] == [(0,), (1,), (2, 3, 4)]


def test_some_ranks_only():
    report = simulate(training(data_parallel(8), rows=12), world=8, ranks=[7])
    assert [k.ranks for k in report.kinds] == [(7,)]
    with pytest.raises(ValueError, match="rank 0 was not simulated: the report is of ranks 7 of 8"):
        report.kind_of(0)
    with pytest.raises(ValueError, match="entry=8: a list of ranks from 0 to 7"):
        simulate(training(data_parallel(8)), world=8, ranks=[8])
    with pytest.raises(ValueError, match=r"simulate: ranks=\(\): a list of ranks from 0 to 7"):
        simulate(training(data_parallel(8)), world=8, ranks=[])


@pytest.mark.feature("Simulating")
def test_the_bytes_of_a_large_world_follow_from_its_size():
    """A ring all-reduce of 75 float32 sends 2 (n - 1) / n of them."""
    world = 1024
    report = simulate(training(data_parallel(world), rows=world), world=world)
    (kind,) = report.kinds
    assert kind.comms.counts() == {"all_reduce": 1}
    assert kind.comms.total_bytes == round(2 * (world - 1) / world * 75 * 4)


def test_what_a_program_reads_is_the_value_that_is_given():
    def reading(expected):
        def loss(model, x):
            out = model(x).square().mean()
            assert repr((out.item(), bool((out > 1).any()), out.reshape(1).tolist())) == expected
            return out

        return training(data_parallel(2), loss)

    def value(line):
        assert line.rpartition(":")[0] == __file__
        return 2.5

    simulate(reading("(0.0, False, [0.0])"), world=2)
    simulate(reading("(2.5, True, [2.5])"), world=2, values=value)


def test_data_that_is_there_is_read_as_it_is():
    table = torch.tensor([3.0, 4.0])

    def loss(model, x):
        assert (float(table.numpy()[1]), torch.equal(table, table)) == (4.0, True)
        return model(x).sum()

    simulate(training(data_parallel(2), loss), world=2, values=9.0)


def test_a_shape_that_depends_on_data_is_an_error_with_the_line():
    def loss(model, x):
        out = model(x).to_local()
        return out[out > 0].sum()

    line = r"the shape of the result of aten.index.Tensor at .*test_simulate.py:\d+ depends on"
    with pytest.raises(SimulationError, match=line):
        simulate(training(data_parallel(2), loss), world=2)


def test_a_rank_that_does_something_else_is_found():
    def loss(model, x):
        out = model(x).square().mean()
        if os.environ["RANK"] == "0":
            out.full_tensor()
        return out

    difference = r"rank 0 does all_reduce of 6 bytes over dp \(.*test"
    with pytest.raises(SimulationError, match=difference):
        simulate(training(data_parallel(4), loss), world=4)


def test_a_world_that_does_not_factor_is_the_mesh_error():
    with pytest.raises(ValueError, match="the mesh has 8 places, the world 6 processes"):
        simulate(training(data_parallel(8)), world=6)
    with pytest.raises(TypeError, match=r"build\(\) gave NoneType"):
        simulate(lambda: None, world=2)
    with pytest.raises(ValueError, match="world"):
        simulate(training(data_parallel(8)), world=0)


def test_a_fallback_that_gathers_is_among_the_warnings():
    def loss(model, x):
        out = model(x)
        torch.trace(out.detach())
        return out.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = simulate(training(data_parallel(2), loss), world=2)
    (said,) = [w for w in report.warnings if "has no sharding rule" in w]
    assert "trace" in said and "test_simulate.py" in said


@on_ranks(2)
def test_afterwards_the_process_is_what_it_was():
    mesh = dt.init_mesh((2,), ("dp",))
    x = dt.shard_tensor(torch.arange(6.0), mesh, [dt.Shard(0)])
    state = runtime.current_runtime(), dist.group.WORLD, torch.get_rng_state(), dict(os.environ)
    spec = x.spec
    report = simulate(training(data_parallel(16), rows=16), world=16)
    assert len(report.kinds) == 1
    assert runtime.current_runtime() is state[0] and dist.group.WORLD is state[1]
    assert torch.equal(torch.get_rng_state(), state[2]) and dict(os.environ) == state[3]
    assert dt.init_mesh((2,), ("dp",)) is mesh and x.spec is spec
    assert x.sum().item() == 15.0  # groups still work, and tensors have data again
    assert dt.ones(4, mesh=mesh).tolist() == [1.0] * 4


def test_a_model_that_no_machine_holds():
    """Of a layer with 4 TB of parameters each of 4096 ranks has 1 GB, and here nobody has any."""

    def build():
        mesh = dt.init_mesh((4096,), ("fsdp",))
        with torch.device("meta"):
            model = nn.Linear(1 << 20, 1 << 20, bias=False)
        dt.shard_module(model, mesh, {"weight": [dt.Shard(0)]})
        nn.init.normal_(model.weight)

        def step():
            x = dt.ones(2, 1 << 20, mesh=mesh)
            model(x).sum().backward()

        return step

    report = simulate(build, world=4096)
    (kind,) = report.kinds
    assert kind.memory.at_peak["other"] >= (1 << 40) * 4 // 4096
    assert kind.flops == 2 * 2 * (1 << 40) // 4096 * 2


def test_ranks_are_of_a_kind_by_meshes_sizes_places_and_messages():
    """Of six ranks: on two meshes of two and on none; uneven pieces; messages; one that tells."""
    first, second, all_ = Grid((0, 1), (2,)), Grid((2, 3), (2,)), Grid(tuple(range(6)), (2, 3))
    meshes = {first: set(), second: set(), all_: set()}
    assert Differences(meshes).groups(6) == [[0, 1], [2, 3], [4, 5]]
    assert Differences({all_: {(4, (0,))}}).groups(6) == [[0, 1, 2, 3, 4, 5]]
    assert Differences({all_: {(4, (1,)), (4, (0,))}}).groups(6) == [[0, 1, 3, 4], [2, 5]]
    assert Differences({second: {(5, (0,))}}).groups(6) == [[0, 1, 4, 5], [2], [3]]
    assert Differences({all_: set()}, {all_: {(0,)}}).groups(6) == [[0, 1, 2], [3, 4, 5]]
    sent = frozenset({(0, ((8,), ())), (1, ((8,), ())), (2, ((), (8, 8)))})
    assert Differences(volumes={sent}).groups(6) == [[0, 1], [2], [3, 4, 5]]
    other = frozenset({(3, ((8,), ()))})
    assert Differences(volumes={sent, other}).groups(6) == [[0, 1], [2], [3], [4, 5]]
    assert Differences(meshes, sources={4}).groups(6) == [[0, 1], [2, 3], [4], [5]]


@pytest.fixture
def unfrozen():
    """conftest.py freezes what is there."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize("was_on", [True, False])
def test_pythons_collector_is_off_meanwhile_and_then_as_it_was(was_on: bool) -> None:

    def build():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        return lambda: None

    (gc.enable if was_on else gc.disable)()
    try:
        simulate(build, 2)
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
    assert gc.get_freeze_count() == 0


def test_the_next_process_knows_the_results_of_operators() -> None:
    def program():
        mesh = dt.init_mesh((2,), ("dp",))
        net = dt.shard_data_parallel(nn.Linear(37, 41), mesh, "dp")

        def step() -> None:
            net(dt.ones(8, 37, mesh=mesh, placements=[dt.Shard(0)])).sum().backward()

        return step

    before = len(shapes._known)
    first = simulate(program, world=2)
    known = len(shapes._known)
    second = simulate(program, world=2)
    assert before < known == len(shapes._known)
    assert [k.flops for k in first.kinds] == [k.flops for k in second.kinds]
    assert [k.memory.peak for k in first.kinds] == [k.memory.peak for k in second.kinds]
