"""Reshards that a program asks for: decided once for each kind, as other calls.

Not here: what a reshard does (``disttensor.tensor.reshard``).
"""

from __future__ import annotations

from collections.abc import Sequence

from disttensor.comm.program import Call
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Placement
from disttensor.dispatch.call_plan import CONSTANT, CallPlan, Planned, PythonCall, Read, ReadKind
from disttensor.meta.infer import Out
from disttensor.tensor.awaited import started
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import target

_UNNOTED = Call(lambda: "reshard", None, effect=0)  # ranks that differ in it wait for each other


def reshard(
    x: DistTensor, mesh: ProcessMesh | None, placements: Sequence[Placement] | None
) -> DistTensor:
    """``x`` on ``mesh`` (None: its own) with these placements; it shares no memory with x."""
    return started(x, target(x.spec, mesh or x.spec.mesh, placements, None, None))


def first_reshard(
    x: DistTensor, mesh: ProcessMesh | None, placements: Sequence[Placement] | None
) -> tuple[DistTensor, Planned]:
    """The same, and the plan of the next ones of this kind: for the C code."""
    src, dst = x.spec, target(x.spec, mesh or x.spec.mesh, placements, None, None)
    result, on = started(x, dst), (src.mesh.coordinate, dst.mesh.coordinate)
    if src.mesh is dst.mesh or on != (None, None):
        return result, PythonCall(lambda args, kwargs: started(args[0], dst), _UNNOTED)
    out = Out(0, dst.shape, dst.dtype, (0,), None, None)
    reads = Read(ReadKind.TENSOR), CONSTANT, CONSTANT
    plan = CallPlan(
        reshard, dst.mesh, None, (src,), reads, (), (dst,), template=out, transfers=True,
        native=True, call=_UNNOTED,
    )  # fmt: skip
    return result, plan
