"""All communication of this process: collectives, messages, groups, and their records and checks.

Ranks are compared when they enter some functions (``agree``), at each read (``compare_reads``), at
each optimizer step (``compare_programs``), and in debug mode before each collective
(``compare_collectives``); their regular tensors at the calls 1, 2, 4, ... of a line
(``compare_values``).

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
