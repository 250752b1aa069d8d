"""Every byte that leaves this process: collectives, messages, groups, and what records or checks
them.

Not here: what a tensor's layout is, and which collective a change of layout needs (``reshard``).
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
