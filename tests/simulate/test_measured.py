"""Measured steps of single ranks, and the time lines that follow from them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor.simulate import measure, measured, simulate
from disttensor.simulate.devices import Device, Link, Network
from disttensor.simulate.events import Collective, Op, Wait
from disttensor.simulate.measured import Measured
from disttensor.simulate.timeline import timelines

F32 = torch.float32
CPU = Device(
    name="d", peak={F32: 1e9}, bandwidth=1e9, launch=0.0, efficiency=1.0, type="cpu", post=0.5
)  # fmt: skip
NET = Network(within=Link(1e9, 1.0))


def op(seconds, name="mm"):
    return Op(name, round(seconds * 1e9), 0, F32, "forward", "a.py:1")


def reduce_(work):
    return Collective("all_reduce", "dp", 0, (0, 1), "g", (), work, "backward", "a.py:2")


def test_a_measured_rank_takes_its_measured_time_between_transfers():
    """Kernels of 3 s and 1 s by the device take 10 s, so 7.5 s and 2.5 s."""
    events = [op(3), op(1), reduce_(0), Wait(0), op(1), op(1, "add")]
    spent = ("Collective", 10.0), ("Wait", 1.0), ("end", 4.0)
    (row,) = timelines([((0, 1), 0, events)], 2, CPU, NET, Measured({0: spent}))
    assert [s.end - s.start for s in row.spans if s.lane == "compute"] == [7.5, 2.5, 2.0, 2.0]
    assert row.end == 10 + 2 + 4  # the start of the transfer, 1 s, runs beside it


def test_equal_kernels_of_another_kind_take_as_long_and_others_by_the_mean_factor():
    first = [op(0.5), op(1.5, "add"), reduce_(0)]  # takes 2.5 s by the device
    other = [op(0.5), op(2.5, "exp"), reduce_(0)]
    spent = ("Collective", 6.0), ("end", 1.5)
    kinds = [((0,), 0, first), ((1,), 1, other)]
    _, row = timelines(kinds, 2, CPU, NET, Measured({0: spent}))
    lasts = [s.end - s.start for s in row.spans if s.lane == "compute"]
    assert lasts == pytest.approx([1.5, 7.5])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ({0: (("Collective", 1.0), ("end", 1.0))}, "rank 0 begins or awaits 1 transfers.*and 2"),
        ({5: (("end", 1.0),)}, r"ranks \[5\] were measured, and the report is of other ones"),
    ],
)
def test_times_of_another_program_are_refused(ranks, text):
    events = [op(1), reduce_(0), Wait(0)]
    with pytest.raises(dt.errors.SimulationError, match=text):
        timelines([((0, 1), 0, events)], 2, CPU, NET, Measured(ranks))


class Clock:
    """A clock that the program sets."""

    now = 0.0

    def process_time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(measured, "time", Clock())
    return measured.time


def test_times_between_transfers_are_those_of_the_median_step(clock):
    steps = []

    def build():
        mesh = dt.init_mesh((2,), ("dp",))

        def step():
            steps.append(0)
            clock.now += {4: 1.0, 5: 0.5}.get(len(steps), 5.0)
            x = dt.ones(4, mesh=mesh, placements=[dt.Shard(0)])
            y = dt.reshard(x, mesh, [dt.Replicate()])
            clock.now += 3.0
            return y

        return step

    found = measure(build, 2, steps=3)
    assert found.ranks == {0: (("Collective", 1.0), ("Wait", 0.0), ("end", 3.0))}
    report = simulate(build, 2, device=CPU, network=NET, measured=found)
    assert report.step_time == pytest.approx(1 + 1 + 3)
    assert report.on(network=Network(within=Link(1e9, 2.0))).step_time == pytest.approx(6)


def test_the_measured_ranks_of_a_pipeline_have_the_transfers_of_the_simulated_ones():
    def build():
        stages = [dt.ProcessMesh((r,), ("one",)) for r in range(2)]
        layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        model = torch.nn.Sequential(*layers)
        dt.pipeline.split(model, stages)

        def loss_of(rows):
            return model(dt.shard_tensor(rows, stages[0], [dt.Shard(0)])).square().mean()

        return lambda: dt.pipeline.run(loss_of, torch.ones(4, 2, 8), stages=stages)

    found = measure(build, 2, range(2), steps=1)
    report = simulate(build, 2, device=CPU, measured=found)
    times = [sum(seconds for _, seconds in found.ranks[r]) for r in range(2)]
    assert [k.ranks for k in report.kinds] == [(0,), (1,)]
    assert max(times) > 0
    assert report.step_time >= max(times) * (1 - 1e-9)  # the sums have other orders


def test_a_rank_gets_its_own_pieces_or_noise_from_the_others():
    def build():
        def step():
            x = torch.full((3,), 2.0)
            whole = torch.full((6,), math.nan)
            dist.all_gather([whole[:3], whole[3:]], x)
            assert whole.tolist() == [2.0] * 6
            if dist.get_rank() == 0:
                dist.broadcast(x, 0)
                assert x.tolist() == [2.0] * 3
                dist.recv(x, 1)
                assert 0 < x.abs().sum() < 1
            else:
                dist.broadcast(x, 0)
                assert 0 < x.abs().sum() < 1
            n = torch.full((2,), 7)
            dist.recv(n, 0)
            assert n.tolist() == [0, 0]

        return step

    assert [len(spent) for spent in measure(build, 2, range(2), steps=1).ranks.values()] == [9, 7]


def test_an_error_of_a_measured_program_arrives():
    def build():
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        measure(build, 2)
