"""What kernels, collectives and messages take, the time line that follows, and the report of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import disttensor as dt
from disttensor.simulate.devices import A100, Device, Link, Network
from disttensor.simulate.events import Collective, Message, Op, Wait
from disttensor.simulate.memory import MemoryLog
from disttensor.simulate.timeline import timelines
from tests.support.examples import ROOT

F32 = torch.float32
DEVICE = Device(name="d", peak={F32: 1e9}, bandwidth=1e9, launch=1e-9, efficiency=1.0)
NET = Network(ranks_per_node=2, within=Link(1e9, 1e-3), between=Link(1e8, 1e-2))


def op(seconds):
    return Op("mm", round(seconds * 1e9), 0, F32, False, "forward", "a.py:1")


def reduce_(ranks, number, work, nbytes=0):
    return Collective("all_reduce", "dp", nbytes, nbytes, ranks, "g", number, False, work,
                      "backward", "a.py:2")  # fmt: skip


def message(peer, sends, work, nbytes=0, tag=7):
    return Message(peer, sends, nbytes, tag, 0, work, "forward", "a.py:3")


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory():
    assert DEVICE.seconds(flops=2e9, nbytes=1e9, dtype=F32) == 2.0
    assert DEVICE.seconds(flops=1e9, nbytes=3e9, dtype=F32) == 3.0
    assert DEVICE.seconds(flops=0, nbytes=1e9, dtype=torch.int64) == 1.0
    assert A100.seconds(312e12, 0, torch.bfloat16) == 2.0  # half of the peak is reached
    with pytest.raises(ValueError, match=r"'d' has no peak for torch.float64.*it has those of"):
        DEVICE.seconds(1, 0, torch.float64)
    with pytest.raises(ValueError, match="bandwidth"):
        Device(name="d", peak={}, bandwidth=0)


def test_collectives_and_messages_by_latency_and_bandwidth():
    assert NET.collective("all_gather", 1e9, [0, 1]) == pytest.approx(1 + 1e-3)
    assert NET.collective("all_reduce", 1e9, [0, 1]) == pytest.approx(1 + 2e-3)
    # two ranks of each node send at once; of four ranks a tree crosses nodes once
    assert NET.collective("all_gather", 2e8, [0, 1, 2, 3]) == pytest.approx(1 + 1e-3 + 1e-2)
    assert NET.collective("all_gather", 1e8, [0, 2]) == pytest.approx(1 + 1e-2)
    assert NET.message(1e8, 1, 2) == pytest.approx(1 + 1e-2)


def test_what_is_not_waited_for_runs_beside():
    """A collective of 2 s between computations of 1 s and 3 s; then one that is waited for."""
    beside = [op(1), reduce_((0, 1), 0, 0, 2 * 10**9), op(3), Wait(0)]
    (row,) = timelines([((0, 1), 0, beside)], DEVICE, NET)
    assert row.end == pytest.approx(4, rel=1e-2) and row.total("wait for ranks") == 0
    waited = [op(1), reduce_((0, 1), 0, 0, 2 * 10**9), Wait(0), op(3)]
    (row,) = timelines([((0, 1), 0, waited)], DEVICE, NET)
    assert row.end == pytest.approx(6, rel=1e-2)
    assert row.total("wait for ranks") == pytest.approx(2, rel=1e-2)


def test_a_collective_waits_for_the_slowest_kind():
    slow = [op(5), reduce_((0, 1), 0, 0), Wait(0)]
    fast = [op(1), reduce_((0, 1), 0, 0), Wait(0)]
    rows = timelines([((0,), 0, fast), ((1,), 1, slow)], DEVICE, NET)
    assert [r.end for r in rows] == pytest.approx([5, 5], rel=1e-2)


def test_a_stage_waits_for_the_one_before():
    first = [op(2), message(1, True, 0), op(4)]
    second = [message(0, False, 0), Wait(0), op(1)]
    rows = timelines([((0,), 0, first), ((1,), 1, second)], DEVICE, NET)
    assert [r.end for r in rows] == pytest.approx([6, 3], rel=1e-2)
    assert rows[1].total("wait for a stage") == pytest.approx(2, rel=1e-2)


def test_memory_is_of_a_category_by_what_becomes_of_it():
    log = MemoryLog()
    kept, gone = torch.empty(100, dtype=torch.uint8), torch.empty(10, dtype=torch.uint8)
    log.see(gone, "forward")
    log.see(kept, "forward")
    log.mark(kept, "parameters")
    log.clock = 1
    saved = torch.empty(40, dtype=torch.uint8)
    log.see(saved, "forward")
    log.clock = 2
    del gone
    log.backwards.append(3)
    log.clock = 4
    del saved
    grad = torch.empty(7, dtype=torch.uint8)
    log.see(grad, "backward")
    log.backwards.append(5)
    log.clock = 6
    memory = log.summary(1, 6)
    assert memory.peak == 150 and memory.where.startswith(__file__)
    held = {name: n for name, n in memory.at_peak.items() if n}
    assert held == {"parameters": 100, "activations": 40, "other": 10}
    assert {n: b for n, b in memory.curve[-1][1].items() if b} == {
        "parameters": 100, "gradients": 7,
    }  # fmt: skip


def two_axes(first, second):
    """A build in which tp sends more than dp."""

    def build():
        mesh = dt.init_mesh((4, 4), (first, second))

        def over_tp(shard):
            return [shard if axis == "tp" else dt.Replicate() for axis in mesh.dim_names]

        plan = {"0.*": over_tp(dt.Shard(0)), "1.weight": over_tp(dt.Shard(1))}
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        dt.shard_module(model, mesh, plan)
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            places = [dt.Shard(0) if axis == "dp" else dt.Replicate() for axis in mesh.dim_names]
            x = dt.ones(4096, 64, mesh=mesh, placements=places)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def test_a_report_as_files_and_text() -> None:
    report = dt.simulate(two_axes("dp", "tp"), world=16, network=Network(ranks_per_node=4))
    (kind,) = report.kinds
    figures = json.loads(json.dumps(report.as_dict()))
    (one,) = figures["kinds"]
    assert one["comms"]["axis"]["tp"]["bytes"] == kind.volume()["tp"][1] > 0
    assert figures["step_time"] == report.step_time > 0
    assert 0 < report.utilisation < 1 and 0 <= report.exposed_communication < 1
    assert report.bubble == pytest.approx(0)
    text = str(report)
    assert "16 ranks of 1 kinds on H100" in text and f"{kind.volume()['tp'][1]:,}" in text
    assert kind.between_nodes(report.network) == kind.volume()["dp"][1]


def test_an_axis_that_spans_nodes_where_another_would_not_is_a_warning():
    network = Network(ranks_per_node=4)
    wrong = dt.simulate(two_axes("tp", "dp"), world=16, network=network)
    (said,) = wrong.warnings
    assert said.startswith("axis tp (4 ranks) sends") and "swap the two" in said
    assert dt.simulate(two_axes("dp", "tp"), world=16, network=network).warnings == []


def test_memory_that_does_not_fit_is_a_warning():
    small = Device(name="tiny", peak={F32: 1e12}, bandwidth=1e11, memory=1000.0)
    report = dt.simulate(two_axes("dp", "tp"), world=16, device=small)
    assert any("tiny has 1,000 B" in w for w in report.warnings), report.warnings


@pytest.mark.limit(240)
def test_an_unmodified_script_from_the_command_line(tmp_path: Path) -> None:
    options = "--pp=2 --tp=4 --dp=8 --layers=2 --width=32 --heads=4 --context=16 --batch=32"
    files = "--json report.json --trace trace.json"
    done = subprocess.run(
        [sys.executable, "-m", "disttensor.simulate", "--world", "64", *files.split(),
         str(ROOT / "examples" / "train_gpt.py"), *options.split(), "--bytes=200000"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "64 ranks of 3 kinds on H100" in done.stdout and "parameters on pp=2" in done.stdout
    figures = json.loads((tmp_path / "report.json").read_text())
    assert sorted(r for k in figures["kinds"] for r in k["ranks"]) == list(range(64))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    longest = max(e["ts"] + e["dur"] for e in trace if e["ph"] == "X")
    assert longest == pytest.approx(figures["step_time"] * 1e6, rel=1e-6)
