"""Proposed plans, the results of the functions of ``dt.plans``; the plan that splits experts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import nn

from disttensor.checks import check_int, check_sequence, check_type
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Placement, Replicate, Shard


class Proposal(dict[str, Sequence[Placement]]):
    """A plan for ``shard_module``: name of each parameter -> placements. ``why[name]`` says the
    reason.

    It can be changed like a dict. When printed, equal entries of several layers share one line.

    >>> plan = dt.plans.megatron(torch.nn.TransformerEncoderLayer(4, 2, 8))
    >>> isinstance(plan, dt.plans.Proposal), plan.why["linear1.weight"]
    (True, 'mlp, first: its output is split')
    >>> plan["linear2.weight"] = [dt.Replicate(), dt.Replicate()]
    """

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[str, str] = {}

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], int] = {}
        for name, placements in self.items():
            shown = "[" + ", ".join(map(str, placements)) + "]"
            key = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), shown, self.why.get(name, "")
            rows[key] = rows.get(key, 0) + 1
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        return "\n".join(
            f"{name.ljust(widths[0])}  {shown.ljust(widths[1])}  {why}".rstrip()
            for name, shown, why in rows
        )


def axes_of(
    who: str, listed: Sequence[int | str], mesh: ProcessMesh | None
) -> tuple[list[int], tuple[int, ...]]:
    """Returns the numbers of these axes, and the shape of the mesh. Without a mesh the last axis is
    assumed to be the last one of the mesh, and all sizes are 1."""
    if mesh is not None:
        mesh = as_mesh(f"{who}: mesh", mesh)
        return [mesh.axis(a) for a in listed], mesh.shape
    for a in listed:
        if isinstance(a, str):
            raise ValueError(
                f"{who}: mesh_axis={a!r}: an axis given by its name needs the mesh too: "
                f"{who}(model, {a!r}, mesh)"
            )
    axes = [check_int(f"{who}: mesh_axis", a, 0) for a in listed]
    return axes, (1,) * (max(axes, default=0) + 1)


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
    given = (mesh_axis,) if isinstance(mesh_axis, (int, str)) else mesh_axis
    listed = check_sequence("plans.experts: mesh_axis", given, "an axis, or a list of them,")
    axes, shape = axes_of("plans.experts", listed, mesh)
    found = expert_tensors(model)
    if not found or not axes:
        raise ValueError(
            f"plans.experts: no module of this {type(model).__name__} holds experts: one with "
            "num_experts, and parameters [num_experts, ...] of which some are matrices"
        )
    parts = math.prod(shape[a] for a in axes)
    plan = Proposal()
    for name, count in found.items():
        if count < parts:
            raise ValueError(
                f"plans.experts: {name} has {count} experts for {parts} ranks: some would hold "
                "none. Split them over fewer axes"
            )
        plan[name] = [Shard(0) if a in axes else Replicate() for a in range(len(shape))]
        plan.why[name] = "experts: by number"
    return plan
