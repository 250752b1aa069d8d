"""Which rank owns which parameter of an optimizer, and where the state of the parameter is.

``disttensor.optim.owned_step`` runs the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from disttensor.core.layout import replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.off_mesh.execute import off_mesh_leaf
from disttensor.pytree import collect
from disttensor.tensor.dist_tensor import DistTensor, wrap

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer
OWNERS = "_disttensor_owners"  # the attribute of an optimizer


class Owners:
    """choose: see ``own``. of: id of a parameter -> (the parameter, the mesh of its owner), in the
    order in which they were assigned. cost: what each rank has to do. steps: so far."""

    def __init__(self, choose: Callable[[Tensor], bool]) -> None:
        self.choose = choose
        self.of: dict[int, tuple[DistTensor, ProcessMesh]] = {}
        self.cost: dict[int, int] = {}
        self.steps = 0

    def assign(self, params: Iterable[Tensor]) -> None:
        """Gives each new chosen parameter an owner: the most costly first, each to the rank of its
        mesh that has least to do."""
        held = [p for p in params if isinstance(p, DistTensor) and id(p) not in self.of]
        new = [p for p in held if _can_be_owned(p) and self.choose(p)]
        for p in sorted(new, key=_cost, reverse=True):
            self.give(p, min(p.spec.mesh.root.ranks, key=lambda r: self.cost.get(r, 0)))

    def give(self, p: DistTensor, rank: int) -> None:
        """Makes ``rank`` the owner of p."""
        self.cost[rank] = self.cost.get(rank, 0) + _cost(p)
        self.of[id(p)] = p, ProcessMesh([rank], ("owner",), p.spec.mesh.root.device_type)


def _can_be_owned(p: DistTensor) -> bool:
    """Returns True if several ranks hold p, each a box of its value."""
    layout = p.spec.layout
    return p.spec.mesh.root.size > 1 and not layout.custom and not layout.partial


def _cost(p: Tensor) -> int:
    """Returns the operations of a product of the matrix with its transpose, on the smaller side;
    further dims belong to the second."""
    rows = p.shape[0] if p.ndim else 1
    columns = math.prod(p.shape[1:])
    return min(rows, columns) ** 2 * max(rows, columns)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    listed = (p for group in optimizer.param_groups for p in group["params"])
    return list({id(p): p for p in listed}.values())


def owners_of(optimizer: Optimizer) -> dict[int, tuple[DistTensor, ProcessMesh]]:
    """Returns id of a parameter -> (the parameter, the mesh of its owner), of parameters that have
    an owner."""
    owners: Owners | None = getattr(optimizer, OWNERS, None)
    if owners is None:
        return {}
    owners.assign(params_of(optimizer))
    return owners.of


def on_owner(spec: DistSpec, owner: ProcessMesh) -> DistSpec:
    return DistSpec(owner, replicated(spec.ndim), spec.shape, spec.dtype)


def like_state(optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    """Returns a function of a parameter p, which returns a tensor on the mesh and in the layout
    that the state of p has: an uninitialized tensor on the owner of p, or p itself if there is no
    owner, or if the state is not there yet."""
    owned = owners_of(optimizer)

    def like(p: Tensor) -> Tensor:
        found = owned.get(id(p))
        if found is None or state_to_bring(optimizer, found[0]):
            return p
        return state_on_owner(None, on_owner(found[0].spec, found[1]))

    return like


def state_to_bring(optimizer: Optimizer, p: DistTensor) -> list[DistTensor]:
    """Returns the tensors of the state of p that are on the mesh of p."""
    held: list[DistTensor] = collect(optimizer.state.get(p, {}), [], DistTensor)
    return [x for x in held if x.spec.mesh.root is p.spec.mesh.root]


def state_on_owner(x: Tensor | None, spec: DistSpec) -> DistTensor:
    """Returns a DistTensor of ``spec`` with the local x; None: new memory."""
    if spec.mesh.coordinate is None:
        return off_mesh_leaf(spec)
    if x is None:
        x = torch.empty(spec.shape, dtype=spec.dtype, device=spec.mesh.device)
    return wrap(x.detach(), spec)
