"""Records the actions of this rank, for ``plot`` and the bubble."""

from __future__ import annotations

from disttensor.comm import objects
from disttensor.comm.groups import world_group
from disttensor.observe import Observer
from disttensor.pipeline.timeline import Event, Timeline


class Recorder(Observer):
    """The events of this rank; ``timeline()`` combines the events of all ranks.

    >>> w = dt.ones(3, mesh=mesh, requires_grad=True)
    >>> with pipeline.record() as recorded:
    ...     losses = pipeline.run(lambda x: (w * x).sum(), [1.0, 2.0])
    >>> recorded.timeline().ranks, [str(e.action) for e in recorded.events]
    ([0], ['F0', 'B0', 'F1', 'B1'])
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def end_action(self, event: Event) -> None:
        self.events.append(event)

    def timeline(self) -> Timeline:
        """Returns the timeline of all ranks, which all make this call. Uses one machine's clock."""
        everyone = objects.gather_objects(self.events, world_group())
        return Timeline([event for events in everyone for event in events])


def record() -> Recorder:
    """Records the runs inside ``with pipeline.record() as recorded:``; see Recorder.

    >>> with pipeline.record() as recorded:
    ...     pass
    >>> recorded.events
    []
    """
    return Recorder()
