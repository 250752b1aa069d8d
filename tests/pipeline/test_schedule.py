"""Schedules: what each stage does and when, without any process."""

from __future__ import annotations

import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest

from disttensor import pipeline
from disttensor.pipeline import Action, Schedule, named, schedules


def simulated_peak(made: Schedule, stage: int) -> int:
    """Live micro-batches of a stage counted over time instead of over its order."""
    ticks = made.ticks()[stage]
    ends = {tick.action: tick.end for tick in ticks}
    moments = [tick.end for tick in ticks if tick.action.kind == "F"]
    return max(
        sum(
            ends[tick.action] <= moment < ends[tick.action._replace(kind="B")]
            for tick in ticks
            if tick.action.kind == "F"
        )
        for moment in moments
    )


def assert_obeys(made: Schedule) -> None:
    """Every start in the simulation comes after what it needs, written down once more from the
    definition."""
    p, last = made.stages, made.stages * made.chunks - 1
    way = [*range(p)] * made.chunks if made.shape == "loop" else [*range(p), *range(p - 1, -1, -1)]
    costs = {"F": 3, "B": 5, "I": 3.5, "W": 1.5}
    span, weights = {}, 0
    for stage, row in enumerate(made.ticks(3, 5, 1.5)):
        for tick in row:
            kind, m, chunk = tick.action
            visit = [v for v, place in enumerate(way) if place == stage][chunk]
            span[kind, visit, m] = tick
            assert tick.end - tick.start == costs[kind]
        assert all(a.end <= b.start for a, b in pairwise(row))
    for v in range(last + 1):
        for m in range(made.micro_batches):
            back = span.get(("B", v, m)) or span["I", v, m]
            assert v == 0 or span["F", v, m].start >= span["F", v - 1, m].end
            assert back.start >= span["F", v, m].end
            after = span.get(("B", v + 1, m)) or span.get(("I", v + 1, m))
            assert v == last or back.start >= after.end
            if back.action.kind == "I":
                assert span["W", v, m].start >= back.end
                weights += 1
    assert len(span) == 2 * (last + 1) * made.micro_batches + weights


def chunks_of(name: str) -> range:
    if name in ("zbv", "dualpipev"):
        return range(2, 3)
    return range(1, 2 if name in ("1f1b", "zero_bubble") else 5)


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_size_ends_and_adds_gradients_in_the_order_of_micro_batches(name, stages):
    for m in range(1, 13):
        for chunks in chunks_of(name):
            made = named(name, stages, m, chunks)
            assert (made.stages, made.micro_batches, made.chunks) == (stages, m, chunks)
            assert_obeys(made)
            for order in made.orders:
                for chunk in range(chunks):
                    for kinds in ("BI", "BW"):
                        backwards = [a for a in order if a.kind in kinds and a.chunk == chunk]
                        assert backwards == sorted(backwards, key=lambda a: a.micro_batch)


@pytest.mark.parametrize("costs", [(1, 1, 1), (3, 5, 2), (2, 3, 1)], ids=str)
def test_zero_bubble_idles_as_theory_says_and_holds_no_more_than_1f1b(costs):
    f, i, w = costs
    for p in range(1, 7):
        for m in range(p, 13):
            made = pipeline.zero_bubble(p, m)
            span = max(tick.end for row in made.ticks(f, i + w, w) for tick in row)
            assert span == m * (f + i + w) + (p - 1) * (f + i - w)
            assert max(map(made.peak, range(p))) == pipeline.one_f_one_b(p, m).peak(0)


def test_zero_bubbles_of_several_visits():
    """Where F, I and W take as long, p - 1 of them are idle: a third of interleaved 1f1b's."""
    for name in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        for p in range(1, 7):
            for m in range(2 * p, 13):
                if name == "interleaved_zero_bubble" and m % p:
                    continue
                idle = 1 - 6 * m / (6 * m + p - 1)
                assert named(name, p, m, 2).bubble(1, 2, 1) == pytest.approx(idle), (name, p, m)
    for p in range(1, 7):  # and as much memory as 1f1b, of two halves each
        assert max(map(pipeline.zbv(p, 12).peak, range(p))) == 2 * p


