"""Pipeline parallelism: schedules as values, a runner for them, and timelines of all ranks."""

from disttensor.pipeline.action import Action
from disttensor.pipeline.costs import Costs
from disttensor.pipeline.plot import plot
from disttensor.pipeline.recorder import Recorder, record
from disttensor.pipeline.run import run
from disttensor.pipeline.schedule import Schedule, Tick
from disttensor.pipeline.schedules import gpipe, interleaved_1f1b, named, one_f_one_b, visits
from disttensor.pipeline.search import search
from disttensor.pipeline.split import Split, split
from disttensor.pipeline.timeline import Event, Timeline
from disttensor.pipeline.zero_bubble import dualpipev, interleaved_zero_bubble, zbv, zero_bubble
from disttensor.trace.skip import never_skip, skip

__all__ = [
    "Action", "Costs", "Event", "Recorder", "Schedule", "Split", "Tick", "Timeline", "dualpipev",
    "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "named", "never_skip", "one_f_one_b",
    "plot", "record", "run", "search", "skip", "split", "visits", "zbv", "zero_bubble",
]  # fmt: skip
