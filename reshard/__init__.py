"""reshard: changes the layout of a tensor, on one mesh or from one mesh to another.

The registered functions by the placement of an axis before and after (a file for each kind):

    from \\ to     Replicate     Shard             Partial(op)
    Replicate     -             slice             to_partial
    Shard         all_gather    all_to_all        to_partial
    Partial(op)   all_reduce    reduce_scatter    (none)

``Balanced`` has the moves of ``Shard``, on rows in another order (``balanced``). There is no direct
move between two reductions, so P(sum) -> P(max) goes through Replicate.
``exchange`` handles any pair: it changes several axes from any S and R to any other at once, and
also the order of axes on one dim. ``choose`` returns the cheapest sequence of steps and ``run``
runs it. Between two meshes pieces are sent from rank to rank (``cross_mesh``).

Axes of a joint collective make the same transition; the group is the product of the axes. If
reductions of different kinds are pending on several axes, the last mesh axis is reduced first, as
the innermost: ``{dp: P(sum), tp: P(max)}`` is the sum over dp of the max over tp.
"""

import disttensor  # noqa: F401  (the three packages load in one order, always)

# isort: split
import importlib
import pkgutil
import typing

from disttensor import module_names
from disttensor.comm.groups import Group
from reshard.cross_mesh import choose, cost, run
from reshard.planner import Step, background
from reshard.registry import register

__all__ = ["Group", "Step", "background", "choose", "cost", "register", "run"]

for _file in pkgutil.iter_modules(__path__):  # each registers its functions
    importlib.import_module(f"{__name__}.{_file.name}")


if not typing.TYPE_CHECKING:

    def __getattr__(name):
        module_names.raise_missing(__name__, name)
