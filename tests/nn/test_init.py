"""Functions of torch.nn.init that run as torch wrote them: the values of one process, on all ranks
of the mesh and on those outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from tests.support.pool import on_ranks


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [1, 3]], ids=str)
@pytest.mark.parametrize("place", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
@on_ranks(4)
def test_dirac_and_eye_are_those_of_one_process(place, ranks):
    mesh = ProcessMesh(ranks, ("x",))
    for shape in [(5, 3, 3), (5, 3, 3, 3), (5, 3, 3, 3, 3)]:
        x = nn.init.dirac_(dt.empty(*shape, mesh=mesh, placements=[place]))
        if x.is_initialized:
            assert torch.equal(x.full_tensor(), nn.init.dirac_(torch.empty(shape)))
    y = nn.init.eye_(dt.empty(5, 3, mesh=mesh, placements=[Shard(0)]))
    assert not y.is_initialized or torch.equal(y.full_tensor(), torch.eye(5, 3))
