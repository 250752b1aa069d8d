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
from disttensor.dispatch import native
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


@pytest.mark.parametrize("in_c", [False, True], ids=["Python", "C"])
def test_integers_that_no_rule_reads_and_generators_count_by_type(in_c):
    with fake_world(2), native.using(in_c):
        mesh = dt.init_mesh((2,))
        x = dt.ones(4, mesh=mesh, placements=[S0])
        p = dt.full((4,), 0.5, mesh=mesh, placements=[S0])
        calls = {
            "mul": lambda n: x * n,
            "by name": lambda n: torch.add(x, alpha=n, other=x),
            "where": lambda n: torch.where(x > 1, x, n),
            "clamp": lambda n: x.clamp(min=n),
            "in place": lambda n: x.clone().fill_(n),
            "full_like": lambda n: torch.full_like(x, n),
            "a list": lambda n: torch._foreach_mul([x, x], [n, n])[0],
            "a generator": lambda n: p.bernoulli(generator=torch.Generator().manual_seed(n)),
        }
        for name, call in calls.items():
            for n in (2, 3, 3):  # C has a plan after the second call
                call(n)
            known = len(PLANS), native.module.counts()["kinds"] if native.module else 0
            seen = [call(n).local.clone() for n in range(4, 24)]
            after = len(PLANS), native.module.counts()["kinds"] if native.module else 0
            assert known == after, name
            assert len({tuple(t.tolist()) for t in seen}) > 1, name
        known = len(PLANS)
        assert (x * 2).dtype == (x * True).dtype == torch.float32
        assert len(PLANS) == known + 1  # a bool counts by value
        for n in (0, -1):
            assert x.unsqueeze(0).sum(n).shape == ((4,) if n == 0 else (1,))  # a dim is read
        with pytest.raises(RuntimeError, match="nteger"):  # also on a rank off the mesh
            x.int() ** -1


class Unread(int):
    """An integer on which operations fail."""

    def __bool__(self):
        raise AssertionError("a rule reads an integer that its key does not contain")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __index__ = __neg__ = __bool__
    __hash__ = int.__hash__


def test_no_rule_reads_integers_that_count_by_type():
    arg = ops.Arg((4, 6), [S0], torch.float32).placed(1, 0)
    rules = {func: rule for func, rule in RULES.items() if not rule.integers}
    assert len(rules) > 500
    for func, rule in rules.items():
        for first in (arg, [arg]):
            for n in range(4):
                try:
                    rule.factors(first, *[Unread(2)] * n)
                except AssertionError as error:
                    raise AssertionError(f"{func}: {error}") from None
                except Exception:  # not a call of this function
                    continue
