"""The named schedules. All run the backwards of a stage in the order of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from disttensor.checks import check_int, check_sequence
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.pipeline.action import Action
from disttensor.pipeline.schedule import Schedule, route
from disttensor.pipeline.steady import interleaved, one_visit, sizes
from disttensor.pipeline.zero_bubble import dualpipev, interleaved_zero_bubble, zbv, zero_bubble

Maker = Callable[[int, int, int], Schedule]


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns all forwards, then all backwards: every micro-batch is live at once. Idle fraction:
    (p - 1) / (m + p - 1).

    >>> pipeline.gpipe(2, 2)
    Schedule(['F0 F1 B0 B1', 'F0 F1 B0 B1'])
    """
    sizes(stages, micro_batches, chunks)
    forwards = [Action("F", m, c) for c in range(chunks) for m in range(micro_batches)]
    backwards = [Action("B", m, c) for c in reversed(range(chunks)) for m in range(micro_batches)]
    return Schedule([[*forwards, *backwards]] * stages)


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Returns 1F1B: backwards as soon as possible; stage s of p holds at most p - s micro-batches.

    The same idle time as "gpipe", less memory. From PipeDream-Flush (Narayanan et al. 2021).

    >>> pipeline.one_f_one_b(2, 3)
    Schedule(['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2'])
    """
    instead = "'interleaved_1f1b' or 'gpipe'"
    return Schedule(one_visit("1f1b", instead, stages, micro_batches, chunks))


def interleaved_1f1b(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Returns 1f1b with ``chunks`` visits of each stage: about 1/chunks of the idle time, more
    transfers and memory.

    Micro-batches go through a chunk in groups of ``stages``. If that does not divide their number,
    the groups are larger and nearly equal, as smaller groups would idle longer. The warm-up is the
    one of Megatron-LM (Narayanan et al. 2021): 2 (p - 1 - s) forwards on stage s, and (chunks - 1)
    groups.

    >>> pipeline.interleaved_1f1b(2, 2, 2)
    Schedule(['F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1', 'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1'])
    """
    sizes(stages, micro_batches, chunks)
    if chunks == 1:
        return one_f_one_b(stages, micro_batches)
    return Schedule(interleaved(stages, micro_batches, chunks, ahead=2))


class Builtin(NamedTuple):
    """needs_stages: visits a mesh several times, so the order of visits has to be given.
    may_return: the program may return to an earlier mesh within a visit. shape: the order of
    visits, see ``Schedule``."""

    make: Maker
    needs_stages: bool = False
    may_return: bool = False
    shape: str = "loop"


# The only table of named schedules.
NAMES = {
    "gpipe": Builtin(gpipe, may_return=True),
    "1f1b": Builtin(one_f_one_b),
    "interleaved_1f1b": Builtin(interleaved_1f1b, needs_stages=True),
    "zero_bubble": Builtin(zero_bubble),
    "interleaved_zero_bubble": Builtin(interleaved_zero_bubble, needs_stages=True),
    "zbv": Builtin(zbv, needs_stages=True, shape="v"),
    "dualpipev": Builtin(dualpipev, needs_stages=True, shape="v"),
}


def named(
    schedule: str | Schedule | Maker, stages: int, micro_batches: int, chunks: int = 1
) -> Schedule:
    """Returns the checked schedule of a name, of a function of (stages, micro_batches, chunks), or
    the checked Schedule itself.

    >>> pipeline.named("gpipe", 1, 2) == pipeline.named(pipeline.Schedule(["F0 F1 B0 B1"]), 1, 2)
    True

    Raises ValueError for an unknown name, for other sizes than the given ones, and if ``check``
    does.
    """
    sizes(stages, micro_batches, chunks)
    known = f"known: {_known()}; or a Schedule, or a function that makes one"
    if isinstance(schedule, str):
        if schedule not in NAMES:
            raise ValueError(f"no schedule {schedule!r}; {known}")
        return _builtin(schedule, stages, micro_batches, chunks)
    if not isinstance(schedule, Schedule):
        if not callable(schedule):
            raise ValueError(f"{schedule!r} is no schedule; {known}")
        made = schedule(stages, micro_batches, chunks)
        if not isinstance(made, Schedule):
            raise ValueError(f"{schedule!r} must return a Schedule, and returned {made!r}")
        schedule = made
    made_for = (schedule.stages, schedule.micro_batches, schedule.chunks)
    if made_for != (stages, micro_batches, chunks):
        words = "{} stages, {} micro-batches, {} chunks"
        raise ValueError(
            f"a schedule for {words.format(*made_for)}, where the program has "
            f"{words.format(stages, micro_batches, chunks)}"
        )
    schedule.check()
    return schedule


def visits(stages: Sequence[ProcessMesh], schedule: str, times: int = 2) -> list[ProcessMesh]:
    """Returns the meshes of ``stages`` in the order in which a named schedule visits them, for
    ``split`` and ``run``: each once, several ``times`` in a loop, or there and back.

    >>> first, second = mesh["dp"], mesh["tp"]
    >>> pipeline.visits([first, second], "zbv") == [first, second, second, first]
    True

    Raises ValueError for an unknown name.
    """
    listed = check_sequence("pipeline.visits: stages", stages, "a list of meshes")
    meshes = [as_mesh("pipeline.visits: stages: entry", mesh) for mesh in listed]
    check_int("pipeline.visits: times", times, 1)
    builtin = NAMES.get(schedule) if isinstance(schedule, str) else None
    if builtin is None:
        raise ValueError(f"pipeline.visits: no schedule {schedule!r}; known: {_known()}")
    chunks = 1 if not builtin.needs_stages else 2 if builtin.shape == "v" else times
    return route(builtin.shape, meshes, chunks)


def _known() -> str:
    return ", ".join(map(repr, NAMES))


@lru_cache(maxsize=64)
def _builtin(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    schedule = NAMES[name].make(stages, micro_batches, chunks)
    schedule.check()
    return schedule
