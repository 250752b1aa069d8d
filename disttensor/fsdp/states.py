"""The states of a segment, and what changes them.

Its parameters: ``Segment.state``

    SHARDED     modules hold shards; the memory is freed   start_gather   -> GATHERING
    GATHERING   the all-gather runs                        finish_gather  -> GATHERED
    GATHERED    the memory has values; modules hold shards show_params    -> VISIBLE
                                                           free           -> SHARDED
                the values have changed since              start_gather   -> GATHERING
    VISIBLE     modules hold the unsharded parameters      hide_params    -> GATHERED

``free`` does nothing to memory that persists or has a pin (``Segment.pins``).

Its forwards: ``SegmentForward.state``

    IDLE        no forward has begun                       begin          -> RUNNING
    RUNNING     the forward of a module is on the stack    end            -> BETWEEN
    BETWEEN     forwards of its other modules may follow   begin          -> RUNNING
                                                           close          -> IDLE

Its gradients in one backward: ``SegmentBackward.state``

    COLLECTING  some gradients are expected                all are there  -> READY
    READY       segments before it are reduced first       start          -> REDUCING
    REDUCING    the reduction has started                  a new gradient -> LATE
    LATE        one gradient missed it                     finish         -> DONE
    DONE        between backwards
    DEFERRED    between backwards, not reduced yet         flush          -> DONE

The end of a backward starts what has not started, and leads to DONE, or to DEFERRED if it is not
the last of an accumulation. REDUCING also holds where the context sends nothing. A running backward
has a record of its own. It replaces ``Segment.last`` when the backward ends without an error; after
an error the old record stays, with its DEFERRED.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

ShardState = Enum("ShardState", "SHARDED GATHERING GATHERED VISIBLE")
ForwardState = Enum("ForwardState", "IDLE RUNNING BETWEEN")
ReduceState = Enum("ReduceState", "COLLECTING READY REDUCING LATE DONE DEFERRED")

# Why a segment stays gathered: its values are in a graph of create_graph=True, until they change;
# or the running backward recomputes a region of it. A third reason is each ``unshard`` context.
Pin = Enum("Pin", "GRAPH BACKWARD")


class SegmentBackward:
    """A segment in one backward. ``last``: the record of the last backward, whose leaves and
    companions are expected again. None: the segment has had no backward.

    to_leave    forwards whose nodes have not all run.
    arrived     the leaves that have their gradient.
    expected    the leaves that the last backward reached. Empty: not known.
    companions  the segments without all-gathers that received gradients in the same backward.
    """

    def __init__(self, last: SegmentBackward | None = None) -> None:
        self.state = ReduceState.COLLECTING if last else ReduceState.DONE
        self.to_leave = 0
        self.arrived: set[int] = set()
        self.expected: set[int] = (last.arrived or last.expected) if last else set()
        self.companions: dict[Any, None] = last.companions if last else {}
