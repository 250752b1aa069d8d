"""All communication of this process: collectives, messages, groups, and their records and checks.

Not here: the layout of a tensor, and the collectives that a change of layout needs (``reshard``).
"""

from disttensor.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from disttensor.comm.objects import gather_objects

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather_objects",
    "reduce_scatter",
]
