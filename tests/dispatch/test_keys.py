"""What a plan depends on is in its key, or empties the tables when it changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import disttensor as dt
import ops
from disttensor import Replicate, Shard
from disttensor.dispatch.dispatch import PLANS
from ops.registry import RULES, replace_rule
from tests.support.pool import fake_world

R, S0 = Replicate(), Shard(0)


@dataclass
class Tag:
    """Equal to others by its fields, so it has no hash."""

    name: str = "a"


def custom(name):
    """An elementwise operator that has no rule yet, of a name of its own."""

    @torch.library.custom_op(f"test_keys::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    op.register_fake(torch.empty_like)
    return getattr(torch.ops.test_keys, name).default


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16, complex])
def test_numbers_that_are_not_whole_count_by_type(kind):
    with fake_world(2):
        x = dt.ones(4, mesh=dt.init_mesh((2,)), placements=[S0])
        results = {(x * kind(0.5)).dtype}
        known = len(PLANS)
        results |= {(x * kind(i + 0.25)).dtype for i in range(20)}
        assert len(PLANS) == known
        assert results == {(torch.ones(4) * kind(0.5)).dtype}
        assert (x * kind(2.0)).local.tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@pytest.mark.parametrize("how", ["rule", "replace_rule"])
def test_a_rule_registered_after_the_first_call_counts(how):
    with fake_world(2):
        op = custom(how)
        x = dt.ones(4, mesh=dt.init_mesh((2,)), placements=[S0])
        assert op(x).placements == op(x).placements == (R,)
        if how == "rule":
            ops.rule(op, "a -> a")
        else:
            replace_rule(op, RULES[torch.neg])
        try:
            assert op(x).placements == (S0,)
        finally:
            RULES.pop(op)


def test_an_argument_that_cannot_be_a_key_is_passed_on():
    """Also where the rule depends on values of floats, as that of a norm."""
    with fake_world(2):
        x = dt.ones(4, mesh=dt.init_mesh((2,)), placements=[S0])
        with pytest.raises((TypeError, AttributeError), match="Tag"):
            torch.norm(x, 2.0, Tag())


def test_rules_are_not_told_what_no_key_says():
    assert not hasattr(ops.Arg((2,)), "requires_grad")
    assert "requires_grad" not in Path(ops.factors.__file__).read_text()
