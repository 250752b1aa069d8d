"""Under autocast the dtype of a result is torch's on every rank, also of a piece of one row or none
(3 over 4 ranks): what ranks send each other has one dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import randint, randn
from tests.support.pool import on_ranks
from tests.support.simulate import check_rule


def f32(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float32) / 2


def bf16(*shape: int) -> torch.Tensor:
    return f32(*shape).bfloat16()


IMAGE, CUBE, ROWS, POSITIVE = f32(3, 3, 5), f32(3, 2, 5, 5, 3), f32(5, 3), f32(5, 3).sigmoid()
INDEX = torch.tensor([2, 0])
Q, KV = f32(3, 4, 5, 4), f32(3, 2, 6, 4)
GROUPED = {"enable_gqa": True}

LOWER: list[Any] = [
    (F.conv1d, f32(3, 2, 9), f32(3, 2, 3), f32(3)), (F.conv2d, f32(3, 3, 5, 5), f32(3, 3, 3, 3)),
    (F.conv1d, f32(3, 6, 7), f32(6, 2, 3), None, 1, 0, 1, 3), (F.conv3d, CUBE, f32(3, 2, 3, 3, 3)),
    (F.conv_transpose1d, IMAGE, f32(3, 3, 3), f32(3)),
    (F.conv_transpose2d, f32(2, 3, 3, 3), f32(3, 2, 3, 3)),
    (F.conv_transpose3d, CUBE, f32(2, 3, 3, 3, 3)),
    (F.scaled_dot_product_attention, Q, Q, Q),
    (F.scaled_dot_product_attention, Q, Q, Q, None, 0.0, True),
    (F.scaled_dot_product_attention, Q, KV, KV, f32(5, 6), GROUPED),
    (F.linear, IMAGE, f32(3, 5), f32(3)), (torch.matmul, IMAGE, f32(5, 3)),
    (torch.mm, ROWS, f32(3, 5)), (torch.bmm, IMAGE, f32(3, 5, 3)), (torch.mv, ROWS, f32(3)),
    (torch.addmm, ROWS, f32(5, 2), f32(2, 3)), (torch.baddbmm, IMAGE, IMAGE, f32(3, 5, 5)),
    (torch.addbmm, f32(3, 3), IMAGE, f32(3, 5, 3)), (torch.linalg.vecdot, ROWS, ROWS),
    (torch.linalg.multi_dot, [ROWS, f32(3, 5), f32(5, 2)]), (torch.tensordot, IMAGE, f32(3, 5, 2)),
    (torch.inner, IMAGE, f32(3, 5)), (torch.dot, f32(5), f32(5)),
    (torch.einsum, "ab,bc->ac", ROWS, f32(3, 5)), (torch.einsum, "ab,ab->", ROWS, ROWS),
    (torch.einsum, "ab,ab,bc->ac", ROWS, ROWS, f32(3, 2)), (torch.einsum, "ab->b", ROWS),
    (torch.einsum, "abc,cd,b->ad", IMAGE, f32(5, 2), f32(3)),
    (torch.einsum, "abc,abd->cd", IMAGE, f32(3, 3, 2)),
    (F.bilinear, ROWS, f32(5, 2), f32(3, 3, 2), f32(3)), (torch.kron, ROWS, f32(2, 2)),
]  # fmt: skip
SINGLE: list[Any] = [
    (torch.prod, bf16(5, 3), 0), (torch.cdist, f32(5, 3), f32(3, 3)),
    (F.mse_loss, bf16(5, 3), bf16(5, 3)), (F.l1_loss, bf16(5, 3), ROWS),
    (F.smooth_l1_loss, bf16(5, 3), ROWS), (F.huber_loss, ROWS, ROWS * 2),
    (F.cross_entropy, bf16(5, 3), randint(0, 3, (5,))),
    (F.nll_loss, ROWS, randint(0, 3, (5,))),
    (F.binary_cross_entropy, POSITIVE, POSITIVE),
    (F.binary_cross_entropy_with_logits, bf16(5, 3), POSITIVE),
    (F.cosine_embedding_loss, bf16(5, 3), ROWS, f32(5).sign()),
    (F.margin_ranking_loss, bf16(5), f32(5), f32(5).sign()),
    (F.multi_margin_loss, ROWS, randint(0, 3, (5,))), (F.poisson_nll_loss, bf16(5, 3), POSITIVE),
    (F.avg_pool3d, CUBE, 2),
    (torch.quantile, f32(5, 3), 0.3, 0), (torch.linalg.inv, f32(3, 3, 3) + torch.eye(3)),
    (torch.linalg.svdvals, IMAGE), (torch.fft.rfft, IMAGE), (torch.cumsum, bf16(5, 3), 0),
    (F.layer_norm, bf16(5, 3), (3,), f32(3), f32(3)), (F.group_norm, f32(3, 4, 5), 2),
    (F.batch_norm, IMAGE, None, None, f32(3), f32(3), True), (F.instance_norm, IMAGE),
    (torch.softmax, bf16(5, 3), 1), (torch.norm, bf16(5, 3)), (torch.var, bf16(5, 3), 0),
    (F.embedding, randint(0, 5, (3, 2)), ROWS), (F.avg_pool2d, f32(3, 3, 4, 4), 2),
    (F.interpolate, f32(3, 3, 4, 4), (6, 6)), (torch.polar, POSITIVE, ROWS),
]  # fmt: skip
PROMOTED: list[Any] = [
    (torch.cat, [bf16(5, 3), ROWS]), (torch.stack, [bf16(5, 3), ROWS], 1),
    (torch.index_copy, ROWS, 0, INDEX, f32(2, 3)), (torch.addcmul, ROWS, bf16(5, 3), ROWS),
    (torch.addcdiv, bf16(5, 3), ROWS, POSITIVE + 1), (torch.atan2, ROWS, bf16(5, 3)),
]  # fmt: skip


@pytest.mark.parametrize("calls", [LOWER, SINGLE, PROMOTED], ids=["lower", "single", "promoted"])
def test_pieces_have_the_dtype_of_the_whole(calls: list[Any]) -> None:
    wrong = []
    for func, *args in calls:
        words = args.pop() if isinstance(args[-1], dict) else {}
        try:
            with torch.autocast("cpu", torch.bfloat16):
                check_rule(
                    func, *args, mesh_shape=(4,), partial=(), tries=3, rtol=0.1, atol=0.1, **words
                )
        except AssertionError as error:
            wrong.append(f"{func.__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@on_ranks(4)
def test_ragged_batches_train_as_in_one_process() -> None:
    """Batches of 1 to 3 over dp 2, three channels and heads over tp 2: some ranks have nothing."""
    mesh = dt.init_mesh((2, 2), ("dp", "tp"))
    R, S0 = Replicate(), Shard(0)
    for batch in (1, 2, 3):
        full = [f32(batch, 1, 9), f32(1, 1, 3), f32(3, 7), f32(5, 3)]

        def loss(x: Any, kernel: Any, up: Any, down: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = F.conv1d(x, kernel)  # [batch, 1, 7]
                y = torch.einsum("bcl,ol->bco", y, up).unflatten(-1, (3, 1))
                y = F.scaled_dot_product_attention(y, y, y).flatten(2)
                return F.mse_loss(F.linear(y, down), x[..., :5])

        plain = [t.clone().requires_grad_() for t in full]
        expected = loss(*plain)
        expected.backward()
        layouts = [(S0, R), (R, S0), (R, S0), (R, Shard(1))]
        mine = [
            dt.shard_tensor(t, mesh, p).requires_grad_() for t, p in zip(full, layouts, strict=True)
        ]
        got = loss(*mine)
        got.backward()
        assert got.dtype == expected.dtype
        grads = [t.grad.full_tensor() for t in mine]
        torch.testing.assert_close(got.full_tensor(), expected, rtol=0.05, atol=0.05)
        for a, b in zip(grads, plain, strict=True):
            torch.testing.assert_close(a, b.grad, rtol=0.1, atol=0.05)
