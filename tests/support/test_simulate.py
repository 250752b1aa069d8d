"""The oracle of rules finds what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from disttensor.core.placement import Partial, Replicate, Shard
from ops.factors import Factors
from ops.registry import RULES, Rule
from tests.support.simulate import check_rule, simulate

X = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
SPLIT = [[Shard(0), Replicate()]]


def made_up(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


@pytest.fixture
def entered() -> Iterator[Any]:
    def enter(**changes: Any) -> None:
        def factors(x: Any) -> Factors:
            base = Factors(
                ((0, 1),), ((1,),), {0: 5, 1: 6}, reduced={0: "sum"}, linear_terms=(frozenset({0}),)
            )
            return base.replace(**changes)

        RULES[made_up] = Rule("made_up", factors)

    yield enter
    RULES.pop(made_up, None)


@pytest.mark.parametrize("func", [torch.sum, torch.relu, torch.add, torch.mul, torch.matmul])
def test_right_rules_pass(func: Any) -> None:
    args = (
        (X,)
        if func in (torch.sum, torch.relu)
        else (X, X.mT.clone() if func is torch.matmul else X)
    )
    assert len(check_rule(func, *args)) == 24


def test_a_right_rule_passes(entered: Any) -> None:
    entered()
    check_rule(made_up, X, mesh_shape=(2, 3))


def test_a_wrong_reduction_is_found(entered: Any) -> None:
    entered(reduced={0: "max"})
    with pytest.raises(AssertionError, match="result 0"):
        check_rule(made_up, X, layouts=SPLIT)


def test_a_wrong_local_shape_is_found(entered: Any) -> None:
    entered(local=lambda call: lambda x: x.sum(0)[:-1])
    with pytest.raises(AssertionError, match="local has shape"):
        check_rule(made_up, X, layouts=SPLIT)


def test_replicas_that_differ_are_found(entered: Any) -> None:
    entered(reduced={0: "inner"})
    with pytest.raises(AssertionError, match="replicas differ"):
        check_rule(made_up, X, layouts=SPLIT)


def test_a_wrong_gradient_is_found(entered: Any) -> None:
    entered(local=lambda call: lambda x: x.sum(0).detach() + 2 * (x - x.detach()).sum(0))
    with pytest.raises(AssertionError, match="gradient 0"):
        check_rule(made_up, X, layouts=SPLIT)


def test_a_collective_that_a_rank_skips_is_found(entered: Any) -> None:
    def local(call: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            return call.collectives.psum(x.sum(0), (0,)) if call.coordinate[0] == 0 else x.sum(0)

        return run

    entered(reduced={0: "inner"}, local=local)
    with pytest.raises(AssertionError, match=r"disagree|did not come"):
        simulate_fast(made_up, X, layouts=SPLIT)


def simulate_fast(*args: Any, **kwargs: Any) -> None:
    """As ``simulate``, but a rank does not wait long for the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.thread_ranks.PATIENCE", 0.5)
        simulate(*args, **kwargs)


def test_partial_pieces_reduce_to_the_value(entered: Any) -> None:
    entered()
    (got,) = check_rule(made_up, X, layouts=[[Partial("avg"), Shard(1)]])
    assert got.outputs(2) == ((Partial("avg"), Shard(0)),)