def test_zbv_parts_the_backwards_of_both_ends_alone():
    """A whole one takes less time, and between the ends nobody waits for its I."""
    for p in range(1, 7):
        parted = [
            [sum(a.kind == "I" for a in row) for row in pipeline.zbv(p, m).orders]
            for m in (2 * p, 12, 40)
        ]
        assert parted[0] == parted[1] == parted[2] and max(parted[0]) < 4 * p
        for m in range(2 * p - 1, 13):  # those of I and of B are as long here: none idles for it
            span = max(t.end for row in pipeline.zbv(p, m).ticks(3, 7, 2) for t in row)
            assert span == pipeline.zbv(p, m).micro_batches * 20 + (p - 1) * 6


def test_a_v_goes_there_and_back():
    made = Schedule(["F0 F0.1 B0.1 B0", "F0 F0.1 B0.1 B0"], shape="v")
    assert [(made.virtual(s, c)) for s in range(2) for c in range(2)] == [0, 3, 1, 2]
    first, second = made.ticks()
    assert [t.start for t in first] == [0, 3, 4, 10] and [t.start for t in second] == [1, 2, 6, 8]
    assert made != Schedule(made.orders) and eval(repr(made), {"Schedule": Schedule}) == made
    assert hash(made) != hash(Schedule(made.orders))
    with pytest.raises(ValueError, match="shape='u': 'loop' or 'v' is expected"):
        Schedule(["F0 B0"], shape="u")


@pytest.mark.parametrize("cost", [(1, 2), (1, 1), (2.5, 4)], ids=str)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_that_of_theory(name, cost):
    for p in range(1, 7):
        for m in range(1, 13):
            assert named(name, p, m).bubble(*cost) == pytest.approx((p - 1) / (m + p - 1))


def test_interleaving_divides_the_bubble_where_stages_divide_micro_batches():
    for p in range(1, 7):
        for groups in range(1, 4):
            for v in range(1, 5):
                m = p * groups
                made = pipeline.interleaved_1f1b(p, m, v)
                assert made.bubble() == pytest.approx((p - 1) / (v * m + p - 1))


def test_interleaving_never_idles_longer_than_gpipe():
    for p in range(1, 7):
        for m in range(1, 13):
            for v in range(1, 5):
                idle = pipeline.interleaved_1f1b(p, m, v).bubble()
                assert idle <= pipeline.gpipe(p, m).bubble() + 1e-9, (p, m, v)


def test_1f1b_holds_p_minus_s_micro_batches():
    for p in range(1, 7):
        for m in range(1, 13):
            made = pipeline.one_f_one_b(p, m)
            for s in range(p):
                assert made.peak(s) == simulated_peak(made, s) == min(m, p - s)


def test_peak_of_the_others():
    assert [pipeline.gpipe(3, 5).peak(s) for s in range(3)] == [5, 5, 5]
    made = pipeline.interleaved_1f1b(4, 8, 2)  # warm-up 2 (p - 1 - s) + (v - 1) p, and one more
    assert [made.peak(s) for s in range(4)] == [11, 9, 7, 5]
    assert [simulated_peak(made, s) for s in range(4)] == [11, 9, 7, 5]
    with pytest.raises(ValueError, match=r"no stage 4; this schedule has stages 0\.\.3"):
        made.peak(4)


def test_ticks_by_hand():
    first, last = Schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"]).ticks()
    assert [(str(a), start, end) for a, start, end in first] == [
        ("F0", 0, 1),
        ("F1", 1, 2),
        ("B0", 4, 6),
        ("B1", 7, 9),
    ]
    assert [(str(a), start, end) for a, start, end in last] == [
        ("F0", 1, 2),
        ("B0", 2, 4),
        ("F1", 4, 5),
        ("B1", 5, 7),
    ]


