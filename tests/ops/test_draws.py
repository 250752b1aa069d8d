"""Random functions: the same numbers however the result lies, and those that torch would draw."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
import ops
from disttensor.core.placement import Partial, Placement, Replicate, Shard
from ops import Arg
from tests.support.oracle import randn
from tests.support.simulate import Simulated, check_rule, random_placements, simulate
from tests.support.structure import replace_tensors, tensors_in
from tests.support.thread_ranks import SimulatedCollectives

T = torch.Tensor
R, S0, S1 = Replicate(), Shard(0), Shard(1)
X, ODDS, IMAGE = randn(5, 6), torch.sigmoid(randn(5, 6)), randn(3, 5, 4, 2)

FILLS: list[tuple[Any, ...]] = [
    (T.normal_, X),
    (T.normal_, X, 1.0, 2.0),
    (T.uniform_, X),
    (T.uniform_, X, {"from": -1.0, "to": 3.0}),
    (T.exponential_, X),
    (T.exponential_, X, 2.0),
    (T.random_, X.int()),
    (T.random_, X, 7),
    (T.random_, X, 3, 7),
    (T.random_, X.int(), {"from": 3, "to": 7}),
    (T.bernoulli_, X),
    (T.bernoulli_, X, 0.3),
    (T.bernoulli_, X, ODDS),
    (T.log_normal_, X, 0.0, 0.5),
    (T.geometric_, X, 0.4),
]
MADE: list[tuple[Any, ...]] = [
    (torch.rand_like, X),
    (torch.randn_like, X),
    (torch.randint_like, X, 7),
    (torch.randint_like, X, 3, 7),
    (torch.randint_like, X, {"low": 3, "high": 7}),
    (torch.bernoulli, ODDS),
    (torch.bernoulli, X, 0.3),
    (torch.normal, X, 2.0),
    (torch.normal, 1.0, ODDS),
    (torch.normal, X, ODDS),
    (torch.poisson, 9 * ODDS),
    (torch.multinomial, ODDS, 2),
    (torch.multinomial, ODDS, 3, True),
]
MASKED: list[tuple[Any, ...]] = [
    (F.dropout, X),
    (F.dropout, X, 0.3),
    (torch.feature_dropout, IMAGE, 0.3, True),
    (F.alpha_dropout, X, 0.3, True),
    (torch.feature_alpha_dropout, IMAGE, 0.3, True),
    (torch.native_dropout, X, 0.3, True),
    (F.rrelu, X, {"training": True}),
    (F.rrelu, X, 0.2, 0.9, True),
]
EVERY = [*FILLS, *MADE, *MASKED]


def name(row: tuple[Any, ...]) -> str:
    return f"{row[0].__name__} {[v for v in row[1:] if not isinstance(v, T)]}"


def call_of(row: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    words = row[-1] if isinstance(row[-1], dict) else {}
    return row[0], row[1 : -1 if words else None], words


def drawn(
    row: tuple[Any, ...], mesh: tuple[int, ...], layouts: list[list[Placement]]
) -> Simulated | None:
    func, args, words = call_of(row)
    return simulate(func, *args, layouts=layouts, mesh_shape=mesh, **words)


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCollectives, "policy", "invariant")


@pytest.mark.usefixtures("invariant")
@pytest.mark.parametrize("row", EVERY, ids=name)
def test_the_numbers_are_the_same_however_the_result_lies(row: tuple[Any, ...]) -> None:
    tensors = tensors_in(row)
    whole = drawn(row, (1,), [[R]] * len(tensors))
    assert whole is not None
    draw = random.Random(name(row))
    pending = ("sum", "max") if row[0].__name__.endswith("_") else ()
    for mesh in ((2, 2), (4,)) * 2:
        layouts = [random_placements(t.ndim, len(mesh), draw, pending) for t in tensors]
        got = drawn(row, mesh, layouts)
        for mine, one in zip(got.full, whole.full, strict=True) if got else ():
            torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", ["invariant", "fast"])
@pytest.mark.parametrize("row", EVERY, ids=name)
def test_they_are_distributed_as_torchs(
    row: tuple[Any, ...], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedCollectives, "policy", policy)
    many = replace_tensors(row, lambda t: t.repeat(100, *[1] * (t.ndim - 1)))
    got = drawn(many, (2,), [[S0]] * len(tensors_in(row)))
    func, args, words = call_of(many)
    torch.manual_seed(0)
    want = tensors_in([func(*replace_tensors(args, torch.clone), **words)])
    assert got is not None
    for mine, plain in zip(got.full, want, strict=True):
        a, b = mine.double(), plain.double()
        assert mine.dtype == plain.dtype
        assert abs(a.mean() - b.mean()) < 0.1 * b.std() and 0.9 < a.std() / b.std() < 1.1
        if a.unique().numel() < 10:
            assert a.unique().tolist() == pytest.approx(b.unique().tolist())


@pytest.mark.parametrize("row", EVERY, ids=name)
def test_fast_shards_differ_and_replicas_do_not(
    row: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedCollectives, "policy", "fast")
    alike = replace_tensors(row, lambda t: t[:1].expand(4, *t.shape[1:]).contiguous())
    got = drawn(alike, (2, 2), [[S0, R]] * len(tensors_in(row)))  # replicas are compared
    assert got is not None
    upper, lower = (got.values[c, 0][0] for c in (0, 1))
    whole = row[0] in (T.log_normal_, T.geometric_) or row[0] is torch.native_dropout
    assert whole or not torch.equal(upper, lower)


def test_placements() -> None:
    x, odds = (Arg((5, 6), [S0, p], torch.float64) for p in (S1, R))
    for func in (torch.rand_like, torch.bernoulli, torch.poisson):
        assert ops.infer(func, x, mesh_shape=(2, 2)).outputs == ((S0, S1),)
    assert ops.infer(torch.normal, x, odds, mesh_shape=(2, 2)).outputs == ((S0, S1),)
    assert ops.infer(torch.multinomial, x, 2, mesh_shape=(2, 2)).outputs == ((S0, R),)
    sums = Arg((5, 6), [Partial(), S0])
    assert ops.infer(F.dropout, sums, 0.3, mesh_shape=(2, 2)).outputs == ((Partial(), S0),)
    assert ops.infer(F.alpha_dropout, sums, 0.3, True, mesh_shape=(2, 2)).outputs == ((R, S0),)


# Without chance -----------------------------------------------------------------------------------


ONE, TINY = (X > 0.3).double(), 1e-12
CERTAIN: list[tuple[Any, ...]] = [
    (torch.bernoulli, ONE), (T.bernoulli_, X, ONE), (torch.normal, X, torch.zeros_like(X)),
    (torch.normal, X, 0.0), (torch.poisson, 0 * ONE), (F.dropout, X, TINY),
    (torch.dropout, X, TINY, True), (torch.feature_dropout, IMAGE, TINY, True),
    (torch.native_dropout, X, TINY, True), (F.rrelu, X, 0.25, 0.25, True),
    (torch.multinomial, torch.eye(5, 6), 1), (torch.multinomial, torch.eye(5, 6), 3, True),
    (T.random_, X, 3, 4), (torch.randint_like, X, 3, 4),
]  # fmt: skip


@pytest.mark.parametrize("policy", ["invariant", "fast"])
@pytest.mark.parametrize("row", CERTAIN, ids=name)
def test_both_ways_to_draw_agree_where_nothing_is_left_to_chance(
    row: tuple[Any, ...], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedCollectives, "policy", policy)
    func, args, words = call_of(row)
    for mesh in ((2, 2), (4,)):
        assert check_rule(func, *args, mesh_shape=mesh, tries=8, partial=(), **words)


@pytest.mark.parametrize("policy", ["invariant", "fast"])
@pytest.mark.parametrize("way", ["auto", "gather", "heads", "ring"])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_attention_that_drops_nothing(
    heads: int, way: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedCollectives, "policy", policy)
    attention = F.scaled_dot_product_attention
    q, k, v = (randn(2, heads, n, 4, seed=i) for i, n in enumerate((7, 7, 7)))
    mask = randn(7, 7, seed=9) > -0.5
    mask[2] = False  # query 2 sees no key
    R4, S2 = [R], [Shard(2)]
    with dt.attention.policy(way):
        for mesh in ((2,), (4,)):
            for layouts in ([S2, R4, R4], [S2, S2, S2], [R4, S2, S2], [[Shard(1)]] * 3):
                for words in ({"is_causal": True}, {}, {"attn_mask": mask}):
                    here = [*layouts, R4] if "attn_mask" in words else layouts
                    if way == "heads" and heads % mesh[0] and layouts[1] == S2:
                        continue  # refused
                    check_rule(
                        attention, q, k, v, dropout_p=TINY, layouts=here, mesh_shape=mesh,
                        frozen=[3], **words,
                    )  # fmt: skip


def test_a_mask_with_is_causal_is_refused_on_every_rank() -> None:
    rows, mask = Arg((2, 3, 7, 4), [Shard(2)]), Arg((7, 7), [Shard(0)], torch.bool)
    with pytest.raises(RuntimeError, match="attn_mask should not be set"):
        ops.infer(
            F.scaled_dot_product_attention, rows, rows, rows, mask, 0.0, True, mesh_shape=(2,)
        )


@pytest.mark.parametrize("p", [1.5, -0.1, float("nan")])
def test_a_probability_out_of_range_is_refused(p: float) -> None:
    odds = ODDS.clone()
    odds[4, 1] = p
    for row in ((torch.bernoulli, odds), (T.bernoulli_, X, odds)):
        with pytest.raises(RuntimeError, match="p_in >= 0"):
            drawn(row, (2,), [[S1]] * (len(row) - 1))
    for row in ((torch.bernoulli, X, p), (T.bernoulli_, X, p)):
        with pytest.raises((RuntimeError, ValueError), match="1"):
            drawn(row, (2,), [[S1]])
