"""The oracle finds what it is there to find."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from disttensor import DistTensor, Replicate, Shard
from tests.support.oracle import Problem, check_op, compare_replicas, line, place, randn
from tests.support.pool import on_ranks

R, S0 = Replicate(), Shard(0)


def one_rank_fails(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, DistTensor) and dist.get_rank() == 1:
        raise ValueError("on this rank only")
    return x.detach() * 2


def writes_its_input(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, DistTensor):
        x.local.data.add_(1e-6)
    return x.detach() * 0


@on_ranks(2)
def test_what_is_wrong_is_found_on_every_rank() -> None:
    x = place(randn(5, 3), line(), [R])
    compare_replicas([x, place(randn(5, 3), line(), [S0]), 7])
    if dist.get_rank() == 1:
        x.local[0, 0] += 1e-12
    with pytest.raises(Problem, match="replicas differ in bits"):
        compare_replicas([x])
    with pytest.raises(Problem, match="different specs"):
        compare_replicas([place(randn(5, 3), line(), [(R, S0)[dist.get_rank()]])])
    with pytest.raises(Problem, match=r"on this rank only.*rank 1"):
        check_op(one_rank_fails, randn(5, 3), layouts=[[R]])
    for layout in (R, S0):
        with pytest.raises(Problem, match="input 0 after the call"):
            check_op(writes_its_input, randn(5, 3), layouts=[[layout]])