def test_a_schedule_is_a_value():
    made = Schedule(["F0 F0.1 B0.1 B0"])
    same = Schedule([[Action("F", 0), "F0.1", ("B", 0, 1), Action("B", 0, 0)]])
    assert made == same and hash(made) == hash(same) and len({made, same}) == 1
    assert eval(repr(made), {"Schedule": Schedule}) == made
    assert pickle.loads(pickle.dumps(made)) == made
    long = pipeline.interleaved_1f1b(4, 8, 2)
    assert eval(repr(long), {"Schedule": Schedule}) == long and repr(long).count("\n") == 5
    with pytest.raises(AttributeError):
        made.orders = ()


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        (["F0 F1 B0"], "stage 0 lacks B1"),
        (["F0 B0", "F0 B0 F1 B1"], "stage 0 lacks F1, B1"),
        (["F0 B0 F9 B9"], "stage 0 lacks F1, B1, F2, B2, ..."),
        (["F0 F0.1 B0"], r"stage 0 lacks B0\.1"),
        (["F0 B0", ""], "stage 1 lacks F0, B0"),
        (["F0 B0", "F0 B0 B0"], "stage 1 has B0 more than once"),
        (["F1 B0 F0 B1"], "stage 0 has B0 before its own forward"),
        (["F0 B0 F0"], "stage 0 has F0 more than once"),
        (["F0 I0"], "stage 0 lacks W0"),
        (["F0 W0"], "stage 0 lacks I0"),
        (["F0 W0 I0"], "stage 0 has W0 before its own I, which is to come first"),
        (["I0 F0 W0"], "stage 0 has I0 before its own forward"),
        (["F0 B0 W0"], "stage 0 has B0 and also an I or a W of the same"),
        (["F0 I0 W0 B0"], "a backward is B, or I and W"),
        (["F0 I0 W0 W0"], "stage 0 has W0 more than once"),
    ],
    ids=str,
)
def test_an_order_that_is_wrong_on_its_own(orders, says):
    made = Schedule(orders)
    with pytest.raises(ValueError, match=f"cannot be carried out:\n(.|\n)*{says}"):
        made.check()
    with pytest.raises(ValueError, match="cannot be carried out"):
        made.ticks()


def test_a_schedule_that_never_ends_says_who_waits_for_what():
    with pytest.raises(ValueError) as error:
        Schedule(["F0 B0 F1 B1", "F1 F0 B0 B1", "F0 B0 F1 B1"]).check()
    assert str(error.value).splitlines()[1:] == [
        "  it never ends; each of these stages waits for another:",
        "  stage 0 at B0 (its action 1): waits for B0 of stage 1",
        "  stage 1 at F1 (its action 0): waits for F1 of stage 0",
        "  stage 2 at F0 (its action 0): waits for F0 of stage 1",
    ]


def test_who_waits_for_an_input_gradient():
    """A stage with I serves one with B, and the other way round."""
    Schedule(["F0 B0", "F0 I0 W0"]).check()
    Schedule(["F0 I0 W0", "F0 B0"]).check()
    with pytest.raises(ValueError, match=r"stage 0 at I0 .*: waits for I0 of stage 1"):
        Schedule(["F0 I0 F1 I1 W0 W1", "F1 F0 I0 W0 I1 W1"]).check()


def test_a_stage_can_wait_for_itself():
    with pytest.raises(
        ValueError, match=r"stage 0 at F0.1 \(its action 0\): waits for F0 of stage 0"
    ):
        Schedule(["F0.1 F0 B0.1 B0"]).check()


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        (["F0 X0"], "'X0' in the order of stage 0"),
        (["F0", "F-1"], "'F-1' in the order of stage 1"),
        (["F0.", "F1"], "'F0.' in the order of stage 0"),
        ([[("F", -1)]], "an Action is"),
        ([[("X", 1)]], "an Action is"),
        ([[("F", 1, 0, 0)]], "an Action is"),
        ([[3]], "an Action is"),
        ("F0 B0", r"\['F0 B0', ...\]"),
        ([], "no stage has an action"),
        ([""], "no stage has an action"),
    ],
    ids=str,
)
def test_what_is_no_schedule(orders, says):
    with pytest.raises(ValueError, match=says):
        Schedule(orders)


