"""Tools that explain a program or find its faults.

>>> with dt.debugging.record_comms() as log:
...     y = dt.debugging.explain(torch.relu, dt.ones(4, mesh=mesh))
>>> len(log.records)
0
"""

from disttensor.api.compare_regular import compare_regular
from disttensor.api.info import info
from disttensor.api.pieces import pieces
from disttensor.comm.compare_collectives import compare_ranks
from disttensor.comm.log import CommLog, CommRecord, record_comms
from disttensor.dispatch.explain import Explanation, explain
from disttensor.dispatch.strict import strict
from disttensor.fsdp.replicas import check_replicas

__all__ = [
    "CommLog", "CommRecord", "Explanation", "check_replicas", "compare_ranks", "compare_regular",
    "explain", "info", "pieces", "record_comms", "strict",
]  # fmt: skip
