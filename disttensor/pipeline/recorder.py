"""Records the actions of this rank, for ``plot`` and the bubble."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

from disttensor.comm import collectives, objects
from disttensor.core.mesh import ProcessMesh
from disttensor.pipeline.action import Action
from disttensor.pipeline.schedule import Schedule
from disttensor.pipeline.timeline import Event, Timeline

_open: ContextVar[tuple[Recorder, ...]] = ContextVar("recorders", default=())


class Recorder:
    """The events of this rank; ``timeline()`` combines the events of all ranks.

    >>> w = dt.ones(3, mesh=mesh, requires_grad=True)
    >>> with pipeline.record() as recorded:
    ...     losses = pipeline.run(lambda x: (w * x).sum(), [1.0, 2.0])
    >>> recorded.timeline().ranks, [str(e.action) for e in recorded.events]
    ([0], ['F0', 'F1', 'B0', 'B1'])
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __enter__(self) -> Recorder:
        _open.set((*_open.get(), self))
        return self

    def __exit__(self, *exc: object) -> None:
        _open.set(tuple(one for one in _open.get() if one is not self))

    def begins(self, action: Action) -> None:
        """Ignores the begin of an action: a Recorder records its end."""

    def follows(
        self, order: Sequence[ProcessMesh], schedule: Schedule, stage: int
    ) -> Mapping[int, int]:
        """Receives the meshes and the schedule of the present run, and this rank's stage. Returns
        micro-batches to leave out, each with one that stands for it: none here."""
        return {}

    def ends(self) -> None:
        """Ignores the end of a run."""

    def timeline(self) -> Timeline:
        """Returns the timeline of all ranks, which all make this call. Uses one machine's clock."""
        everyone = objects.gather_objects(self.events, collectives.world_group())
        return Timeline([event for events in everyone for event in events])


def record() -> Recorder:
    """Records the runs inside ``with pipeline.record() as recorded:``; see Recorder.

    >>> with pipeline.record() as recorded:
    ...     pass
    >>> recorded.events
    []
    """
    return Recorder()


def recorders() -> tuple[Recorder, ...]:
    """Returns the open recorders."""
    return _open.get()


def note(kind: str, stage: int, micro_batch: int, chunk: int, start: float, shape: str) -> None:
    """Records a forward, a backward or a wait that began at ``start`` and ends now."""
    recorders = _open.get()
    if recorders:
        end = time.perf_counter()
        event = Event(collectives.world()[0], stage, kind, micro_batch, chunk, start, end, shape)
        for recorder in recorders:
            recorder.events.append(event)
