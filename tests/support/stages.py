"""Programs over several stages, run twice: on stage meshes and as one process would.

    def program(on: Stages):
        w = on.leaf(randn(5, 3), 0)                 # a parameter on stage 0
        h = on.value(randn(4, 3), 0) @ w.t()
        return on.to(h, 1).sum()                    # crosses to stage 1

``check_stages`` compares value, requires_grad and every gradient; in one process ``leaf`` and
``value`` give plain tensors and ``to`` gives its argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard

LAYOUTS = {2: ([0], [1]), 4: ([0, 1], [2, 3]), 3: ([0], [1, 2], [3]), 1: ([0], [1], [2], [3])}


def stage_meshes(kind: int = 0) -> list[ProcessMesh]:
    """Meshes of this world's stages: halves of it; 3: one, two and one ranks; 1: each rank on its
    own."""
    kind = kind or dist.get_world_size()
    return [ProcessMesh(ranks, ("tp",)) for ranks in LAYOUTS[kind]]


class Stages:
    """What a program asks for. Without meshes: plain tensors of one process."""

    def __init__(self, meshes: Sequence[ProcessMesh] | None, seed: int = 0) -> None:
        self.meshes = meshes
        self.leaves: list[Any] = []
        self.draw = random.Random(seed)
        self.seed = seed

    def _placements(self, ndim: int, mesh: ProcessMesh) -> list[Any]:
        """Replicated for seed 0, else as the seed says."""
        if not self.seed:
            return [Replicate()] * mesh.ndim
        return [
            self.draw.choice([Replicate(), *(Shard(d) for d in range(ndim))])
            for _ in range(mesh.ndim)
        ]

    def mesh(self, stage: int) -> ProcessMesh:
        assert self.meshes is not None
        return self.meshes[stage % len(self.meshes)]

    def value(self, full: Tensor, stage: int, requires_grad: bool = False) -> Any:
        if self.meshes is None:
            return full.clone().requires_grad_(requires_grad)
        mesh = self.mesh(stage)
        placements = self._placements(full.ndim, mesh)
        return dt.shard_tensor(full, mesh, placements, requires_grad=requires_grad)

    def leaf(self, full: Tensor, stage: int) -> Any:
        self.leaves.append(self.value(full, stage, requires_grad=True))
        return self.leaves[-1]

    def to(self, x: Any, stage: int, whole: bool = False) -> Any:
        if self.meshes is None:
            return x
        mesh = self.mesh(stage)
        return dt.reshard(x, mesh, None if whole else self._placements(x.ndim, mesh))


Program = Callable[[Stages], Any]


def check_stages(
    program: Program,
    meshes: Sequence[ProcessMesh],
    seed: int = 0,
    backward: Callable[[Any], Any] = lambda loss: loss.backward(),
    same_flags: bool = True,
) -> Stages:
    """``program`` on ``meshes`` gives the loss, and the leaves the gradients, that one process
    gives."""
    plain, staged = Stages(None), Stages(meshes, seed)
    expected, loss = program(plain), program(staged)
    expected_list = expected if isinstance(expected, (list, tuple)) else [expected]
    losses = loss if isinstance(loss, (list, tuple)) else [loss]
    for e in (expected, loss):
        backward(e)
    values = [x.detach().full_tensor(everywhere=True) for x in losses]
    grads = [None if x.grad is None else x.grad.full_tensor() for x in staged.leaves]
    for x, value, e in zip(losses, values, expected_list, strict=True):
        assert (x.shape, x.dtype) == (e.shape, e.dtype)
        assert x.requires_grad == e.requires_grad or not same_flags
        torch.testing.assert_close(value, e.detach(), rtol=1e-9, atol=1e-11)
    for i, (x, g, e) in enumerate(zip(staged.leaves, grads, plain.leaves, strict=True)):
        assert x.requires_grad and x.is_leaf
        if not x.is_initialized or e.grad is None:
            assert g is None, f"leaf {i} has a gradient, and should not"
        else:
            assert g is not None, f"leaf {i} has no gradient"
            torch.testing.assert_close(
                g.detach(), e.grad, rtol=1e-9, atol=1e-11, msg=lambda m, i=i: f"leaf {i}: {m}"
            )
    return staged
