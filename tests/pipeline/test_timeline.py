"""Timelines and their pictures; the examples of the package's docstrings."""

from __future__ import annotations

import doctest
import inspect
import json
import pickle
from xml.etree import ElementTree

import pytest

from disttensor import pipeline
from disttensor.pipeline import Event, Timeline

PURE = (
    "action", "costs", "search", "zero_bubble", "schedule", "schedules", "timeline", "plot",
    "drawing",
)  # fmt: skip
NAMES = [
    name
    for name in pipeline.__all__
    if getattr(pipeline, name).__module__.rpartition(".")[2] in PURE
    and name != "visits"  # it needs meshes
]
SVG = "{http://www.w3.org/2000/svg}"

# Rank 0: F0 pauses at a transfer from 1 to 4, F1 runs meanwhile; then all wait; then B0.
PAUSED = [
    Event(0, 0, "F", 0, 0, 0, 5),
    Event(0, 0, "wait", 0, 0, 1, 4),
    Event(0, 0, "F", 1, 0, 1, 2),
    Event(0, 0, "B", 0, 0, 6, 10),
    Event(0, 0, "wait", 0, 0, 6, 7),
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(pipeline, name)) or ""
    assert f"{name}(" in text.partition(">>> ")[2], f"{name} has no example in its docstring"
    test = doctest.DocTestParser().get_doctest(text, {"pipeline": pipeline}, name, None, None)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)


def test_bubble_example_runs():
    text = inspect.getdoc(pipeline.Schedule.bubble)
    test = doctest.DocTestParser().get_doctest(text, {"pipeline": pipeline}, "bubble", None, None)
    report: list[str] = []
    doctest.DocTestRunner().run(test, out=report.append)
    assert test.examples and not report, "".join(report)


def test_time_without_waits_and_overlaps():
    run = Timeline(PAUSED)
    assert run.ranks == [0] and run.start == 0 and run.span == 10
    # 0-1 and 4-5 of F0, 1-2 of F1, 7-10 of B0
    assert [(str(e.action), a, b) for e, a, b in run.pieces(0)] == [
        ("F0", 0, 1),
        ("F1", 1, 2),
        ("F0", 4, 5),
        ("B0", 7, 10),
    ]
    assert run.busy(0) == 6 and run.bubble == pytest.approx(0.4)


def test_a_wait_is_of_its_own_micro_batch_and_chunk_only():
    others = [Event(0, 0, "wait", 1, 0, 0, 5), Event(0, 0, "wait", 0, 1, 0, 5)]
    others += [Event(1, 0, "wait", 0, 0, 0, 5)]
    assert Timeline([Event(0, 0, "F", 0, 0, 0, 5), *others]).busy(0) == 5


def test_waits_that_overlap_or_stick_out_count_once():
    waits = [Event(0, 0, "wait", 0, 0, a, b) for a, b in ((-1, 2), (1, 3), (2, 3), (9, 12))]
    run = Timeline([Event(0, 0, "F", 0, 0, 0, 10), *waits])
    assert [(a, b) for _, a, b in run.pieces(0)] == [(3, 9)]
    whole = Timeline([Event(0, 0, "F", 0, 0, 0, 10), Event(0, 0, "wait", 0, 0, 0, 10)])
    assert whole.pieces(0) == [] and whole.busy(0) == 0 and whole.bubble == 1


def test_two_at_one_time_count_once():
    run = Timeline(
        [Event(0, 0, "F", m, 0, m, m + 3) for m in range(3)] + [Event(0, 0, "F", 9, 0, 1, 2)]
    )
    assert run.busy(0) == 5 and run.bubble == 0


def test_ranks_are_put_together():
    one, two = Timeline(PAUSED), Timeline([Event(3, 1, "F", 0, 0, 2, 12)])
    both = two + one
    assert both == Timeline(PAUSED + list(two.events)) and hash(both) == hash(one + two)
    assert both.ranks == [0, 3] and both.span == 12
    assert both.bubble == pytest.approx(1 - (6 + 10) / 24)
    assert pickle.loads(pickle.dumps(both)) == both
    with pytest.raises(ValueError, match="no common clock"):
        one + Timeline.of(pipeline.gpipe(1, 1))
    with pytest.raises(TypeError):
        one + 1


@pytest.mark.parametrize("cost", [(1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "made", [pipeline.gpipe(3, 4), pipeline.interleaved_1f1b(2, 3, 2)], ids=["gpipe", "interleaved"]
)
def test_the_timeline_of_a_schedule_has_its_bubble(made, cost):
    run = Timeline.of(made, *cost)
    assert run.bubble == pytest.approx(made.bubble(*cost)) and run.ranks == list(range(made.stages))


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Event(0, 0, "G", 0, 0, 0, 1), "the kind is one of F, B, I, W, wait"),
        (Event(0, 0, "F", 0, 0, 2, 1), "the end not before the start"),
        (Event(0, 0, "F", 0, 0, 0, float("nan")), "are times"),
        (Event(0, 0, "F", 0, 0, 0, float("inf")), "are times"),
    ],
)
def test_events_that_cannot_be(event, says):
    with pytest.raises(ValueError, match=says):
        Timeline([event])