def test_named_takes_names_values_and_functions():
    mine = Schedule(["F0 F1 B1 B0"])
    assert named("1f1b", 3, 4) == pipeline.one_f_one_b(3, 4)
    assert named("interleaved_1f1b", 3, 4, 2) == pipeline.interleaved_1f1b(3, 4, 2)
    assert named("gpipe", 2, 2, 2).chunks == 2
    assert named(mine, 1, 2) is mine
    assert named(pipeline.gpipe, 2, 3, 2) == pipeline.gpipe(2, 3, 2)
    assert named(pipeline.one_f_one_b, 2, 3) == pipeline.one_f_one_b(2, 3)


def test_a_new_name_is_one_line_of_the_table(monkeypatch):
    def one_at_a_time(stages, micro_batches, chunks):
        return Schedule([" ".join(f"F{m} B{m}" for m in range(micro_batches))] * stages)

    monkeypatch.setitem(schedules.NAMES, "serial", schedules.Builtin(one_at_a_time))
    assert named("serial", 2, 2) == Schedule(["F0 B0 F1 B1"] * 2)
    with pytest.raises(ValueError, match=r"no schedule 'cereal'; known: .*'serial'"):
        named("cereal", 2, 2)
    for name in schedules.NAMES:  # no other file of the package asks which of them it is
        for file in Path(pipeline.__file__).parent.glob("*.py"):
            asked = re.findall(rf"(==|!=|in|is) [({{]?['\"]{name}['\"]", file.read_text())
            assert not asked, (file, name)


@pytest.mark.parametrize(
    ("schedule", "sizes", "says"),
    [
        ("1f2b", (2, 2), "no schedule '1f2b'; known: 'gpipe', '1f1b', 'interleaved_1f1b'"),
        ("1f1b", (2, 2, 2), "'1f1b' visits each stage once, and chunks=2"),
        ("zero_bubble", (2, 2, 2), "'zero_bubble' visits each stage once, and chunks=2"),
        ("zbv", (2, 2), r"'zbv' visits each stage twice.*stages=\[mesh0, mesh1, mesh1, mesh0\]"),
        (7, (2, 2), "7 is no schedule; known: 'gpipe'"),
        (
            pipeline.gpipe(2, 2),
            (2, 3),
            "for 2 stages, 2 micro-batches, 1 chunks, where .* has 2 stages, 3",
        ),
        (pipeline.gpipe(2, 2), (3, 2), "where the program has 3 stages"),
        (
            pipeline.gpipe(2, 2),
            (2, 2, 2),
            "where the program has 2 stages, 2 micro-batches, 2 chunks",
        ),
        (lambda p, m, v: pipeline.gpipe(p, 1), (2, 3), "where the program has 2 stages, 3 micro"),
        (lambda p, m, v: None, (2, 3), "must return a Schedule, and returned None"),
        (Schedule(["F0 B0 B0"]), (1, 1), "B0 more than once"),
        ("gpipe", (0, 1), "stages=0"),
        ("gpipe", (1, 0), "micro_batches=0"),
        ("gpipe", (1, 1, 0), "chunks=0"),
        ("gpipe", (1, 1.5), "micro_batches=1.5"),
    ],
)
def test_named_says_what_does_not_fit(schedule, sizes, says):
    with pytest.raises((TypeError, ValueError), match=says):
        named(schedule, *sizes)


@pytest.mark.parametrize("cost", [(0, 0), (-1, 2), (float("nan"), 1), (1, float("inf"))], ids=str)
def test_ticks_need_durations(cost):
    with pytest.raises(ValueError, match="no durations"):
        pipeline.gpipe(1, 1).ticks(*cost)
    with pytest.raises(ValueError, match="weights are a part of backward"):
        pipeline.gpipe(1, 1).ticks(1, 2, 3)


def test_of_many_wrong_actions_four_are_named():
    with pytest.raises(ValueError, match=r"stage 0 lacks F0, B0, F1, B1, \.\.\.$"):
        Schedule(["F7 B7"]).check()
    with pytest.raises(ValueError, match=r"stage 0 lacks F0, B0, F1, B1$"):
        Schedule(["F2 B2"]).check()


def test_what_is_said_of_the_schedules_with_a_name():
    said = schedules.NAMES.items()
    assert [name for name, builtin in said if builtin.needs_stages] == [
        "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev",
    ]  # fmt: skip
    assert [name for name, builtin in said if builtin.may_return] == ["gpipe"]
