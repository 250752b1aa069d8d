"""Rules of views and joins: letters, and values and gradients against the plain functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ops
from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg
from ops.shape import strides
from tests.support.simulate import check_rule, plan
from tests.support.structure import tensors_in

R, P = Replicate(), Partial()
S = Shard


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


@pytest.mark.parametrize(
    ("shape", "sizes", "given", "kept"),
    [
        ((4, 6), (24,), S(0), S(0)),
        ((4, 6), (24,), S(1), S(0)),  # a minor dim of a merge, exchanged for the major one
        ((5, 6), (30,), S(1), R),  # which does not divide
        ((5, 6), (30,), S(0), R),  # uneven
        ((5, 6), (5, 2, 3), S(0), S(0)),  # uneven, but untouched
        ((5, 6), (5, 2, 3), S(1), S(1)),
        ((5, 6), (5, 3, 2), S(1), R),  # 3 heads over 2, and 5 do not divide
        ((4, 6), (4, 3, 2), S(1), S(0)),
        ((2, 3, 8), (6, 8), S(2), S(1)),
        ((6, 8), (2, 3, 8), S(0), S(0)),
        ((6, 8), (2, 3, 8), S(1), S(2)),
        ((1, 6, 8), (6, 8), S(1), S(0)),
        ((6, 8), (1, -1, 1, 8), S(0), S(1)),
        ((4, 6), (6, 4), S(0), S(0)),  # 4 = 2 2, 6 = 2 3
        ((4, 6), (3, 8), S(0), R),
        ((0, 6), (0, 3), S(0), S(0)),
        ((2, 4, 6), (8, 6), P, P),
    ],
)
def test_view_matches_dims(shape: Any, sizes: Any, given: Any, kept: Any) -> None:
    for func in (torch.Tensor.view, torch.reshape):
        args = sizes if func is torch.Tensor.view else (sizes,)
        got = ops.infer(func, Arg(shape, [given]), *args, mesh_shape=(2,))
        assert got.outputs == ((kept,),)
        assert got.shapes == (tuple(torch.empty(shape).view(sizes).shape),)


def test_two_axes_on_one_dim_split_it_evenly_together() -> None:
    got = ops.infer(torch.Tensor.view, Arg((12, 5), [S(0), S(0)]), 4, 3, 5, mesh_shape=(2, 2))
    assert got.outputs == ((S(0), S(0)),)
    got = ops.infer(torch.Tensor.view, Arg((12, 5), [S(0), S(0)]), 2, 6, 5, mesh_shape=(2, 2))
    assert got.outputs == ((S(0), R),)


def test_a_wrong_view_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match=r"shape '\[4, -1\]' is invalid for input of size 30"):
        ops.infer(torch.Tensor.view, Arg((5, 6), [S(0), R]), 4, -1)


X, C = randn(4, 6, 2), randn(5, 6)
T = torch.Tensor
VIEWS: list[tuple[Any, ...]] = [
    (T.view, X, 24, 2),
    (T.view, X, (2, 2, -1)),
    (T.view, X, 2, 2, 6, 2),
    (T.view, X, 4, 2, 3, 2),
    (T.view, X, [-1]),
    (T.view, C, 5, 2, 3),
    (T.view, C, 1, 5, 6),
    (T.view, randn(0, 4), 0, 2, 2),
    (T.view, randn(1, 1), ()),
    (T.view, randn(3, 1, 4), 12),
    (T.view, C, torch.int64),
    (torch.reshape, X, (6, 8)),
    (T.reshape, X, 6, 4, 2),
    (T.reshape, C, -1),
    (T.view_as, C, randn(6, 5)),
    (T.reshape_as, C, randn(2, 15)),
    (torch.flatten, X),
    (T.flatten, X, 1),
    (torch.flatten, X, 0, 1),
    (T.flatten, randn()),
    (torch.ravel, X),
    (T.unflatten, X, 1, (3, -1)),
    (torch.unflatten, X, 0, (2, 2)),
    (torch.squeeze, randn(1, 2, 1, 5)),
    (T.squeeze, randn(3, 5)),
    (T.squeeze, randn(1, 2, 1, 5), 0),
    (T.squeeze, randn(1, 2, 1, 5), (1, -2)),
    (T.squeeze, randn()),
    (torch.unsqueeze, C, 1),
    (T.unsqueeze, C, -1),
    (torch.transpose, X, 0, -1),
    (T.swapaxes, X, 1, 2),
    (T.t, C),
    (T.T.__get__, C),
    (T.mT.__get__, X),
    (T.H.__get__, C),
    (T.mH.__get__, X),
    (torch.adjoint, X),
    (T.t, randn(3)),
    (T.permute, X, 2, 0, 1),
    (torch.permute, X, (0, -1, 1)),
    (torch.movedim, X, 0, 2),
    (T.movedim, X, (0, 1), (-1, 0)),
    (torch.moveaxis, X, 2, 0),
    (T.expand, randn(1, 5, 1), 3, -1, 4),
    (T.expand, randn(5, 1), 2, 5, 4),
    (torch.broadcast_to, C, (2, 5, 6)),
    (T.expand_as, randn(5, 1), C),
    (torch.diagonal, X),
    (T.diagonal, X, 1, 1, 2),
    (T.diagonal, C, -7),
    (T.unfold, C, 1, 3, 2),
    (T.contiguous, X),
    (torch.clone, X),
    (T.detach, X),
]


def show(value: Any) -> str:
    if isinstance(value, T):
        return str(tuple(value.shape))
    return getattr(value, "__name__", str(value))


def ids(case: tuple[Any, ...]) -> str:
    return " ".join(map(show, case))


@pytest.mark.parametrize("case", VIEWS, ids=ids)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3,)], ids=str)
def test_views_match_plain(case: tuple[Any, ...], mesh_shape: Any) -> None:
    for kind in ("sum", "max"):
        check_rule(*case, mesh_shape=mesh_shape, partial=(kind,), tries=12)


H, V = randn(4), randn(5)
JOINS: list[tuple[Any, ...]] = [
    (torch.cat, [C, C]),
    (torch.cat, [C, randn(5, 2), C], 1),
    (torch.concat, [X], -1),
    (torch.cat, [randn(0), V]),
    (torch.cat, (randn(0, 6), C)),
    (torch.stack, [C, C], 1),
    (torch.stack, [V, V, V], -1),
    (torch.hstack, [V, H]),
    (torch.hstack, [C, C]),
    (torch.vstack, [V, randn(2, 5)]),
    (torch.vstack, [V, V]),
    (torch.dstack, [C, randn(5, 6, 2)]),
    (torch.dstack, [V, V]),
    (torch.dstack, [randn(1, 5, 2), V]),
    (torch.dstack, [V, randn(1, 5, 2)]),
    (torch.column_stack, [V, randn(5, 3), V]),
    (torch.hstack, [randn(), V]),
    (torch.split, C, 2),
    (T.split, C, [1, 5], 1),
    (torch.split_with_sizes, C, [2, 3]),
    (T.split, C, 4, -1),
    (torch.chunk, C, 3),
    (T.chunk, C, 4, 0),
    (torch.tensor_split, C, 4),
    (T.tensor_split, C, (1, 3), 1),
    (T.tensor_split, C, [2, -1]),
    (T.hsplit, C, 2),
    (torch.hsplit, randn(6), 2),
    (torch.vsplit, X, 2),
    (torch.dsplit, X, [1]),
    (torch.unbind, C),
    (T.unbind, X, -1),
    (T.repeat, C, 2, 1, 1),
    (T.repeat, C, (1, 2)),
    (T.tile, C, 2),
    (torch.tile, X, (2, 1)),
    (T.repeat_interleave, C, 2),
    (torch.repeat_interleave, X, 3, 1),
    (T.repeat_interleave, C, 2, 0),
    (F.glu, C),
    (F.glu, X, 0),
    (F.pad, C, (1, 2)),
    (F.pad, C, (0, 0, 1, -1)),
    (F.pad, X, (1, 0), "constant", 2.5),
    (torch.tril, C),
    (torch.triu, X, 1),
    (T.tril, randn(6, 5), -2),
    (T.triu_, C, -1),
    (torch.roll, C, 2),
    (T.roll, C, 2, 1),
    (torch.roll, X, (1, 2), (0, 2)),
    (T.flip, C, 0),
    (torch.flip, X, (0, 2)),
    (T.flip, X, 1, 2),
    (torch.fliplr, C),
    (torch.flipud, C),
    (torch.rot90, C),
    (torch.rot90, X, 2, (1, 2)),
    (torch.diag, V, 1),
    (torch.diag, C, -2),
    (torch.diag_embed, X),
    (torch.diag_embed, X, 1, 0, 2),
]


@pytest.mark.parametrize("case", JOINS, ids=ids)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3,)], ids=str)
def test_joins_match_plain(case: tuple[Any, ...], mesh_shape: Any) -> None:
    for kind in ("sum", "max"):
        check_rule(*case, mesh_shape=mesh_shape, partial=(kind,), tries=12)


OTHERS: list[tuple[Any, ...]] = [
    (torch.select, X, 1, 2),
    (T.narrow, X, 1, 2, 3),
    (torch.narrow_copy, X, 1, 2, 3),
    (T.__getitem__, X, (slice(None), 2)),
    (T.__getitem__, X, ([0, 1], 2)),
    (torch.view_as_real, torch.complex(C, C)),
    (torch.view_as_complex, randn(5, 3, 2)),
    (torch.real, torch.complex(C, C)),
    (torch.imag, torch.complex(C, C)),
]


@pytest.mark.parametrize("case", [*VIEWS, *JOINS, *OTHERS], ids=ids)
def test_what_shares_memory_is_a_view(case: tuple[Any, ...]) -> None:
    first, result = tensors_in(case)[0], tensors_in([case[0](*case[1:])])[0]
    shares = first.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
    _, factors, _, inplace = plan(*case[:1], case[1:], {}, [[R]] * len(tensors_in(case)), (2,))
    assert factors.view == (shares and not inplace) or not result.numel()


# These look at another tensor, at bits, or bring numbers of their own.
COMPUTE = {
    "view_as", "reshape_as", "expand_as", "glu", "view (5, 6) torch.int64",
    "pad (4, 6, 2) (1, 0) constant 2.5",
}  # fmt: skip


@pytest.mark.parametrize("case", [*VIEWS, *JOINS], ids=ids)
def test_what_only_moves_elements_leaves_a_maximum_pending(case: tuple[Any, ...]) -> None:
    given = [[Partial("max")]] * len(tensors_in(case))
    _, _, decision, _ = plan(*case[:1], case[1:], {}, given, (2,))
    assert decision is not None
    passes = all(out.partial_axes for out in decision.output_layouts)
    assert passes != bool({ids(case), case[0].__name__} & COMPUTE)


def test_meshgrid_and_one_hot_match_plain() -> None:
    check_rule(torch.meshgrid, V, H, indexing="xy", partial=())
    check_rule(torch.meshgrid, V, H, indexing="ij", partial=())
    check_rule(F.one_hot, torch.tensor([[0, 2, 1]] * 5), 3)


def test_what_cannot_stay_split_is_exchanged_for_another_dim() -> None:
    given, both = Arg((4, 6), [S(0), S(1)]), (S(0), S(0))
    assert ops.infer(F.glu, given, mesh_shape=(2, 2)).inputs == (both,)
    assert ops.infer(torch.chunk, given, 2, -1, mesh_shape=(2, 2)).outputs == (both, both)
    ends = Arg((4, 6), [S(0)]), Arg((2, 6), [S(0)])  # joined dims, and a pending sum in one
    assert ops.infer(torch.cat, ends, 0, mesh_shape=(2,)).outputs == ((S(1),),)
    pending = ops.infer(torch.cat, (Arg((4, 6), [P]), ends[1]), 0, mesh_shape=(2,))
    assert pending.inputs == ((S(1),), (S(1),))
    assert ops.infer(torch.stack, (ends[0], Arg((4, 6), [P])), mesh_shape=(2,)).outputs == (
        (S(1),),
    )
    # where no other dim is long enough it is gathered
    assert ops.infer(torch.cat, (Arg((4, 1), [S(0)]),) * 2, 0, mesh_shape=(2,)).outputs == ((R,),)
    assert ops.infer(torch.cat, (Arg((4,), [S(0)]),) * 2, 0, mesh_shape=(2,)).outputs == ((R,),)


def test_repeated_heads_stay_split() -> None:
    got = ops.infer(torch.repeat_interleave, Arg((2, 4, 8), [R, S(1)]), 2, 1, mesh_shape=(2, 2))
    assert got.outputs == ((R, S(1)),)
    assert ops.infer(torch.repeat_interleave, Arg((5,), [S(0)]), 2, 0, mesh_shape=(2,)).outputs == (
        (R,),
    )


def test_triangles_stay_split_in_rows_and_columns() -> None:
    assert ops.infer(torch.tril, Arg((5, 6), [S(0), S(1)]), mesh_shape=(2, 2)).outputs == (
        (S(0), S(1)),
    )


def test_repeat_interleave_keeps_a_split_with_output_size() -> None:
    assert check_rule(torch.repeat_interleave, torch.randn(4, 3).double(), 2, 0, output_size=8)
    assert check_rule(torch.repeat_interleave, torch.randn(4, 3).double(), 2, dim=0)
    got = ops.infer(
        torch.repeat_interleave, Arg((4, 3), [Shard(0)]), 2, 0, output_size=8, mesh_shape=(2,)
    )
    assert got.outputs == ((Shard(0),),)


def test_a_repeated_reshape_of_a_piece_of_one_row_decides_once_for_each_stride(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derived = []
    spread = strides._spread
    monkeypatch.setattr(strides, "_spread", lambda *args: derived.append(args) or spread(*args))
    shapes = {"shape": (2, 3, 8), "local_shape": (1, 3, 8)}
    call = SimpleNamespace(
        inputs=[SimpleNamespace(**shapes)], outputs=[SimpleNamespace(shape=(6, 8))]
    )
    reshape = strides.own_memory(call, lambda x: x.reshape(3, 8))
    dense, of_columns = torch.randn(1, 3, 8), torch.randn(1, 8, 3).transpose(1, 2)
    whole = torch.randn(2, 8, 3).transpose(1, 2)[:1]  # one process would copy it
    for _ in range(2):
        assert reshape(dense)._base is dense
        assert reshape(of_columns)._base is None
        assert reshape(whole)._base is None
    assert len(derived) == 2, derived