def test_chrome_trace_has_what_each_rank_did_in_microseconds(tmp_path):
    run = Timeline([e._replace(start=e.start + 7, end=e.end + 7) for e in PAUSED])
    text = run.to_chrome_trace(tmp_path / "run.json").read_text()
    name, *threads = json.loads(text)["traceEvents"][:3]
    events = json.loads(text)["traceEvents"][3:]
    assert [t["args"]["name"] for t in threads] == ["compute", "wait"]
    assert name["args"] == {"name": "rank 0"} and name["pid"] == 0
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("F0", "F", 0, 0, 1e6),
        ("F1", "F", 0, 1e6, 1e6),
        ("F0", "F", 0, 4e6, 1e6),
        ("B0", "B", 0, 7e6, 3e6),
        ("wait0", "wait", 1, 1e6, 3e6),
        ("wait0", "wait", 1, 6e6, 1e6),
    ]
    ticks = Timeline.of(pipeline.gpipe(2, 1)).to_chrome_trace(str(tmp_path / "ticks.json"))
    last = json.loads(ticks.read_text())["traceEvents"][-1]
    assert (last["name"], last["pid"], last["ts"], last["dur"]) == ("B0", 1, 2e3, 2e3)


def test_text():
    run = Timeline([Event(10, 0, "F", 0, 1, 0.5, 0.5135), Event(2, 0, "B", 123, 0, 0.5135, 0.514)])
    assert repr(run) == "Timeline(2 ranks, 2 events, 14 ms, bubble 50.0 %)"
    assert str(run).splitlines() == [
        "rank  2 |" + "." * 69 + "B##|",
        "rank 10 |F0.1" + "=" * 65 + "...|",
        "0 to 14 ms, bubble 50.0 %",
    ]
    assert "2 µs" in repr(Timeline([Event(0, 0, "F", 0, 0, 1, 1.000002)]))
    assert str(Timeline([])) == "Timeline(0 ranks, 0 events, 0 s, bubble 0.0 %)"
    lines = str(Timeline.of(pipeline.gpipe(4, 400))).splitlines()
    assert {len(line) for line in lines[:-1]} == {len("rank 0 |") + 72 + 1}


def boxes(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """By their tips: what, where, when."""
    return {box.findtext(f"{SVG}title"): box for box in root.iter(f"{SVG}rect") if len(box)}


def test_svg_shows_each_action_where_it_was(tmp_path):
    path = pipeline.plot(Timeline(PAUSED), tmp_path / "a.svg", title="a < b & c")
    root = ElementTree.parse(path).getroot()
    found = boxes(root)
    assert set(found) == {
        "wait0 on rank 0: 1 to 4 s",
        "wait0 on rank 0: 6 to 7 s",
        "F0 on rank 0: 0 to 1 s",
        "F0 on rank 0: 4 to 5 s",
        "F1 on rank 0: 1 to 2 s",
        "B0 on rank 0: 7 to 10 s",
    }
    last = found["B0 on rank 0: 7 to 10 s"]
    assert float(last.get("x")) == pytest.approx(0.7 * 910, abs=0.01)
    assert float(last.get("width")) == pytest.approx(0.3 * 910, abs=0.01)
    colours = {tip[:2]: box.get("fill") for tip, box in found.items()}
    assert colours["F0"] == colours["F1"] and len(set(colours.values())) == 3
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c: bubble 40.0 %" and "rank 0" in texts and "time, s" in texts
    assert texts.count("0") == 4 and "10" in texts  # F0 twice, B0, and the axis


def test_svg_of_a_schedule_has_a_shade_per_chunk_and_numbers_that_fit(tmp_path):
    path = pipeline.plot(pipeline.interleaved_1f1b(2, 300, 3), str(tmp_path / "b.svg"))
    found = boxes(ElementTree.parse(path).getroot())
    assert len(found) == 2 * 2 * 300 * 3
    assert len({box.get("fill") for box in found.values()}) == 6
    texts = [t.text for t in ElementTree.parse(path).getroot().iter(f"{SVG}text")]
    assert "time, ticks" in texts and "299" not in texts
    assert any("F0.2 on rank 1" in tip for tip in found)


@pytest.mark.parametrize("span", [1e-6, 0.37, 1, 9, 1234.5, 1e7])
def test_the_axis_has_some_round_numbers(span, tmp_path):
    path = pipeline.plot(Timeline([Event(0, 0, "F", 0, 0, 5, 5 + span)]), tmp_path / "c.svg")
    root = ElementTree.parse(path).getroot()
    assert 4 <= len(list(root.iter(f"{SVG}path"))) <= 10
    (box,) = boxes(root).values()  # from the left to the right, whenever the clock began
    frame = root.find(f"{SVG}svg")
    assert float(frame.get("x")) == 70 and float(frame.get("width")) == 910
    assert float(box.get("x")) == 0 and float(box.get("width")) == pytest.approx(910, abs=0.01)


@pytest.mark.parametrize(
    ("what", "name", "says"),
    [
        (pipeline.gpipe(1, 1), "a.pdf", r"ends in '.pdf': write .svg"),
        (pipeline.gpipe(1, 1), "a", "ends in ''"),
        (Timeline([]), "a.svg", "nothing that takes time"),
        (pipeline.Schedule(["F0"]), "a.svg", "stage 0 lacks B0"),
    ],
)
def test_what_cannot_be_drawn(what, name, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        pipeline.plot(what, tmp_path / name)
    assert not list(tmp_path.iterdir())
