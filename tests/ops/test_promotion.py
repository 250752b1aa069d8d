"""Pending sums of integers in calls that promote them: a sum wraps around in the dtype of its
summands, and a float has room for fewer digits than an integer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from ops.factors import NoRule
from ops.registry import RULES
from ops.signatures import form_of
from tests.opinfo.opinfo_call import OPS
from tests.support.part import EVERYTHING, part
from tests.support.pool import on_ranks
from tests.support.simulate import check_rule, plan
from tests.support.structure import replace_tensors

P, R = Partial("sum"), Replicate()
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*INTEGERS, torch.bool, torch.bfloat16, torch.float32, torch.float64)
SAMPLES = 2  # of a function and a dtype


def tensors_of(*values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    replace_tensors(values, lambda t: found.append(t) or t)
    return found


def layouts_of(tensors: list[torch.Tensor]) -> Iterator[list[Any]]:
    """All tensors pending, and each alone. ``summands`` of integers have values from all the
    range of their dtype."""
    can = [t.dtype != torch.bool for t in tensors]
    chosen = [can, *([i == j and ok for j, ok in enumerate(can)] for i in range(len(can)))]
    for pending in {tuple(c): None for c in chosen}:
        yield [[P if p else R] for p in pending]


def check(func: Any, *args: Any, **kwargs: Any) -> int:
    """Compares the call with plain tensors in all layouts in which a pending sum passes; their
    number."""
    passed = 0
    try:
        given = form_of(func, args, kwargs)[:2]
        for layouts in layouts_of(tensors_of(*given)):
            decision = plan(func, *given, layouts, (2,))[2]
            if decision is not None and any(w.partial for w in decision.input_layouts):
                check_rule(
                    func, *args, layouts=layouts, mesh_shape=(2,), grad=False, rtol=1e-3, **kwargs
                )
                passed += 1
    except NoRule:
        pass
    return passed


@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_samples_of_integers_in_every_function_that_passes_a_pending_sum_on() -> None:
    passed, failed = set(), []
    ops = part([*OPS.values()], len(OPS) // 6)
    for op, dtype in itertools.product(ops, (torch.int64, torch.uint8)):
        if op.op not in RULES or dtype not in op.dtypes or "empty" in op.name:
            continue
        for sample in itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES):
            try:
                if check(op.op, sample.input, *sample.args, **sample.kwargs):
                    passed.add(op.name)
            except AssertionError as error:
                failed.append(f"{dtype} {error}")
    assert not failed, "\n".join(failed)
    assert len(passed) > (100 if EVERYTHING else 20)


def values(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False, True])
    if dtype.is_floating_point:
        return torch.tensor([1.5, -2.0, 3.0], dtype=dtype)
    return torch.tensor([1, torch.iinfo(dtype).max, torch.iinfo(dtype).min], dtype=dtype)


def test_numbers_and_tensors_of_every_other_dtype() -> None:
    names = "add sub rsub mul div true_divide lerp ldexp addcmul __radd__ __rsub__ __rmul__"
    of = [(getattr(torch, n, None), getattr(torch.Tensor, n, None)) for n in names.split()]
    pairs = [func for two in of for func in two if func is not None]
    places = [getattr(torch.Tensor, n) for n in ("add_", "sub_", "mul_", "div_", "copy_")]
    each = [getattr(torch, f"_foreach_{n}") for n in ("add", "sub", "mul", "div", "copy_")]
    joins = (torch.cat, torch.stack, torch.hstack, torch.vstack, torch.column_stack)
    mask = torch.tensor([True, False, False])
    failed, checked = [], 0
    for dtype in INTEGERS:
        x = values(dtype)
        calls: list[Any] = [(f, x) for f in (torch.deg2rad, torch.rad2deg, torch.neg, torch.sum)]
        calls += [(f, x, 0) for f in (torch.sum, torch.cumsum, torch.diff)]
        calls += [(torch.sum, x), (torch.trapezoid, x), (torch.gradient, x)]
        for n in (2, 0.5, True):
            calls += [(f, x, n) for f in (*pairs, *places)]
            calls += [(f, [x, x], n) for f in each]
            calls += [(torch.where, mask, x, n), (torch.where, mask, n, x)]
        for other in DTYPES:
            y = values(other)
            calls += [(f, x, y) for f in (*pairs, *places)]
            calls += [(f, y, x) for f in (*pairs, *places)]
            calls += [(torch.add, x, y, 3), (torch.addcmul, x, x, y), (torch.addcmul, y, x, x)]
            calls += [(f, [x, y], [y, x]) for f in each]
            calls += [(torch.where, mask, x, y), (torch.where, mask, y, x)]
            calls += [(f, [x, y]) for f in joins]
            calls += [(torch.Tensor.to, x, other), (torch.Tensor.type_as, x, y)]
        for func, *args in calls:
            try:
                func(*replace_tensors(args, torch.clone))
            except (RuntimeError, TypeError, NotImplementedError):
                continue  # torch refuses the call
            try:
                checked += check(func, *args)
            except AssertionError as error:
                failed.append(f"{dtype} {error}")
    assert not failed, "\n".join(failed)
    assert checked > 400


CALLS = {
    "x / 2": lambda x: x / 2, "x * 0.5": lambda x: x * 0.5, "x + 0.5": lambda x: x + 0.5,
    "x + float": lambda x: x + torch.tensor([0.5]), "deg2rad": torch.deg2rad,
    "ldexp": lambda x: torch.ldexp(x, torch.tensor([1])),
    "cat": lambda x: torch.cat([x, torch.tensor([0.5])]),
    "stack": lambda x: torch.stack([x, torch.tensor([0.5])]),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "_foreach_mul": lambda x: torch._foreach_mul([x], 0.5)[0],
    "copy_": lambda x: x.new_zeros(1, dtype=torch.float32).copy_(x),
    "uint8": lambda x: (x * 120).to(torch.uint8) + x,
    "mean": lambda x: x.mean(0, dtype=torch.float32),
}  # fmt: skip


@on_ranks(2)
def test_summands_that_a_float_rounds() -> None:
    mesh = dt.init_mesh((2,), ("x",))
    rows = torch.tensor([[16777217], [-16777216]])
    x = dt.shard_tensor(rows, mesh, [Shard(0)]).sum(0)
    assert x.placements == (P,)
    wrong = {}
    for name, call in CALLS.items():
        mine, plain = call(x).full_tensor(), call(rows.sum(0))
        if not torch.equal(mine, plain) or mine.dtype != plain.dtype:
            wrong[name] = mine, plain
    assert not wrong, wrong


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.bool])
def test_rows_of_a_split_table_whose_dtype_has_no_sums(dtype: torch.dtype) -> None:
    table, index = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]]).to(dtype), torch.tensor([3, 0, 2])
    how: Any = {"mesh_shape": (2,), "grad": False, "rtol": 0, "atol": 0}
    for layout in ([Shard(0)], [Shard(1)]):
        layouts = [layout, [R]]
        for got in (
            check_rule(torch.index_select, table, 0, index, layouts=layouts, **how),
            check_rule(torch.nn.functional.embedding, index, table, layouts=layouts[::-1], **how),
        ):
            assert not any(g.partial for g in got[0].decision.output_layouts)


@on_ranks(2)
def test_rows_of_a_split_table_keep_the_sign_of_zero() -> None:
    mesh = dt.init_mesh((2,), ("x",))
    table, index = torch.tensor([[-0.0], [0.0], [-0.0], [2.0]]), torch.tensor([0, 1, 2, 3])
    cases = {
        "index_select": lambda rows: rows.index_select(0, index),
        "gather": lambda rows: rows.gather(0, index[:, None]),
        "take_along_dim": lambda rows: rows.take_along_dim(index[:, None], 0),
        "embedding": lambda rows: torch.nn.functional.embedding(index, rows),
    }
    wrong = [
        (name, rows.dtype)
        for rows in (table, torch.complex(table, -table))
        for name, call in cases.items()
        if str(call(dt.shard_tensor(rows, mesh, [Shard(0)])).full_tensor()) != str(rows)
    ]
    assert not wrong, wrong
