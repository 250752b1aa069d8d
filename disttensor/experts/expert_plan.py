"""The plan that splits a model's experts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from disttensor.checks import check_int, check_sequence, check_type
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Replicate, Shard
from disttensor.experts.proposal import Proposal


def expert_tensors(model: nn.Module) -> dict[str, int]:
    """Returns name of each parameter [experts, ...] -> number of experts, for modules that have
    ``num_experts``, or are called experts, and have matrices for each expert."""
    found = {}
    for name, module in model.named_modules():
        own = {key: p for key, p in module._parameters.items() if p is not None}
        stacks = {p.shape[0] for p in own.values() if p.ndim == 3}
        count = getattr(module, "num_experts", None)
        if len(stacks) != 1 or not (count in stacks or "expert" in name.rpartition(".")[2]):
            continue
        (size,) = stacks
        for key, p in own.items():
            if p.ndim >= 2 and p.shape[0] == size:
                found[f"{name}.{key}" if name else key] = size
    return found


def experts(
    model: nn.Module,
    mesh_axis: int | str | Sequence[int | str],
    mesh: ProcessMesh | None = None,
) -> Proposal:
    """Proposes to split the experts of each mixture by their number over ``mesh_axis``: its number
    or (with ``mesh``) its name, or a list of axes, which together hold each expert once. The plan
    names only the parameters of experts; ``plan | other`` joins it to another plan.

    Experts are the parameters [experts, ...] of a module with ``num_experts``, or called experts,
    that holds a matrix for each. Without ``mesh`` the axis is assumed to be the last one. If the
    axis does not divide the number of experts, they are split like torch.chunk. Raises ValueError
    if there is no such module, if there are more ranks than experts, and for a name without a mesh.

    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.num_experts = 4
    ...         self.up = torch.nn.Parameter(torch.ones(4, 8, 16))
    >>> print(dt.plans.experts(torch.nn.ModuleDict({"experts": Experts()}), "dp", mesh))
    experts.up  [S(0), R]  experts: by number
    """
    check_type("plans.experts: model", model, nn.Module, "a module")
    if mesh is not None:
        mesh = as_mesh("plans.experts: mesh", mesh)
    given = (mesh_axis,) if isinstance(mesh_axis, (int, str)) else mesh_axis
    listed = check_sequence("plans.experts: mesh_axis", given, "an axis, or a list of them,")
    if mesh is None and any(isinstance(a, str) for a in listed):
        raise ValueError(
            f"plans.experts: mesh_axis={mesh_axis!r}: an axis given by its name needs the mesh "
            "too: experts(model, 'ep', mesh)"
        )
    axes = [
        check_int("plans.experts: mesh_axis", a, 0) if mesh is None else mesh.axis(a)
        for a in listed
    ]
    found = expert_tensors(model)
    if not found or not axes:
        raise ValueError(
            f"plans.experts: no module of this {type(model).__name__} holds experts: one with "
            "num_experts, and parameters [num_experts, ...] of which some are matrices"
        )
    parts = math.prod(mesh.shape[a] for a in axes) if mesh is not None else 1
    plan = Proposal()
    for name, count in found.items():
        if count < parts:
            raise ValueError(
                f"plans.experts: {name} has {count} experts for {parts} ranks: some would hold "
                "none. Split them over fewer axes"
            )
        ndim = mesh.ndim if mesh is not None else max(axes) + 1
        plan[name] = [Shard(0) if a in axes else Replicate() for a in range(ndim)]
        plan.why[name] = "experts: by number"
    return plan
