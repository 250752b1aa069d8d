"""Rules of indexing, picking, writing along a dim, and embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ops
from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, NoRule
from ops.indexing.vocab_shard import Owned
from ops.registry import RULES
from tests.support.simulate import check_rule, simulate

R, P = Replicate(), Partial()
S = Shard
T = torch.Tensor
get = T.__getitem__


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


def ids(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers)


def name(case: tuple[Any, ...]) -> str:
    return " ".join(
        str(list(v.shape)) if isinstance(v, T) else getattr(v, "__name__", str(v)) for v in case
    )


X, C = randn(4, 6, 5), randn(5, 6)
ROWS, J = ids(0, 3, 3, 1), ids([2, 0, 1], [1, 1, 3])
A = slice(None)
GETS: list[tuple[Any, ...]] = [
    (get, X, 1),
    (get, X, -1),
    (get, X, (A, 2)),
    (get, X, (..., 3)),
    (get, X, (None, A, -2, None)),
    (get, X, (0, A, 1)),
    (get, X, slice(1, 3)),
    (get, X, slice(0, 4)),
    (get, X, slice(-9, 9)),
    (get, X, (A, slice(None, None, 2))),
    (get, X, (A, A, slice(-2, None))),
    (get, X, (..., None)),
    (get, X, ()),
    (get, X, None),
    (get, X, Ellipsis),
    (get, X, [0, 2]),
    (get, X, ([0, 2], [1, 1])),
    (get, X, ROWS),
    (get, X, (A, ROWS)),
    (get, X, (A, J)),
    (get, X, (ROWS, A, ROWS)),
    (get, X, (ids([0], [1]), ROWS)),
    (get, X, (A, ROWS, ROWS)),
    (get, X, (0, A, ROWS)),
    (get, X, (ROWS, 0, ROWS)),
    (get, X, (ROWS, None, ROWS)),
    (get, X, (..., ROWS, slice(1, 3))),
    (get, X, (torch.tensor(2),)),
    (get, X, (A, torch.tensor(2), ROWS)),
    (get, X, (slice(1, 3), ROWS)),
    (get, X, (A, A, [0, 1, 4])),
    (get, ids(5, 6, 7, 8, 9), 2),
    (get, C > 0, 2),
    (torch.select, X, 1, 2),
    (T.select, X, -1, -1),
    (torch.select, C > 0, 0, 1),
    (T.narrow, X, 1, 2, 3),
    (torch.narrow, C, 0, 0, 5),
    (torch.index_select, X, 1, ROWS),
    (T.index_select, C, 0, ROWS),
    (T.index_select, C, 0, ids(2)),
    (torch.gather, C, 1, ids([0, 5], [3, 1], [2, 2], [4, 0], [1, 1])),
    (T.gather, C, 0, ids([4, 0, 1, 2, 3, 3])),
    (T.gather, X, 2, torch.arange(4 * 6 * 2).reshape(4, 6, 2) % 5),
    (torch.gather, C, 0, ids([0, 1], [4, 4])),
    (torch.take_along_dim, C, ids([0], [2], [5], [-1], [3]), 1),
    (T.take_along_dim, C, ids([0, 2]), 1),
    (torch.take_along_dim, randn(1, 6), ids([0, 1], [5, 3]), 1),
    (torch.take, C, J),
]


@pytest.mark.parametrize("case", GETS, ids=name)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3,)], ids=str)
def test_picking_matches_plain(case: tuple[Any, ...], mesh_shape: Any) -> None:
    for kind in ("sum", "max"):
        check_rule(*case, mesh_shape=mesh_shape, partial=(kind,), tries=14)


@pytest.fixture
def written() -> Iterator[Any]:
    """``x[index] = value`` as a function that gives x back, for the oracle."""

    def write(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
        x[index] = value
        return x

    RULES[write] = dataclasses.replace(RULES[T.__setitem__])
    yield write
    del RULES[write]


SETS: list[tuple[Any, ...]] = [
    (X, 1, 2.0),
    (X, (A, 1), randn(4, 5)),
    (X, (A, 1), randn(5)),
    (X, (..., 2), randn(4, 1)),
    (X, slice(1, 3), randn(6, 5)),
    (X, (A, slice(2, 4)), randn(1, 4, 2, 5)),
    (X, (A, A), randn()),
    (X, (A, ROWS[[0, 1, 3]]), randn(4, 3, 5)),
    (X, (0, 2), 1),
    (X, C.T[None, :, :] > 9, 3.0),
    (X, X > 0, 3.0),
    (X, X > 0, randn()),
    (X, X[:, :, 0] > 0, randn(5)),
    (C, C[:, 0] > 0, randn(1, 6)),
    (X, None, 5.0),
    (C, [1, 3], randn(2, 6)),
    (X, (torch.tensor(2), A, 3), randn(6)),
]


@pytest.mark.parametrize("case", SETS, ids=name)
def test_assignment_matches_plain(case: tuple[Any, ...], written: Any) -> None:
    if isinstance(case[1], T) and case[1].shape[0] == 1:
        with pytest.raises((NoRule, IndexError)):
            check_rule(written, *case)
        return
    for kind in ((), ("sum",)):
        done = check_rule(written, *case, partial=kind, tries=40)
    assert done, "in place on some layout"


def test_a_target_keeps_its_layout() -> None:
    got = ops.infer(
        T.__setitem__, Arg((4, 6), [S(0), R]), (A, 1), Arg((4,), [R, S(0)]), mesh_shape=(2, 2)
    )
    assert got.inputs == ((S(0), R), (S(0), R)) and got.outputs == ((S(0), R),)
    got = ops.infer(T.index_put_, Arg((4, 6), [S(1), R]), (Arg((3,), [S(0), R], torch.int64),),
                    Arg((3, 6), [R, R]), mesh_shape=(2, 2))  # fmt: skip
    assert got.inputs == ((S(1), R), (R, R), (S(1), R))


W: Any = ids([0, 2, 4, 1, 0, 3], [1, 1, 1, 0, 2, 4])
WRITES: list[tuple[Any, ...]] = [
    (torch.scatter, C, 0, W, randn(2, 6)),
    (T.scatter, C, 1, W.T[:5] % 6, 2.0),
    (T.scatter_, C, 0, W, 1.5),
    (torch.scatter_add, C, 0, W, randn(2, 6)),
    (T.scatter_add_, C, 0, W, randn(2, 6)),
    (T.scatter_add, C, 0, W[:, :3], randn(2, 3)),
    (torch.scatter_reduce, C, 0, W, randn(2, 6), "sum"),
    (T.scatter_reduce, C, 0, W, randn(2, 6), "amax"),
    (torch.index_add, C, 0, ids(0, 4, 0), randn(3, 6)),
    (T.index_add_, X, 1, ROWS, randn(4, 4, 5)),
    (torch.index_copy, C, 1, ids(5, 0), randn(5, 2)),
    (T.index_fill, X, 1, ROWS, 2.0),
    (T.index_fill_, C, 0, ids(1), randn()),
    (torch.index_put, C, (ids(0, 1), ids(2, 3)), randn(2)),
    (T.index_put_, C, (ROWS,), randn(4, 6), True),
    (torch.index_put, C, (ids(0, 0),), randn(6), True),
    (torch.masked_fill, C, C > 0, 2.0),
    (T.masked_fill, C, C[:, :1] > 0, randn()),
    (T.masked_fill_, C, C[0] > 0, -1e9),
    (torch.select_scatter, C, randn(6), 0, 3),
    (torch.slice_scatter, C, randn(5, 2), 1, 2, 4),
]


@pytest.mark.parametrize("case", WRITES, ids=name)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3,)], ids=str)
def test_writing_matches_plain(case: tuple[Any, ...], mesh_shape: Any) -> None:
    check_rule(*case, mesh_shape=mesh_shape, tries=24)


def test_a_source_larger_than_the_index_matches_plain() -> None:
    check_rule(
        torch.scatter_add, C, 0, W[:, :3], C.clone(), grad=False
    )  # (torch has no gradient there)
    check_rule(torch.scatter, C, 0, W, C.clone(), grad=False)


@pytest.mark.parametrize("func", [torch.index_add, torch.index_copy], ids=lambda f: f.__name__)
def test_a_number_for_a_source_is_torchs_error(func: Any) -> None:
    with pytest.raises(TypeError, match="'source'"):
        simulate(func, C, 0, ids(1), 2.0, layouts=[[S(0)], [R]], mesh_shape=(2,))


TABLE = randn(7, 4)


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize(
    "index",
    [J, ids(6, 0, 6, 3, 5), torch.tensor(4), torch.empty(0, 3, dtype=torch.int64)],
    ids=lambda i: str(list(i.shape)),
)
def test_embedding_matches_plain(index: torch.Tensor, padding_idx: Any) -> None:
    for mesh_shape in [(2, 2), (4,), (5,)]:
        check_rule(F.embedding, index, TABLE, padding_idx, mesh_shape=mesh_shape, partial=())
    check_rule(F.embedding, index, TABLE, padding_idx, tries=10)


def test_a_split_vocabulary_is_looked_up_where_it_lies() -> None:
    table = Arg((7, 4), [R, S(0)])
    got = ops.infer(F.embedding, Arg((2, 3), [S(0), R], torch.int64), table, mesh_shape=(2, 2))
    assert got.inputs == ((S(0), R), (R, S(0)))
    assert got.outputs == ((S(0), P),)


@pytest.mark.parametrize("wrong", [-1, 7, 100])
def test_an_id_outside_of_the_vocabulary_is_torchs_error(wrong: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        simulate(F.embedding, ids(0, wrong), TABLE, layouts=[[R], [S(0)]], mesh_shape=(2,))


def test_rows_by_a_list_of_numbers_come_from_their_owners() -> None:
    x, rows = Arg((5, 6), [S(0), S(1)]), Arg((3,), [R, R], torch.int64)
    assert ops.infer(torch.index_select, x, 0, rows, mesh_shape=(2, 2)).outputs == ((P, S(1)),)


@pytest.mark.parametrize("func", ["index_add", "scatter_add", "scatter_reduce"])
def test_split_rows_are_added_by_their_owners(func: str) -> None:
    target, rows = Arg((8, 4), [R]), Arg((6, 4), [S(0)])
    index = Arg((6,) if func == "index_add" else (6, 4), [S(0)], torch.int64)
    call = (target, 0, index, rows, *(["sum"] if func == "scatter_reduce" else []))
    got = ops.infer(getattr(torch, func), *call, mesh_shape=(2,))
    assert got.inputs == ((P,), (S(0),), (S(0),))
    assert got.outputs == ((P,),)
    if func == "scatter_reduce":  # a row that another rank's index hits would be kept here
        alone = ops.infer(torch.scatter_reduce, *call, include_self=False, mesh_shape=(2,))
        assert alone.outputs == ((S(1),),)


def test_rows_that_are_copied_are_exchanged_for_columns() -> None:
    call = Arg((8, 4), [R]), 0, Arg((6,), [S(0)], torch.int64), Arg((6, 4), [S(0)])
    got = ops.infer(torch.index_copy, *call, mesh_shape=(2,))
    assert got.inputs == ((S(1),), (R,), (S(1),))


def test_a_row_of_a_split_dim_is_a_view_of_what_is_exchanged_for_another() -> None:
    got = ops.infer(get, Arg((4, 8), [S(0), S(1)]), 2, mesh_shape=(2, 2))
    assert got.inputs == ((S(1, order=1), S(1, order=0)),)
    assert ops.infer(torch.select, Arg((4, 6), [S(0), R]), 0, 2).inputs == ((S(1), R),)
    assert ops.infer(torch.select, Arg((5,), [S(0), R]), 0, 2).inputs == ((R, R),)


def test_split_ids_give_split_rows() -> None:
    got = ops.infer(
        get, Arg((7, 4), [R, S(1)]), Arg((6, 3), [S(0), R], torch.int64), mesh_shape=(2, 2)
    )
    assert got.outputs == ((S(0), S(2)),)


@pytest.mark.parametrize(
    "index", [Arg((5, 6), [R, R], torch.bool), True, [[0, 1]], (None, [True, False])], ids=str
)
def test_what_depends_on_data_has_no_rule(index: Any) -> None:
    x = Arg((5, 6), [S(0), R])
    assert ops.infer(get, x, index).inputs[0] == (R, R)


@pytest.mark.parametrize("number", [-1, 1, 2])
def test_each_rank_refuses_a_number_that_no_rank_owns(number: int) -> None:
    """One row on two ranks: one of them has no row."""
    for size in (1, 0):
        owned = Owned(1 - size, size, 1)
        here, _ = owned.find(torch.tensor([0, number]))
        with pytest.raises(IndexError):
            owned.rows(torch.ones(size, 2)).index_select(0, here)
