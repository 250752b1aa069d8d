"""Pipeline parallelism: schedules as values, what carries them out, and pictures of what each rank
did when."""

from disttensor.pipeline.plot import plot
from disttensor.pipeline.recorder import Recorder, record
from disttensor.pipeline.run import run
from disttensor.pipeline.schedule import Action, Schedule, Tick
from disttensor.pipeline.schedules import gpipe, interleaved_1f1b, named, one_f_one_b
from disttensor.pipeline.split import Split, split
from disttensor.pipeline.timeline import Event, Timeline

__all__ = [
    "Action", "Event", "Recorder", "Schedule", "Split", "Tick", "Timeline", "gpipe",
    "interleaved_1f1b", "named", "one_f_one_b", "plot",
    "record", "run", "split",
]  # fmt: skip
