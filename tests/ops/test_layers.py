"""Normalizations, attention and convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor.core.layout import box_at
from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, infer
from tests.support.oracle import fallbacks, line, place
from tests.support.pool import on_ranks
from tests.support.simulate import check_rule

S0, S1, S2, R, P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()


def t(*shape: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=seed)


def check(*args: Any, **kwargs: Any) -> None:
    """On 2x2, and on four ranks of which the last has nothing of 5."""
    assert check_rule(*args, **{"atol": 1e-8, **kwargs})
    assert check_rule(*args, mesh_shape=(4,), tries=8, seed=1, **{"atol": 1e-8, **kwargs})


NORMS: list[tuple[Any, ...]] = [
    (F.layer_norm, t(5, 3, 6), (6,)),
    (F.layer_norm, t(5, 3, 6), (6,), t(6), t(6) + 1),
    (F.layer_norm, t(5, 3, 6), (3, 6), t(3, 6)),
    (torch.layer_norm, t(5, 6), (6,), t(6)),
    (F.rms_norm, t(5, 3, 6), (6,), t(6)),
    (F.rms_norm, t(5, 3, 6), (6,)),
    (F.group_norm, t(5, 4, 3), 2, t(4), t(4) + 1),
    (F.group_norm, t(5, 6, 3, 2), 3),
    (F.instance_norm, t(5, 6, 3, 2), None, None, t(6), t(6) + 1),
    (F.instance_norm, t(5, 6, 3), t(6), t(6).exp(), t(6), t(6) + 1, False),
    (F.batch_norm, t(5, 6, 3), t(6), t(6).exp(), t(6), t(6) + 1),
    (F.batch_norm, t(5, 6), t(6), t(6).exp()),
]


@pytest.mark.parametrize("case", NORMS, ids=lambda c: f"{c[0].__name__}{list(c[1].shape)}")
def test_normalizations(case: Any) -> None:
    has_stats = case[0] in (F.batch_norm, F.instance_norm) and case[2] is not None
    check(*case, frozen=(1, 2) if has_stats else ())


@pytest.mark.parametrize("second", [S1, R])
def test_a_rank_with_some_of_the_groups_and_no_row_of_them(second: Any) -> None:
    layouts = [[S0, second], [R, S0], [R, S0]]
    assert check_rule(F.group_norm, t(1, 6, 3), 2, t(6), t(6) + 1, layouts=layouts)
    assert check_rule(F.conv1d, t(1, 6, 3), t(6, 3, 1), t(6), groups=2, layouts=layouts)


@pytest.mark.parametrize("shape", [(5, 6, 3), (5, 6), (5, 6, 2, 3)], ids=str)
def test_batch_norm_in_training_uses_the_whole_batch(shape: Any) -> None:
    check(F.batch_norm, t(*shape), None, None, t(6), t(6) + 1, True)


@on_ranks(2)
def test_gradients_of_a_piece_of_one_image_that_come_transposed():
    full, w, m, v = t(3, 4, 2, 2), t(3, 4, 4), t(4), t(4).exp()
    for norm in (lambda x: F.batch_norm(x, m, v), F.instance_norm):
        leaf = full.clone().requires_grad_()
        y = norm(leaf)
        y.register_hook(lambda g: g.contiguous())  # without it torch is wrong, too
        (y.flatten(2).transpose(1, 2) * w).sum().backward()
        x = place(full, line(), [S0]).requires_grad_()
        (norm(x).flatten(2).transpose(1, 2) * w).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, rtol=1e-9, atol=1e-9)


def check_written(got: Any, stats: Any, mean: torch.Tensor, var: torch.Tensor) -> None:
    """Compares running statistics, placed as ``stats``, with those that torch has written."""
    for i, want in ((1, mean), (2, var)):
        layout = got.decision.input_layouts[i]
        assert layout.placements(2) == tuple(stats)
        for c, given in got.arguments.items():
            piece = box_at(want.shape, layout.dims, (2, 2), c).slices
            torch.testing.assert_close(given[i], want[piece])


@pytest.mark.parametrize("x", [[R, R], [S0, S1], [S1, S0], [S1, S1], [S2, S0], [R, S2]], ids=str)
@pytest.mark.parametrize("stats", [[S0, R], [R, S0], [S0, S0]], ids=str)
@pytest.mark.parametrize("channels", [6, 3])
def test_batch_norm_writes_split_running_statistics_where_they_lie(
    channels: int, stats: Any, x: Any
) -> None:
    full, w, b = t(5, channels, 4), t(channels), t(channels) + 1
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    layouts = [x, stats, stats, [S0, R], [R, R]]
    (got,) = check_rule(
        F.batch_norm, full, mean, var, w, b, True, 0.3, layouts=layouts, atol=1e-8, frozen=(1, 2)
    )
    F.batch_norm(full, mean, var, w, b, True, 0.3)
    check_written(got, stats, mean, var)


@pytest.mark.parametrize("x", [[R, S1], [S0, S1], [S2, R]], ids=str)
@pytest.mark.parametrize("stats", [[S0, R], [R, S0], [R, R]], ids=str)
@pytest.mark.parametrize("channels", [6, 3, 1])
def test_instance_norm_writes_running_statistics_where_they_lie(
    channels: int, stats: Any, x: Any
) -> None:
    full, w = t(5, channels, 4), t(channels)
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    layouts = [x, stats, stats, [S0, R]]
    (got,) = check_rule(
        F.instance_norm, full, mean, var, w, None, True, 0.3,
        layouts=layouts, atol=1e-8, frozen=(1, 2),
    )  # fmt: skip
    F.instance_norm(full, mean, var, w, None, True, 0.3)
    check_written(got, stats, mean, var)


@on_ranks(2)
def test_what_was_made_of_running_statistics_is_stale_after_they_were_written() -> None:
    """Rows are copies in place of a view: a row of two elements is on two ranks."""
    x = place(t(5, 6, 2), line(), [R])
    for norm in (lambda *a: F.batch_norm(*a, training=True), F.instance_norm):
        mean, var = (place(f(6).double(), line(), [S0]) for f in (torch.zeros, torch.ones))
        rows = mean.view(3, 2)
        assert rows.sum() == 0
        norm(x, mean, var)
        with pytest.raises(RuntimeError, match="written to"):
            rows.sum()
        torch.testing.assert_close(mean.full_tensor(), x.full_tensor().mean((0, 2)) / 10)


@on_ranks(2)
def test_so_it_is_after_a_replayed_forward() -> None:
    norm = torch.nn.BatchNorm1d(6).double()
    dt.shard_module(norm, line(), {"running*": [S0]})
    forward, x = dt.replay(norm), place(t(5, 6), line(), [R])
    for _ in range(3):
        rows = norm.running_mean.view(3, 2)
        forward(x)
        with pytest.raises(RuntimeError, match="written to"):
            rows.sum()


@on_ranks(2)
def test_a_split_batch_norm_gathers_nothing() -> None:
    """Parameters in half precision, beside statistics in single: split by channels."""
    mesh = dt.init_mesh((2,), ("tp",))
    torch.manual_seed(0)
    plain, x = torch.nn.BatchNorm2d(3), t(4, 3, 5, 5).float()
    ours = dt.shard_module(torch.nn.BatchNorm2d(3), mesh, {"num*": [R], "*": [S0]})
    for norm in (plain, ours):
        norm.weight.data, norm.bias.data = norm.weight.data.bfloat16(), norm.bias.data.bfloat16()
    given = dt.shard_tensor(x.bfloat16(), mesh, [S1])
    with fallbacks() as fell, dt.debugging.record_comms() as log:
        for _ in range(2):
            got = ours(given)
        ours.eval()
        evaluated = ours(given)
    assert not fell
    assert not log.total_bytes
    plain.weight.data, plain.bias.data = plain.weight.data.float(), plain.bias.data.float()
    for _ in range(2):
        want = plain(x.bfloat16().float())
    torch.testing.assert_close(got.full_tensor().float(), want, rtol=2e-2, atol=2e-2)
    want = plain.eval()(x.bfloat16().float())
    torch.testing.assert_close(evaluated.full_tensor().float(), want, rtol=2e-2, atol=2e-2)
    for name in ("running_mean", "running_var"):
        mine = getattr(ours, name)
        assert mine.placements == (S0,)
        torch.testing.assert_close(mine.full_tensor(), getattr(plain, name), rtol=1e-3, atol=1e-3)


def test_batch_norm_writes_the_same_running_statistics_on_every_rank() -> None:
    x, w, b = t(5, 6, 3), t(6), t(6)
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    placed = [[S0, S2], [R, R], [R, R], [S0, R], [R, R]]
    (got,) = check_rule(
        F.batch_norm, x, mean, var, w, b, True, 0.3, layouts=placed, atol=1e-8, frozen=(1, 2)
    )
    F.batch_norm(x, mean, var, w, b, True, 0.3)
    for _, mine, mine_too, *_ in got.arguments.values():
        torch.testing.assert_close(mine, mean)
        torch.testing.assert_close(mine_too, var)


ATTENTION: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((t(5, 4, 3, 6), t(5, 4, 7, 6), t(5, 4, 7, 2)), {}),
    ((t(5, 4, 3, 6), t(5, 4, 3, 6), t(5, 4, 3, 6)), {"is_causal": True}),
    ((t(5, 3, 6), t(5, 3, 6), t(5, 3, 6)), {"scale": 0.3}),
    ((t(5, 4, 3, 6), t(5, 2, 3, 6), t(5, 2, 3, 6)), {"enable_gqa": True, "is_causal": True}),
    ((t(5, 4, 3, 6), t(5, 4, 7, 6), t(5, 4, 7, 2), t(3, 7) > 0), {}),
    ((t(5, 4, 3, 6), t(5, 4, 7, 6), t(5, 4, 7, 2), t(5, 1, 3, 7)), {}),
    ((t(5, 4, 3, 6), t(5, 2, 7, 6), t(5, 2, 7, 2), t(4, 1, 7)), {"enable_gqa": True}),
]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda c: f"{list(c[0][1].shape)}{c[1]}")
def test_attention(case: Any) -> None:
    check(F.scaled_dot_product_attention, *case[0], **case[1])


@pytest.mark.parametrize(
    ("func", "args", "out"),
    [
        (F.layer_norm, (Arg((4, 3, 6), [S0, S2]), (6,), Arg((6,), [R, R])), (S0, S1)),
        (F.group_norm, (Arg((4, 6, 3), [S0, S1]), 3), (S0, S1)),
        (F.group_norm, (Arg((2, 6, 3), [S0, S1]), 2), (S0, R)),
        (F.group_norm, (Arg((6, 6, 3), [S0, S1]), 2), (S0, S0)),
        (F.scaled_dot_product_attention, (Arg((4, 6, 3, 8), [S0, S1]),) * 3, (S0, S1)),
    ],
)
def test_placements(func: Any, args: Any, out: Any) -> None:
    assert infer(func, *args).outputs == (out,)


def test_query_length_may_be_split_causal_or_not() -> None:
    q, kv = Arg((2, 2, 8, 4), [S2, R]), Arg((2, 2, 8, 4), [R, R])
    assert infer(F.scaled_dot_product_attention, q, kv, kv).outputs == ((S2, R),)
    assert infer(F.scaled_dot_product_attention, q, kv, kv, is_causal=True).outputs == ((S2, R),)


def test_weight_norm_passes_its_dim() -> None:
    for dim in (0, 1, 2):
        g = t(*[5 if d == dim else 1 for d in range(3)])
        check(torch._weight_norm, t(*[5 if d == dim else 3 for d in range(3)]), g, dim)
    v, g = Arg((5, 4), [S0, S1]), Arg((5, 1), [S0, P])
    assert infer(torch._weight_norm, v, g, 0).outputs == ((S0, S0),)
    assert infer(torch._weight_norm, Arg((5, 4), [S0, R]), g, 0).outputs == ((S0, P),)
