"""Rows dealt out for causal attention: what keeps them, what exchanges them, and the moves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from disttensor.attention import Balanced
from disttensor.core.layout import balanced_ranges, chunk
from tests.support.oracle import check_op, grid, line, place, randn
from tests.support.pool import fake_world, on_ranks
from tests.support.stages import Stages, check_stages, stage_meshes

B0, B1, R, S0, S1 = Balanced(0), Balanced(1), Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize(("size", "n"), [(8, 2), (9, 2), (5, 4), (3, 4), (0, 2), (1, 3), (5000, 6)])
def test_each_row_has_one_place_and_pieces_are_as_large_as_of_shard(size: int, n: int) -> None:
    pieces = [balanced_ranges(size, i, n) for i in range(n)]
    rows = [row for piece in pieces for r in piece for row in range(*r)]
    assert sorted(rows) == list(range(size))
    assert [sum(b - a for a, b in p) for p in pieces] == [chunk(size, n, i)[1] for i in range(n)]
    assert all(early[1] <= late[0] for early, late in pieces)


@on_ranks(4)
def test_moves_to_every_placement_and_back():
    full = randn(5, 7)
    kinds = [R, S0, S1, Partial(), B0, B1]
    pairs = [*itertools.product(kinds, kinds)]
    for before, after in itertools.product(pairs, pairs):
        if B0 in (*before, *after) or B1 in (*before, *after):
            x = place(full, grid(), [*before])
            torch.testing.assert_close(dt.reshard(x, grid(), [*after]).full_tensor(), full)


@on_ranks(2)
def test_what_moves_send():
    x = place(randn(8, 6), line(), [B0])
    for target, kind in ((R, "all_gather"), (S0, "all_to_all"), (S1, "all_to_all")):
        with dt.debugging.record_comms() as log:
            dt.reshard(x, line(), [target])
        assert log.counts() == {kind: 1}
    with dt.debugging.record_comms() as log:
        assert dt.reshard(place(randn(8, 6), line(), [R]), line(), [B0]).placements == (B0,)
        assert torch.equal(dt.reshard(x, line(), [Partial()]).full_tensor(), x.full_tensor())
    assert log.counts() == {"all_gather": 1, "all_reduce": 1}  # of full_tensor()
    with dt.debugging.record_comms() as log:
        dt.reshard(place(randn(8, 6), line(), [Partial()]), line(), [B0])
    assert log.counts() == {"reduce_scatter": 1}


KEPT: dict[str, tuple[Any, list[Any], list[Any]]] = {  # function, layouts, results
    "pointwise": (torch.add, [B0, S0], [B0]),
    "broadcast": (lambda x, y: x * y[0], [B1, R], [B1]),
    "rows of another": (torch.mul, [R, B0], [B0]),
    "matmul": (lambda x, y: x @ y.t(), [B0, R], [B0]),
    "transpose": (lambda x, y: x.t(), [B0, R], [B1]),
    "view": (lambda x, y: x.view(5, 2, 3), [B0, R], [B0]),
    "reduced": (lambda x, y: x.sum(0), [B0, R], [Partial()]),
    "mean": (lambda x, y: x.mean(1), [B0, R], [B0]),
    "softmax": (lambda x, y: x.softmax(-1), [B0, R], [B0]),
    "norm": (lambda x, y: F.layer_norm(x, (6,), y[0]), [B0, R], [B0]),
    "linear": (lambda x, y: F.linear(x, y), [B0, R], [B0]),
    "index": (lambda x, y: x[:, 1:4], [B0, R], [B0]),
    "unsqueeze": (lambda x, y: x.unsqueeze(0) + y, [B0, B0], [B1]),
    "joined": (lambda x, y: torch.cat([x, y], 1), [B0, B0], [B0]),
    "mask": (lambda x, y: torch.where(x > 0, x, y), [B0, S0], [B0]),
}
CONTIGUOUS = {
    "merged": (lambda x, y: x.view(30), [B0, R], None),
    "a slice of rows": (lambda x, y: x[1:], [B0, R], None),
    "cumsum": (lambda x, y: x.cumsum(0), [B0, R], None),
    "rows joined": (lambda x, y: torch.cat([x, y]), [B0, B0], None),
    "rows in pairs": (lambda x, y: x.repeat_interleave(2, 0), [B0, R], None),
    "sorted": (lambda x, y: x.sort(0)[0], [B0, R], None),
    "triangle": (lambda x, y: x.tril(), [B0, R], None),
    "convolution": (lambda x, y: F.conv1d(x, y[:, :, None][:5, :5]), [B1, R], None),
    "flip": (lambda x, y: x.flip(0), [B0, R], None),
    "written": (lambda x, y: y.clone().copy_(x), [B0, S0], [S0]),
}


@on_ranks(2)
def test_rows_that_stay_and_rows_that_are_exchanged():
    for name, (func, layouts, outputs) in {**KEPT, **CONTIGUOUS}.items():
        try:
            check_op(
                func, randn(5, 6, seed=1), randn(5, 6, seed=2), layouts=[[p] for p in layouts],
                outputs=None if outputs is None else [outputs],
            )  # fmt: skip
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    sent = []
    for func, layouts, _ in KEPT.values():
        x, y = (place(randn(5, 6), line(), [p]) for p in layouts)
        if layouts[1] != S0:
            with dt.debugging.record_comms() as log:
                func(x, y)
            sent += log.records
    assert not sent


@on_ranks(2)
def test_writing():
    full, more = randn(5, 6, seed=1), randn(5, 6, seed=2)
    for target, other in ((B0, S0), (S0, B0), (B0, B1), (B0, R)):
        x, y = place(full, line(), [target]), place(more, line(), [other])
        x.add_(y)
        x[:, 0] = 1
        want = full + more
        want[:, 0] = 1
        assert x.placements == (target,)
        torch.testing.assert_close(x.full_tensor(), want)


@on_ranks(2)
def test_dropout_of_rows_by_position_has_the_bits_of_one_process():
    full = randn(6, 4)
    with dt.random.rng("invariant"):
        results = []
        for placement in (R, B0):
            dt.manual_seed(5)
            results.append(F.dropout(place(full, line(), [placement]), 0.5).full_tensor())
    assert torch.equal(*results)
    kept = results[0] != 0
    assert 0 < kept.sum() < kept.numel() and torch.equal(results[0], 2 * full * kept)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = torch.nn.Embedding(11, 8), torch.nn.Embedding(16, 8)
        self.norm, self.qkv = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, **mask: Any) -> torch.Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=not mask, **mask)
        logits = self.head(x + y.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.transpose(1, 2), labels)


def trained(on: dt.ProcessMesh | None, size: int, way: str, masked: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Block().double()
    ids = torch.randint(11, (2, size), generator=torch.Generator().manual_seed(1))
    batch, mask = [ids, ids.roll(-1, 1)], {}
    if masked:
        mask = {"attn_mask": torch.ones(size, size, dtype=torch.bool).tril().triu(-2)}
    if on is not None:
        model = dt.shard_module(model, on)
        batch = [dt.shard_tensor(t, on, [B1]) for t in batch]
    with dt.attention.policy(way), dt.debugging.record_comms() as log:
        loss = model(*batch, **mask)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], log


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("way", ["auto", "ring", "gather", "heads"])
@on_ranks(2)
def test_a_model_on_rows_dealt_out_is_one_process(way: str, masked: bool) -> None:
    for size in (8, 7, 3):
        want, _ = trained(None, size, way, masked)
        got, log = trained(line(), size, way, masked)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-9, atol=1e-9)
        if way in ("auto", "ring"):  # one hop of the ring, and the loss
            assert log.counts().get("all_to_all", 0) <= 1, str(log)


@on_ranks(4)
def test_ranks_outside_the_mesh_know_how_the_result_lies():
    def program(on: Stages) -> Any:
        q = on.leaf(randn(2, 2, 5, 3), 0)
        if on.meshes is not None:
            q = dt.reshard(q, on.meshes[0], [Balanced(2)])
        with dt.attention.policy("ring"):
            out = F.scaled_dot_product_attention(q * 2, q, q, is_causal=True)
        if on.meshes is not None:
            assert out.placements == (Balanced(2),)
        return on.to(out, 1).square().sum()

    check_stages(program, stage_meshes())


def test_a_rank_has_an_early_and_a_late_piece() -> None:
    with fake_world(4, rank=1):
        mesh = dt.init_mesh((4,), ("cp",))
        x = dt.shard_tensor(torch.arange(16), mesh, [B0])
        assert x.to_local().tolist() == [2, 3, 12, 13]
        assert repr(x.spec) == "i64[16@cp] {cp: Balanced(0)}"
