"""Attention whose sequence is split: the ways of attention.policy, exact in value and gradient;
what they send and keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.core.layout import balanced_ranges
from disttensor.torch_private import fake_mode
from ops.nn import ring_attention
from ops.nn.attention_policy import KEPT, Sizes, choose
from ops.nn.ring_schedule import Ring
from tests.support.oracle import check_op, fallbacks, grid, line, place, randn
from tests.support.pool import on_ranks
from tests.support.simulate import check_rule
from tests.support.stages import Stages, check_stages, stage_meshes

S1, S2, R = Shard(1), Shard(2), Replicate()
WAYS = ("gather", "ring", "heads")
attention = F.scaled_dot_product_attention


def qkv(
    queries: int = 6, keys: int = 6, heads: int = 4, shared: int = 4, width: int = 3
) -> list[torch.Tensor]:
    sizes = (heads, queries, 3), (shared, keys, 3), (shared, keys, width)
    return [randn(2, *size, seed=i) for i, size in enumerate(sizes)]


CAUSAL, GROUPED = {"is_causal": True}, {"enable_gqa": True}
PADDING = torch.ones(2, 1, 1, 7, dtype=torch.bool)
PADDING[0, ..., 5:] = PADDING[1, ..., :1] = False
NOTHING = torch.ones(5, 7, dtype=torch.bool)
NOTHING[2] = NOTHING[:, 4] = False  # query 2 sees no key
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 0])  # of three documents, one after the other
DOCUMENT = (POSITIONS == 0).cumsum(0)
DOCUMENTS = (DOCUMENT.unsqueeze(-1) == DOCUMENT).tril()
DISTANCE = torch.arange(9).unsqueeze(-1) - torch.arange(9)
WINDOW = (DISTANCE >= 0) & (DISTANCE < 3)
ADDED = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~WINDOW, -math.inf)
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "even": (qkv(8, 8), {}),
    "uneven": (qkv(5, 7, width=2), {"scale": 0.3}),
    "causal": (qkv(8, 8), CAUSAL),
    "causal, uneven": (qkv(9, 9), CAUSAL),
    "causal, fewer keys": (qkv(7, 3), CAUSAL),
    "causal, few": (qkv(3, 3), CAUSAL),
    "grouped": (qkv(5, 7, shared=2), GROUPED),
    "grouped, causal": (qkv(9, 9, shared=1), GROUPED | CAUSAL),
    "key padding": ([*qkv(5, 7), PADDING], {}),
    "mask": ([*qkv(5, 7), NOTHING], {}),
    "documents": ([*qkv(9, 9), DOCUMENTS], {}),
    "sliding window, grouped": ([*qkv(9, 9, shared=2), WINDOW], GROUPED),
    "sliding window, added": ([*qkv(9, 9), ADDED], {}),
    "bias": ([*qkv(5, 7), randn(4, 5, 7, seed=5)], {}),
    "bias of keys, grouped": ([*qkv(5, 7, shared=2, width=2), randn(1, 7, seed=5)], GROUPED),
    "three dims": ([t[0] for t in qkv()], CAUSAL),
    "five dims": ([t.unflatten(0, (2, 1)) for t in qkv(5, 5)] + [randn(2, 1, 1, 5, 5)], {}),
}  # fmt: skip


def split(tensors: Any, axes: int, seq: int | None = None) -> list[list[Any]]:
    """q, k and v split along the sequence by all axes, or by that one."""
    places = [[Shard(t.ndim - 2) if seq in (None, a) else R for a in range(axes)] for t in tensors]
    return places[:3] + [[R] * axes] * (len(places) - 3)


@pytest.mark.parametrize("way", [*WAYS, "auto"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, way: str) -> None:
    args, words = CASES[case]
    fake_mode()  # imports torch's compiler, for which ranks would wait
    with dt.attention.policy(way):
        for mesh in ((2,), (3,), (4,)) if way != "auto" else ((2, 2),):
            layouts = split(args, len(mesh))
            assert check_rule(attention, *args, layouts=layouts, mesh_shape=mesh, **words)


@pytest.mark.feature("Long context")
@on_ranks(2)
def test_on_ranks():
    for way in WAYS:
        for case in ("causal, uneven", "grouped", "bias"):
            args, words = CASES[case]
            with dt.attention.policy(way):
                places = split(args, 1)
                check_op(attention, *args, layouts=places, outputs=[places[0]], **words)


@on_ranks(4, timeout=120)
def test_on_a_mesh_that_splits_heads_too_and_on_a_line():
    for way in WAYS:
        with dt.attention.policy(way):
            args, words = CASES["grouped, causal"]
            check_op(attention, *args, layouts=split(args, 1), mesh=line(), **words)
            args, words = CASES["key padding"]
            layouts = [[S2, S1], [S2, S1], [S2, S1], [R, R]]
            check_op(attention, *args, layouts=layouts, mesh=grid(), **words)


@on_ranks(4, timeout=120)
def test_a_rank_whose_batch_is_empty_takes_part():
    """torch's kernel ends the process on a tensor without elements; k and v have no rows to count
    their length by."""
    for case in ("causal", "uneven", "causal, fewer keys"):
        args, words = [t[:1] for t in CASES[case][0]], CASES[case][1]
        for way in WAYS:
            with dt.attention.policy(way):
                check_op(attention, *args, layouts=[[Shard(0), S2]] * 3, mesh=grid(), **words)


# What is sent, and kept --------------------------------------------------------------------------


@on_ranks(4)
def test_bytes_are_those_of_the_plan():
    q, k, v = (place(t, line(), [S2]).requires_grad_() for t in qkv(16, 16))
    for way in WAYS:
        sizes = Sizes(*(t.spec.nbytes for t in (q, k, v, q)), n=4, causal=False)
        with dt.attention.policy(way), dt.debugging.record_comms() as log:
            out = attention(q * 1, k * 1, v * 1)
            sent = log.total_bytes
            out.backward(torch.ones_like(out))
            said = dt.debugging.explain(attention, q, k, v)
        assert sent == said.bytes == sizes.forward(way)
        assert log.total_bytes == sizes.sent(way), (way, str(log))


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made inside."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.most = max(self.most, t.untyped_storage().nbytes() // t.itemsize)
        return out


@on_ranks(4)
def test_ring_holds_pieces_only():
    full = [randn(1, 1, 256, 8, seed=i) for i in range(3)]
    piece = full[0].numel() // 4
    for words in ({}, CAUSAL):
        q, k, v = (place(t, line(), [S2]).requires_grad_() for t in full)
        held = {}
        with dt.attention.policy("ring"):
            pack = lambda t: held.setdefault(t.data_ptr(), t) is None or t  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Largest() as forward:
                out = attention(q, k, v, **words)
            with Largest() as backward:
                out.sum().backward()
        saved = sum(t.numel() for t in held.values())
        assert saved <= 4 * piece + piece // 8 + 64  # q, k, v, the result, and log-sum-exp
        # k and v in one buffer; to deal causal rows out, q too
        assert max(forward.most, backward.most) <= (3 if words else 2) * piece
    with dt.attention.policy("gather"), Largest() as forward:
        attention(q, k, v)
    assert forward.most == 4 * piece  # it can be told


def work(ring: Ring, member: int) -> int:
    """The scores that a member computes."""
    total = 0
    for block in range(ring.size):
        for pair in ring.pairs(member, block):
            n = (pair.row[1] - pair.row[0]) * (pair.key[1] - pair.key[0])
            total += n if pair.seen == "all" else n // 2
    return total


@pytest.mark.parametrize(("size", "n"), [(4096, 2), (4096, 4), (32768, 8), (5000, 6)])
def test_causal_work_is_even(size: int, n: int) -> None:
    rows = tuple(balanced_ranges(size, i, n) for i in range(n))
    assert sorted(r for row in rows for r in row)[-1][1] == size
    each = [work(Ring(i, rows, rows, True, lambda *_: None), i) for i in range(n)]
    assert max(each) <= 1.05 * sum(each) / n
    step = -(-size // n)
    plain = tuple(((i * step, min(size, (i + 1) * step)),) for i in range(n))
    each = [work(Ring(i, plain, plain, True, lambda *_: None), i) for i in range(n)]
    assert max(each) > 1.4 * sum(each) / n


def test_a_rank_computes_with_a_block_in_one_call() -> None:
    rows = tuple(balanced_ranges(16, i, 4) for i in range(4))
    for i in range(4):
        ring = Ring(i, rows, rows, True, lambda *_: None)
        for j in range(4):
            (one,) = ring.joined(j)
            apart = list(ring.pairs(i, j))
            assert len(apart) == (3 if i == j else 2)
            area = (one.rows.stop - one.rows.start) * (one.keys.stop - one.keys.start)
            assert area == (16 if i == j else sum(4 for _ in apart))
            assert one.seen == ("diagonal" if i == j else "all")


def test_a_block_goes_as_far_as_somebody_needs_it() -> None:
    pieces = ((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)  # 5 over 4

    def reach(causal: bool) -> tuple[int, ...]:
        return Ring(0, pieces, pieces, causal, lambda *_: None).reach

    assert reach(causal=True) == (2, 1, 0, 0)
    assert reach(causal=False) == (2, 3, 3, 0)


@pytest.mark.parametrize("mask", ["documents", "window", "padding"])
def test_a_ring_computes_what_a_mask_shows(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def noted(name: str) -> Any:
        original = getattr(ring_attention, name)

        def run(*args: Any) -> Any:
            at = 1 if name == "attend_backward" else 0
            computed.append((name, args[at].shape[-2] * args[at + 1].shape[-2]))
            return original(*args)

        return run

    for name in ("attend", "attend_backward"):
        monkeypatch.setattr(ring_attention, name, noted(name))
    shown = {"documents": DOCUMENTS, "window": WINDOW, "padding": torch.arange(9) < 4}[mask]
    tensors = qkv(9, 9)
    with dt.attention.policy("ring"):
        assert check_rule(
            attention, *tensors, shown.expand(1, 9) if mask == "padding" else shown,
            layouts=split([*tensors, shown], 1), mesh_shape=(3,),
        )  # fmt: skip
    for name in ("attend", "attend_backward"):
        areas = [area for called, area in computed if called == name]
        assert sum(areas) == {"documents": 33, "window": 35, "padding": 36}[mask], areas


# The policy ---------------------------------------------------------------------------------------

KINDS = {"gather": {"all_gather"}, "heads": {"all_to_all"}, "ring": {"all_to_all"}}


@on_ranks(2)
def test_a_warm_call_under_another_policy_is_another_call():
    q, k, v = (place(t, line(), [S2]) for t in qkv(5, 7))
    counts = []
    for way in (*WAYS, *WAYS):
        with dt.attention.policy(way), dt.debugging.record_comms() as log:
            attention(q, k, v)
        assert set(log.counts()) == KINDS[way]
        counts.append(log.counts())
    assert counts[:3] == counts[3:] and counts[1] != counts[2]


@on_ranks(2)
def test_a_checkpointed_region_is_computed_again_under_its_policy():
    def region(q, k, v):
        y = attention(q.sin(), k, v, None, 0.25, is_causal=True)
        return y * attention(q, k, v)

    def grads(way, around, placement):
        leaves = [place(t, line(), [placement]).requires_grad_() for t in qkv(5, 5)]
        dt.manual_seed(3)  # dropout by position: the bits of one process
        with dt.random.rng("invariant"), dt.attention.policy(way):
            y = around(region, *leaves)
        with dt.debugging.record_comms() as log:
            y.square().sum().backward()
        return [t.grad.full_tensor() for t in leaves], log.counts()

    for way in WAYS:
        got, counts = grads(way, lambda f, *x: checkpoint(f, *x, use_reentrant=False), S2)
        plain, fewer = grads(way, lambda f, *x: f(*x), S2)
        want, _ = grads(way, lambda f, *x: f(*x), R)
        assert set(counts) == KINDS[way] | set(fewer) and sum(counts.values()) > sum(fewer.values())
        for a, b, c in zip(got, plain, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_autocast_casts_as_in_one_process():
    full = [t.float() for t in qkv(9, 9)]
    for words in ({}, CAUSAL):
        plain = [t.clone().requires_grad_() for t in full]
        with torch.autocast("cpu", torch.bfloat16):
            want = attention(*plain, **words)
        want.float().square().sum().backward()
        for way in WAYS:
            mine = [place(t, line(), [S2]).requires_grad_() for t in full]
            with dt.attention.policy(way), torch.autocast("cpu", torch.bfloat16):
                got = attention(*mine, **words)
            got.float().square().sum().backward()
            assert got.dtype == want.dtype == torch.bfloat16
            grads = [t.grad.full_tensor() for t in mine]
            torch.testing.assert_close(got.full_tensor(), want, rtol=2e-2, atol=2e-2)
            for a, b in zip(grads, plain, strict=True):
                torch.testing.assert_close(a, b.grad, rtol=5e-2, atol=5e-2)


@on_ranks(4)
def test_ranks_outside_the_mesh_know_how_the_result_lies():
    meshes = stage_meshes()
    for way in WAYS:

        def program(on: Stages) -> Any:
            leaves = [on.leaf(t, 0) for t in qkv(5, 5, shared=2)]
            if on.meshes is not None:
                leaves = [dt.reshard(t, on.meshes[0], [S2]) for t in leaves]
            out = attention(*leaves, is_causal=True, enable_gqa=True)
            if on.meshes is not None:
                assert out.placements == (S2,)
            return on.to(out * 2, 1).square().sum()

        with dt.attention.policy(way):
            check_stages(program, meshes)


def test_auto_takes_the_fewest_bytes_that_fit() -> None:
    small = Sizes(*[1000.0] * 4, n=4, causal=False)
    assert choose(small, ("gather", "ring", "heads")).way == "heads"
    assert choose(small, ("gather", "ring")).way == "gather"
    large = Sizes(*[float(KEPT)] * 4, n=4, causal=False)
    assert choose(large, ("gather", "ring")).way == "ring"
    assert choose(large, ("gather",)).way == "gather"
    assert choose(small, ("gather", "ring")).why.endswith(
        "gather 3,000 and 2,000; ring 4,500 and 500"
    )


@on_ranks(2)
def test_explain_says_which_way_and_why():
    def said(*tensors: torch.Tensor, **words: Any) -> str:
        return str(
            dt.debugging.explain(attention, *(place(t, line(), [S2]) for t in tensors), **words)
        )

    text = said(*qkv())
    assert "attention by heads" in text and "heads 2,304 and 1,152" in text
    assert "attention by gather" in said(*qkv(heads=3, shared=3))
    assert "attention by gather" in said(*qkv(heads=3, shared=3), dropout_p=0.1)
    with dt.attention.policy("ring"):
        assert "attention by ring" in said(*qkv()) and "as attention.policy says" in said(*qkv())


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="policies are 'auto', 'gather', 'ring' and 'heads'"):
        dt.attention.policy("rings")


@on_ranks(2)
def test_what_cannot_be_done_says_what_to_do():
    q = place(randn(6, 4), line(), [Shard(0)]).requires_grad_()
    with dt.attention.policy("heads"), pytest.raises(ValueError, match="no dim of heads to split"):
        attention(q, q, q)
    with dt.attention.policy("ring"):
        out = attention(q, q, q)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    q = place(randn(1, 2, 6, 4), line(), [S2])
    mask = torch.ones(6, 6, dtype=torch.bool)
    with dt.attention.policy("ring"), pytest.raises(RuntimeError, match="is_causal"):
        attention(q, q, q, mask, is_causal=True)


def test_the_weights_of_a_query_that_sees_nothing_are_zero() -> None:
    out = attention(*qkv(5, 7), NOTHING)
    assert not out[:, :, 2].any() and math.isfinite(out.sum().item())


@on_ranks(2)
def test_multihead_attention_of_torch():
    full = randn(2, 7, 8)
    for way in WAYS:
        results = []
        for on in (None, line()):
            torch.manual_seed(0)
            layer = torch.nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
            x = full.clone() if on is None else place(full, on, [S1])
            x.requires_grad_()
            layer = layer if on is None else dt.shard_module(layer, on)
            with dt.attention.policy(way), fallbacks() as fell:
                y, _ = layer(x, x, x, need_weights=False)
            y.square().sum().backward()
            assert not fell
            results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-10)
