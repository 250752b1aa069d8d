"""Reshards that a program asks for: decided once for each kind, as other calls.

Not here: what a reshard does (``disttensor.tensor.reshard``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from disttensor.autograd import token
from disttensor.comm.program import Call
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Placement
from disttensor.core.spec import DistSpec
from disttensor.recipe import Recipe, outputs_of, with_recipe
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
) -> tuple[DistTensor, Callable[..., Any]]:
    """The same, and what carries out the next ones of this kind: for the C code."""
    dst = target(x.spec, mesh or x.spec.mesh, placements, None, None)
    return started(x, dst), _runner_of(x.spec, dst)


def _runner_of(src: DistSpec, dst: DistSpec) -> Callable[..., Any]:
    def run(args: Sequence[Any], kwargs: Any) -> DistTensor:
        return started(args[0], dst)

    runner: Any = run
    runner.call = _UNNOTED
    if src.mesh is dst.mesh or src.mesh.coordinate is not None or dst.mesh.coordinate is not None:
        return run
    device = dst.mesh.device
    recipe = Recipe(
        None, ((), None, None), (), outputs_of([dst]), sources=(0,),
        nothing=token.detached(device), orphan=token.orphan(device), shared=(None,), passes=True,
    )  # fmt: skip
    return with_recipe(run, recipe)
