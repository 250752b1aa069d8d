"""Pipeline parallelism: schedules as values, and what a run recorded."""

from disttensor.pipeline.builtin import gpipe, interleaved_1f1b, named, one_f_one_b
from disttensor.pipeline.schedule import Action, Schedule, Tick

__all__ = ["Action", "Schedule", "Tick", "gpipe", "interleaved_1f1b", "named", "one_f_one_b"]
