"""The styles of torch's ``parallelize_module`` as values of a plan.

A style says how the weight of a module is split. Its layouts of inputs and outputs have no
counterpart: here they follow from the program, and results stay DistTensors.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Placement, Replicate, Shard

_OF_TORCH = "torch.distributed.tensor.parallel.style"
# style -> the dims along which it splits the tensors of a Linear, and of an Embedding
_DIMS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "ColwiseParallel": ({"weight": 0, "bias": 0}, {"weight": 1}),
    "RowwiseParallel": ({"weight": 1}, {"weight": 0}),
}


def is_style(value: Any) -> bool:
    return type(value).__module__ == _OF_TORCH


def splits(style: Any) -> bool:
    """Returns True for a style that splits parameters; the others leave them replicated."""
    return type(style).__name__ in _DIMS


def placements_of(style: Any, module: nn.Module, name: str, mesh: ProcessMesh) -> list[Placement]:
    """Returns the placements of the tensor ``name`` of ``module`` under a style that splits.

    Raises TypeError for a module that is no Linear and no Embedding, and ValueError if the mesh has
    no axis ``"tp"`` and several axes.
    """
    kind, (owner, _, leaf) = type(style).__name__, name.rpartition(".")
    found = module.get_submodule(owner)
    if not isinstance(found, (nn.Linear, nn.Embedding)):
        raise TypeError(
            f"{kind} of {owner or 'the module'!r}, a {type(found).__name__}: it splits nn.Linear "
            "and nn.Embedding. Give placements for the tensors of other modules"
        )
    if mesh.ndim > 1 and "tp" not in mesh.dim_names:
        raise ValueError(
            f"{kind} on {mesh!r}: no axis is named 'tp', so the axis to split over is not known. "
            "Name it, or give placements"
        )
    placements: list[Placement] = [Replicate()] * mesh.ndim
    dim = _DIMS[kind][isinstance(found, nn.Embedding)].get(leaf)
    if dim is not None:
        placements[mesh.axis("tp") if mesh.ndim > 1 else 0] = Shard(dim)
    return placements
