"""What kernels, collectives and messages take, the time line that follows, and the report of it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import disttensor as dt
from disttensor.simulate import pictures, simulate
from disttensor.simulate.devices import A100, H100, Device, Link, Network
from disttensor.simulate.events import Collective, Gradient, Message, Op, Visit, Wait
from disttensor.simulate.memory import MemoryLog, summary
from disttensor.simulate.timeline import timelines
from tests.simulate.gpt_training import build as build_gpt
from tests.support.examples import ROOT

F32 = torch.float32
DEVICE = Device(
    name="d", peak={F32: 1e9}, bandwidth=1e9, launch=1e-9, efficiency=1.0, visit=0.0, post=0.0,
    gradient=0.0,
)  # fmt: skip
NET = Network(ranks_per_node=2, within=Link(1e9, 1e-3), between=Link(1e8, 1e-2))


def op(seconds):
    return Op("mm", round(seconds * 1e9), 0, F32, "forward", "a.py:1")


def reduce_(ranks, work, nbytes=0):
    return Collective("all_reduce", "dp", nbytes, ranks, "g", False, work,
                      "backward", "a.py:2")  # fmt: skip


def message(peer, sends, work, nbytes=0, tag=7):
    return Message(peer, sends, nbytes, tag, 0, work, "forward", "a.py:3")


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory():
    assert DEVICE.seconds(flops=2e9, nbytes=1e9, dtype=F32) == 2.0
    assert DEVICE.seconds(flops=1e9, nbytes=3e9, dtype=F32) == 3.0
    assert DEVICE.seconds(flops=0, nbytes=1e9, dtype=torch.int64) == 1.0
    assert A100.seconds(312e12, 0, torch.bfloat16) == 2.0  # half of the peak is reached
    with pytest.raises(ValueError, match=r"'d' has no peak for torch.float64.*it has peaks for"):
        DEVICE.seconds(1, 0, torch.float64)
    with pytest.raises(ValueError, match="bandwidth"):
        Device(name="d", peak={}, bandwidth=0)


def test_utilisation_is_by_the_peak_of_each_dtype():
    """As of a step in float32 with an evaluation in bfloat16."""

    def step():
        x = torch.ones(2048, 2048)
        half = x.to(torch.bfloat16)
        return x @ x, half @ half

    report = simulate(lambda: step, 1, device=dataclasses.replace(H100, efficiency=1.0))
    assert 0.8 < report.utilisation <= 1


def test_collectives_and_messages_by_latency_and_bandwidth():
    assert NET.collective("all_gather", 1e9, [0, 1]) == pytest.approx(1 + 1e-3)
    assert NET.collective("all_reduce", 1e9, [0, 1]) == pytest.approx(1 + 2e-3)
    # two ranks of each node send at once; of four ranks a tree crosses nodes once
    assert NET.collective("all_gather", 2e8, [0, 1, 2, 3]) == pytest.approx(1 + 1e-3 + 1e-2)
    assert NET.collective("all_gather", 1e8, [0, 2]) == pytest.approx(1 + 1e-2)
    assert NET.message(1e8, 1, 2) == pytest.approx(1 + 1e-2)


def test_a_collective_of_many_ranks_has_the_latency_of_a_tree():
    alone = dataclasses.replace(NET, ranks_per_node=8)
    for n, steps in ((2, 1), (5, 3), (8, 3)):
        assert alone.collective("all_gather", 0, range(n)) == pytest.approx(steps * 1e-3)
        assert alone.collective("all_reduce", 0, range(n)) == pytest.approx(2 * steps * 1e-3)
    # eight nodes of two
    assert NET.collective("all_gather", 0, range(16)) == pytest.approx(1e-3 + 3e-2)


def test_what_is_not_waited_for_runs_beside():
    """A collective of 2 s between computations of 1 s and 3 s; then one that is waited for."""
    beside = [op(1), reduce_((0, 1), 0, 2 * 10**9), op(3), Wait(0)]
    (row,) = timelines([((0, 1), 0, beside)], 2, DEVICE, NET)
    assert row.end == pytest.approx(4, rel=1e-2) and row.total("wait for ranks") == 0
    waited = [op(1), reduce_((0, 1), 0, 2 * 10**9), Wait(0), op(3)]
    (row,) = timelines([((0, 1), 0, waited)], 2, DEVICE, NET)
    assert row.end == pytest.approx(6, rel=1e-2)
    assert row.total("wait for ranks") == pytest.approx(2, rel=1e-2)


def test_a_collective_waits_for_the_slowest_kind():
    slow = [op(5), reduce_((0, 1), 0), Wait(0)]
    fast = [op(1), reduce_((0, 1), 0), Wait(0)]
    rows = timelines([((0,), 0, fast), ((1,), 1, slow)], 2, DEVICE, NET)
    assert [r.end for r in rows] == pytest.approx([5, 5], rel=1e-2)


def test_a_stage_waits_for_the_one_before():
    first = [op(2), message(1, True, 0), op(4)]
    second = [message(0, False, 0), Wait(0), op(1)]
    rows = timelines([((0,), 0, first), ((1,), 1, second)], 2, DEVICE, NET)
    assert [r.end for r in rows] == pytest.approx([6, 3], rel=1e-2)
    assert rows[1].total("wait for a stage") == pytest.approx(2, rel=1e-2)


def test_ranks_that_share_a_device_slow_each_other_down():
    """Of 3 s and twice 1 s, half as fast together: 4 s, and then what is left of the first."""
    one = dataclasses.replace(DEVICE, sharing=2.0)
    kinds = [((0,), 0, [op(3)]), ((1,), 1, [op(1), message(0, False, 0), op(1)])]
    long, short = timelines(kinds, 2, one, NET)
    assert (long.end, short.end) == pytest.approx((5, 4), rel=1e-2)
    assert [s.end for s in short.spans] == pytest.approx([2, 4], rel=1e-2)
    assert short.times == pytest.approx([2, 2, 4], rel=1e-2)
    alone, _ = timelines([kinds[0], ((1,), 1, [])], 2, one, NET)
    assert alone.end == pytest.approx(3, rel=1e-2)
    half = dataclasses.replace(DEVICE, sharing=1.5)  # of two ranks on 1.33 devices
    assert [r.end for r in timelines(kinds, 2, half, NET)] == pytest.approx([4, 3], rel=1e-2)


def test_a_transfer_on_the_processor_of_a_rank_slows_its_kernels_down():
    """Of 2 s of kernels beside 1 s of a transfer, the first half goes at half the speed."""
    network = dataclasses.replace(NET, processor=Link(1e9, 0.5))
    events = [reduce_((0, 1), 0, 5 * 10**8), op(2), Wait(0)]
    (row,) = timelines([((0, 1), 0, events)], 2, DEVICE, network)
    assert row.end == pytest.approx(3, rel=1e-2)
    (sent,) = [s for s in row.spans if s.lane == "communication"]
    assert sent.end == pytest.approx(2, rel=1e-2)  # on the wire half a second
    (row,) = timelines([((0, 1), 0, events)], 2, DEVICE, NET)
    assert row.end == pytest.approx(2, rel=1e-2)


VISIT = Visit("forward", "a.py:4")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_host_takes_its_time_for_visits_and_messages(kind):
    """Two visits of 1 s, each with a kernel of 3 s, and a message that is asked for in 0.5 s: where
    kernels run by themselves they hide all but the first visit."""
    device = dataclasses.replace(DEVICE, visit=1.0, post=0.5, type=kind)
    events = [VISIT, op(3), VISIT, op(3), message(5, False, 0)]
    (row,) = timelines([((0,), 0, events)], 1, device, NET)
    assert row.end == pytest.approx(7 if kind == "cuda" else 8.5, rel=1e-2)
    assert row.total("compute") == pytest.approx(6, rel=1e-2)
    waits = [VISIT, reduce_((0, 1), 0), Wait(0), VISIT, op(1)]  # nothing hides the host
    (row,) = timelines([((0, 1), 0, waits)], 2, device, NET)
    assert row.end == pytest.approx(3.5, rel=1e-2)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_host_takes_its_time_for_each_kernel(kind):
    """Two kernels of 1 s, for each of which the host takes half of one: beside the device it has
    begun the second one before the first is over."""
    device = dataclasses.replace(DEVICE, launch=0.5, type=kind)
    (row,) = timelines([((0,), 0, [op(1), op(1)])], 1, device, NET)
    assert row.end == pytest.approx(2.5 if kind == "cuda" else 3)
    assert row.times == pytest.approx([1.5, row.end])


def test_the_host_takes_its_time_for_each_gradient_of_a_parameter_in_shards():
    device = dataclasses.replace(DEVICE, gradient=0.5, type="cpu")
    events = [op(1), Gradient("a.py:5"), Gradient("a.py:5"), op(1)]
    (row,) = timelines([((0,), 0, events)], 1, device, NET)
    assert row.end == pytest.approx(3, rel=1e-2)


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        (dt.Strategy(sharding=4, zero_stage=3), 3),
        (dt.Strategy(sharding=2, dp=2, zero_stage=2, accumulate_steps=2), 6),
        (dt.Strategy(sharding=4, zero_stage=1), 3),
        (dt.Strategy(dp=4), 0),
    ],
    ids=str,
)
def test_a_gradient_is_noted_for_each_parameter_in_shards_in_each_backward(strategy, number):
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
        strategy.apply(model)
        (stage,) = strategy.stages()

        def step():
            for rows in torch.ones(8, 8).chunk(strategy.accumulate_steps):
                x = dt.shard_tensor(rows, stage, strategy.batch(sequence=None))
                model(x).sum().backward()

        return step

    (kind,) = simulate(build, world=4).kinds
    assert sum(isinstance(e, Gradient) for e in kind.events) == number


def test_kernels_that_are_known_to_take_longer_do():
    device = dataclasses.replace(DEVICE, kernels={("mm", F32): 3.0})
    assert device.kernel(op(2)) == 6.0 and DEVICE.kernel(op(2)) == 2.0
    assert device.kernel(op(2)._replace(name="addmm")) == 2.0
    (row,) = timelines([((0,), 0, [op(2)])], 1, device, NET)
    assert row.end == pytest.approx(6, rel=1e-2)


@pytest.mark.parametrize(
    ("queries", "keys", "tiles", "part"),
    [
        (256, 256, (128, 128), 3 / 4),  # of four tiles the upper right one is left out
        (4096, 4096, (128, 128), 33 / 64),
        (100, 100, (128, 128), 1.0),  # a tile is as large
        (128, 128, (64, 512), 1.0),
        (300, 300, (128, 128), (128 + 256 + 300) / 900),  # the last tiles are smaller
        (128, 512, (128, 128), 1 / 4),
    ],
)
def test_a_causal_attention_takes_the_time_of_the_tiles_that_are_computed(
    queries, keys, tiles, part
):
    device = dataclasses.replace(DEVICE, tiles=tiles)
    attention = op(4)._replace(causal=(queries, keys))
    assert device.kernel(attention) == pytest.approx(4 * part)
    assert device.kernel(attention, 0.5) == pytest.approx(2 * part)
    assert attention.flops == 4 * 10**9  # torch's formula counts them all


def test_memory_is_of_a_category_by_what_becomes_of_it():
    log = MemoryLog()
    kept, gone = torch.empty(100, dtype=torch.uint8), torch.empty(10, dtype=torch.uint8)
    log.see(gone, "forward")
    log.see(kept, "forward")
    log.mark(kept, "parameters")
    log.begin_step()
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
    memory = summary(*log.step(len(log.log)))
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
    report = simulate(two_axes("dp", "tp"), world=16, network=Network(ranks_per_node=4))
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
    slow = Device(name="slow", peak={F32: 1e9}, bandwidth=1e9)
    other = report.on(device=slow)
    assert other.step_time > report.step_time and other.kinds[0].comms is kind.comms
    assert other.on(device=report.device).step_time == report.step_time


def in_page(html):
    """The figures that a page has for scripts."""
    found = re.search(r'<script type="application/json" id="report">(.*)</script>', html)
    return json.loads(found.group(1))


def attributes(svg, name):
    tree = ElementTree.fromstring(svg)
    return [e for e in tree.iter() if e.tag.endswith("}" + name)]


def test_pictures_show_the_figures_of_the_report(tmp_path: Path) -> None:
    report = simulate(lambda: build_gpt("--pp=2 --dp=2 --tp=2 --batch=4"), world=8)
    kind, width = report.fullest, pictures.INNER

    drawn = report.to_svg(tmp_path / "t.svg").read_text()
    bars = [b for b in attributes(drawn, "svg")[1] if b.get("height") == "20"]
    waits = [b for b in bars if "wait" in b[0].text]
    share = sum(float(b.get("width")) for b in waits) / (width * len(report.kinds))
    idle = [k.timeline for k in report.kinds]
    idle = [t.total("wait for ranks") + t.total("wait for a stage") for t in idle]
    assert share == pytest.approx(sum(idle) / len(idle) / report.step_time, rel=0.02) and share
    (axis,) = [t for t in attributes(drawn, "text") if t.text.startswith("time, ")]
    assert float(axis.get("x")) == pictures.LEFT + width and axis.get("text-anchor") == "end"

    drawn = report.to_svg(tmp_path / "m.svg", "memory").read_text()
    areas = {p[0].text.partition(":")[0]: p.get("points") for p in attributes(drawn, "polygon")}
    assert {name for name, n in kind.memory.at_peak.items() if n} <= set(areas)
    tops = [float(point.split(",")[1]) for area in areas.values() for point in area.split()]
    assert min(tops) == pictures.TOP  # the peak

    drawn = report.to_svg(tmp_path / "c.svg", "communication").read_text()
    said = [b[0].text for b in attributes(drawn, "rect") if len(b) and "bytes" in b[0].text]
    total = sum(int(re.search(r"[\d,]+(?= bytes)", t)[0].replace(",", "")) for t in said)
    most: dict[str, int] = {}
    for k in report.kinds:
        for axis, (_, nbytes) in k.volume().items():
            most[axis] = max(most.get(axis, 0), nbytes)
    assert total == sum(most.values()) > 0
    with pytest.raises(ValueError, match="picture='x'"):
        report.to_svg(tmp_path / "x.svg", "x")


def test_a_page_shows_its_figures_in_a_browser(tmp_path: Path) -> None:
    report = simulate(two_axes("tp", "dp"), world=16, network=Network(ranks_per_node=4))
    page = report.to_html(tmp_path / "report.html")
    html = page.read_text()
    assert in_page(html) == json.loads(json.dumps(report.as_dict()))
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")  # it needs nothing else
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert 'data-count="1"' in done.stdout  # the script has read the warnings
    (end,) = re.findall(r'id="shown">0.0000 to ([\d.]+) ms', done.stdout)
    assert float(end) == pytest.approx(report.step_time * 1e3, rel=1e-3)


def test_an_axis_that_spans_nodes_where_another_would_not_is_a_warning():
    network = Network(ranks_per_node=4)
    wrong = simulate(two_axes("tp", "dp"), world=16, network=network)
    (said,) = wrong.warnings
    assert said.startswith("axis tp (4 ranks) sends") and "swap the two" in said
    assert simulate(two_axes("dp", "tp"), world=16, network=network).warnings == []


def stages_of(widths, rows=64, **strategy):
    """Two stages, whose layers have these widths in them."""

    def build():
        strategy_ = dt.Strategy(**{"pp": 2} | strategy)
        stages = strategy_.stages()
        layers = [torch.nn.Linear(n, m, bias=False) for n, m in pairwise(widths)]
        model = torch.nn.Sequential(*layers)
        strategy_.apply(model, layers=[str(i) for i in range(len(layers))])
        optimizer = torch.optim.SGD(model.parameters())

        def loss(x):
            return model(dt.shard_tensor(x, stages[0], strategy_.batch(sequence=None))).sum()

        def step():
            dt.pipeline.run(loss, torch.ones(rows, widths[0]).chunk(2), stages=stages)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def test_a_stage_with_a_fifth_more_work_is_a_warning():
    light = Device(name="light", peak={F32: 1e9}, bandwidth=1e15)
    report = simulate(stages_of([64, 64, 128]), world=2, device=light)
    assert report.share_of_stages() == pytest.approx({0: 2 / 8, 1: 6 / 8})  # no gradient of rows
    assert [k.stage for k in report.kinds] == [0, 1]
    (said,) = report.warnings
    assert said.startswith("ranks 1 compute for") and "50% longer" in said
    assert "FLOPs of the stages: 25.0% 75.0%" in str(report)
    even = simulate(stages_of([64, 96, 64]), world=2, device=light)
    assert [w for w in even.warnings if "longer than" in w] == []  # 2 to 3: 20% above the mean


def test_stages_with_the_same_more_work_are_one_warning():
    light = Device(name="light", peak={F32: 1e9}, bandwidth=1e15)
    widths = [64, 64, 64, 256, 64]  # the last two of four have four times as much
    report = simulate(stages_of(widths, pp=4), world=4, device=light)
    (said,) = [w for w in report.warnings if "longer than" in w]
    assert said.startswith("ranks 2-3 compute for") and said.endswith(
        "give stages 2-3 fewer layers"
    )


@pytest.mark.parametrize(("rows", "said"), [(6, "ranks 0, 2 compute up to 33% longer"), (4, None)])
def test_ranks_with_larger_pieces_than_those_of_their_stage_are_a_warning(
    rows: int, said: str | None
):
    """Two micro-batches of two rows over two ranks are even, of three (2 and 1) are not."""
    light = Device(name="light", peak={F32: 1e9}, bandwidth=1e15)
    widths = [64, 64, 64]
    report = simulate(stages_of(widths, rows=rows, dp=2), world=4, device=light)
    found = [w for w in report.warnings if "of their stage" in w]
    assert [w.partition(" than")[0] for w in found] == [said] * (said is not None)


def test_activations_that_fill_a_device_are_a_warning_with_their_line():
    full = simulate(stages_of([8, 8, 8], rows=4096), world=2)
    room = max(k.peak_memory for k in full.kinds)
    device = Device(name="tiny", peak={F32: 1e12}, bandwidth=1e11, memory=room * 1.1)
    said = [w for w in full.on(device=device).warnings if "recompute them" in w]
    assert said and "are activations" in said[0] and "test_costs.py" in said[0]
    large = dataclasses.replace(device, memory=room * 10)
    assert [w for w in full.on(device=large).warnings if "recompute" in w] == []


def test_a_tensor_larger_than_a_segment_is_a_warning():
    """Of 8 x 8 parameters, with batches of 4096 rows of 8."""
    sharded = {"pp": 1, "sharding": 2, "zero_stage": 3}
    said = simulate(stages_of([8, 8, 8], rows=4096, **sharded), world=2).warnings
    (large,) = [w for w in said if "largest segment" in w]
    assert large.startswith("a tensor of ") and "test_costs.py" in large
    said = simulate(stages_of([64, 64, 64], rows=4, **sharded), world=2).warnings
    assert [w for w in said if "largest segment" in w] == []


def test_memory_that_does_not_fit_is_a_warning():
    small = Device(name="tiny", peak={F32: 1e12}, bandwidth=1e11, memory=1000.0)
    report = simulate(two_axes("dp", "tp"), world=16, device=small)
    assert any("tiny has 1,000 B" in w for w in report.warnings), report.warnings


@pytest.mark.limit(240)
def test_an_unmodified_script_from_the_command_line(tmp_path: Path) -> None:
    options = "--pp=2 --tp=4 --dp=8 --layers=2 --width=32 --heads=4 --context=16 --batch=32"
    files = "--html report.html --json report.json --trace trace.json"
    done = subprocess.run(
        [sys.executable, "-m", "disttensor.simulate", "--world", "64", *files.split(),
         str(ROOT / "examples" / "train_gpt.py"), *options.split(), "--bytes=200000"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "64 ranks of 3 kinds on H100" in done.stdout and "parameters on pp=2" in done.stdout
    figures = json.loads((tmp_path / "report.json").read_text())
    assert in_page((tmp_path / "report.html").read_text()) == figures
    assert sorted(r for k in figures["kinds"] for r in k["ranks"]) == list(range(64))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    longest = max(e["ts"] + e["dur"] for e in trace if e["ph"] == "X")
    assert longest == pytest.approx(figures["step_time"] * 1e6, rel=1e-6)
