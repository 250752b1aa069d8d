"""Matrix products: the contracted dim gives P(sum), all others pass through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, infer
from tests.support.simulate import check_rule

S0, S1, S2, R, P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()


def t(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


CASES: list[tuple[Any, ...]] = [
    (torch.matmul, t(5, 6), t(6, 3)),
    (torch.matmul, t(2, 5, 6), t(6, 3)),
    (torch.matmul, t(5, 6), t(3, 6, 2)),
    (torch.matmul, t(1, 3, 5, 6), t(2, 1, 6, 3)),
    (torch.matmul, t(6), t(6)),
    (torch.matmul, t(6), t(2, 6, 3)),
    (torch.matmul, t(2, 5, 6), t(6)),
    (torch.Tensor.matmul, t(5, 6), t(6, 3)),
    (torch.Tensor.__matmul__, t(5, 6), t(6, 3)),
    (torch.Tensor.__rmatmul__, t(6, 3), t(5, 6)),
    (torch.mm, t(5, 6), t(6, 3)),
    (torch.bmm, t(3, 5, 6), t(3, 6, 2)),
    (torch.mv, t(5, 6), t(6)),
    (torch.dot, t(5), t(5)),
    (torch.vdot, t(5), t(5)),
    (torch.inner, t(5, 6), t(3, 6)),
    (torch.inner, t(5), t(5)),
    (torch.inner, t(), t(5, 3)),
    (torch.outer, t(5), t(3)),
    (torch.ger, t(5), t(3)),
    (torch.linalg.vecdot, t(5, 6), t(5, 6)),
    (torch.addmm, t(3), t(5, 6), t(6, 3)),
    (torch.addmm, t(5, 1), t(5, 6), t(6, 3)),
    (torch.addmm, t(), t(5, 6), t(6, 3)),
    (torch.Tensor.addmm_, t(5, 3), t(5, 6), t(6, 3)),
    (torch.addmv, t(5), t(5, 6), t(6)),
    (torch.addmv, t(1), t(5, 6), t(6)),  # broadcast to the rows, of which the last rank has none
    (torch.addbmm, t(5, 3), t(2, 5, 6), t(2, 6, 3)),
    (torch.baddbmm, t(2, 1, 3), t(2, 5, 6), t(2, 6, 3)),
    (torch.addr, t(5, 3), t(5), t(3)),
    (F.linear, t(2, 5, 6), t(3, 6)),
    (F.linear, t(2, 5, 6), t(3, 6), t(3)),
    (F.linear, t(6), t(3, 6), t(3)),
    (F.bilinear, t(5, 6), t(5, 4), t(3, 6, 4), t(3)),
    (F.bilinear, t(2, 5, 6), t(2, 5, 4), t(3, 6, 4)),
    (torch.tensordot, t(5, 6), t(6, 3), 1),
    (torch.tensordot, t(5, 6, 2), t(2, 3, 5), ([0, 2], [2, 0])),
    (torch.tensordot, t(5, 6), t(4, 3), 0),
]


def name(case: Any) -> str:
    return f"{case[0].__name__}{[tuple(a.shape) for a in case[1:] if isinstance(a, torch.Tensor)]}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_products_match_plain(case: Any) -> None:
    assert check_rule(*case)
    assert check_rule(*case, mesh_shape=(4,), tries=6, partial=("sum", "avg"), seed=1)


EQUATIONS = [
    ("ij,jk->ik", t(5, 6), t(6, 3)),
    ("ij,jk", t(5, 6), t(6, 3)),
    ("kj,ik", t(5, 6), t(3, 5)),
    ("bij,bjk->b", t(2, 5, 6), t(2, 6, 3)),
    ("...ij,...jk->...ik", t(2, 5, 6), t(3, 1, 6, 3)),
    ("b...i,ij->j...b", t(2, 5, 3, 6), t(6, 4)),
    ("...i,...i", t(2, 5), t(5)),
    ("...i,...i->", t(2, 5), t(5)),
    ("ii->i", t(5, 5)),
    ("ii", t(5, 5)),
    ("ij->ji", t(5, 6)),
    ("ij->", t(5, 6)),
    ("i,j,k->kij", t(5), t(3), t(2)),
    ("ab,bc,cd,de->ae", t(5, 2), t(2, 3), t(3, 4), t(4, 5)),
    ("ij,ij->i", t(5, 1), t(5, 6)),
    (" i j , j k -> k i ", t(5, 6), t(6, 3)),
    ("bhqd,bhkd->bhqk", t(2, 3, 5, 4), t(2, 3, 5, 4)),
]


@pytest.mark.parametrize("case", EQUATIONS, ids=lambda c: c[0])
def test_einsum_matches_plain(case: Any) -> None:
    assert check_rule(torch.einsum, *case)


def test_einsum_takes_its_tensors_in_a_list() -> None:
    assert check_rule(torch.einsum, "ij,jk->ik", [t(5, 6), t(6, 3)])


@pytest.mark.parametrize(
    ("func", "args", "out"),
    [
        (torch.mm, (Arg((4, 6), [S0, R]), Arg((6, 3), [R, S1])), (S0, S1)),
        (torch.mm, (Arg((4, 6), [R, S1]), Arg((6, 3), [R, S0])), (R, P)),
        (torch.mm, (Arg((4, 6), [P, R]), Arg((6, 3), [R, R])), (P, R)),
        (F.linear, (Arg((2, 4, 6), [S0, S2]), Arg((8, 6), [R, S1]), Arg((8,), [R, R])), (S0, P)),
        (F.linear, (Arg((2, 4, 6), [S0, R]), Arg((8, 6), [R, S0]), Arg((8,), [R, S0])), (S0, S2)),
        (torch.addmm, (Arg((3,), [R, R]), Arg((4, 6), [R, S1]), Arg((6, 3), [R, S0])), (R, P)),
        (torch.bmm, (Arg((2, 4, 6), [S0, R]), Arg((2, 6, 3), [S0, S2])), (S0, S2)),
        (torch.einsum, ("bk,nk->bn", Arg((4, 6), [S0, S1]), Arg((8, 6), [R, S1])), (S0, P)),
        (torch.outer, (Arg((4,), [S0, R]), Arg((6,), [R, S0])), (S0, S1)),
    ],
)
def test_placements_of_products(func: Any, args: Any, out: Any) -> None:
    assert infer(func, *args).outputs == (out,)


@pytest.mark.parametrize("func", [torch.matmul, torch.mm, F.linear])
def test_dims_that_do_not_fit_are_refused_before_any_rank_computes(func: Any) -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        infer(func, Arg((4, 5), [S1, R]), Arg((4, 6), [S0, R]))


@pytest.mark.parametrize("sizes", [(12, 12), (8, 4), (4, 20)])
def test_products_of_grouped_rows_match_plain_where_pieces_have_odd_sizes(sizes: Any) -> None:
    k, n = sizes
    x, w = torch.randn(6, k), torch.randn(3, k, n)  # torch wants rows of 16 bytes
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    assert check_rule(torch._grouped_mm, x, w, offs=offs, rtol=1e-4, atol=1e-5, tries=16)
    got = infer(
        torch._grouped_mm, Arg((6, 8), [R, S1]), Arg((3, 8, 4), [S2, S1]), offs=Arg((3,), [R, R])
    )
    assert got.outputs == ((S1, P),)
