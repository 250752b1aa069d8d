"""Pipeline parallelism: schedules as values, and pictures of what each rank did when."""

from disttensor.pipeline.builtin import gpipe, interleaved_1f1b, named, one_f_one_b
from disttensor.pipeline.plot import plot
from disttensor.pipeline.schedule import Action, Schedule, Tick
from disttensor.pipeline.timeline import Event, Timeline

__all__ = [
    "Action", "Event", "Schedule", "Tick", "Timeline", "gpipe", "interleaved_1f1b", "named", "one_f_one_b", "plot",
]  # fmt: skip
