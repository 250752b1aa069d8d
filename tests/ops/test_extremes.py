"""max, min and their indices over split dims: ties, NaN, empty pieces, integers and bools."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from disttensor.core.placement import Replicate, Shard
from ops import Arg, infer
from tests.support.simulate import check_rule

S0, S1, R = Shard(0), Shard(1), Replicate()

PLAIN = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
TIES = torch.randint(0, 3, (5, 6, 3), generator=torch.Generator().manual_seed(3)).double()
WITH_NAN = PLAIN.clone()
WITH_NAN[1, 2] = WITH_NAN[4, :, 1] = math.nan
LOWEST = torch.full((5, 6, 3), -math.inf, dtype=torch.float64)
INPUTS = {"plain": PLAIN, "ties": TIES, "nan": WITH_NAN, "lowest": LOWEST}
inputs = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())


def check(*args: Any, **kwargs: Any) -> None:
    """On 2x2, and on four ranks of which the last has nothing of 5."""
    assert check_rule(*args, tries=12, **kwargs)
    assert check_rule(*args, mesh_shape=(4,), tries=6, seed=1, **kwargs)


@inputs
@pytest.mark.parametrize("dim", [(), 0, (0, 2), -1], ids=str)
@pytest.mark.parametrize("func", [torch.amax, torch.amin])
def test_amax_matches_plain_and_shares_the_gradient_among_ties(
    func: Any, dim: Any, x: torch.Tensor
) -> None:
    check(func, x, dim)
    check(func, x, dim, True)


@inputs
@pytest.mark.parametrize("func", [torch.max, torch.min])
def test_max_of_all_matches_plain(func: Any, x: torch.Tensor) -> None:
    check(func, x)


@inputs
@pytest.mark.parametrize("args", [(0,), (1, True), (-1,)])
@pytest.mark.parametrize("func", [torch.max, torch.min])
def test_max_along_a_dim_names_the_lowest_index(func: Any, args: Any, x: torch.Tensor) -> None:
    check(func, x, *args, partial=())


@inputs
@pytest.mark.parametrize("args", [(), (0,), (1, True), (-1,)])
@pytest.mark.parametrize("func", [torch.argmax, torch.argmin])
def test_argmax_is_the_index_in_the_whole(func: Any, args: Any, x: torch.Tensor) -> None:
    check(func, x, *args)


@pytest.mark.parametrize("kwargs", [{}, {"dim": 1}, {"dim": 0, "keepdim": True}])
def test_aminmax(kwargs: Any) -> None:
    check(torch.aminmax, TIES, **kwargs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("func", [torch.amax, torch.max, torch.min, torch.argmax])
def test_integers_and_bools(func: Any, dtype: Any) -> None:
    x = TIES.to(dtype)
    if func is not torch.argmax or dtype != torch.bool:
        check(func, x)
        check(func, x, 0)


def test_max_of_two_tensors_is_elementwise() -> None:
    check(torch.max, PLAIN, TIES)
    check(torch.min, PLAIN, TIES[:, :1])


@pytest.mark.parametrize("func", [torch.max, torch.argmax, torch.amax])
def test_one_dim_and_none(func: Any) -> None:
    check(func, TIES[:, 0, 0].clone(), 0)
    check(func, TIES[0, 0, 0].clone())


@pytest.mark.parametrize(
    ("func", "args", "outs"),
    [
        (torch.max, (Arg((5, 6), [S0, S1]), 1), ((S0, R), (S0, R))),
        (torch.max, (Arg((5, 6), [S0, S1]),), ((R, R),)),
        (torch.amax, (Arg((5, 6), [S0, S1]), 0, True), ((R, S1),)),
        (torch.argmax, (Arg((5, 6), [S0, S1]),), ((R, R),)),
    ],
)
def test_placements_of_extremes(func: Any, args: Any, outs: Any) -> None:
    assert infer(func, *args).outputs == outs


@pytest.mark.parametrize("func", [torch.div, torch.Tensor.div_, torch.Tensor.__truediv__])
def test_a_sum_divided_by_zero_is_infinite_though_addends_are_zero_or_of_two_signs(
    func: Any,
) -> None:
    zero = torch.zeros((), dtype=torch.float64)
    for x in (PLAIN, torch.eye(3, dtype=torch.float64) + 1):
        check(func, x, zero, partial=("sum", "avg"), grad=False)
        check(func, x, torch.zeros_like(x), partial=("sum",), grad=False)
    check(torch.addcdiv, PLAIN, PLAIN, zero, partial=("sum",), grad=False)
    check(torch._foreach_div, [PLAIN], zero, partial=("sum",), grad=False)


@pytest.mark.parametrize("func", [torch.argmax, torch.argmin])
def test_indices_of_bools_are_refused_as_in_torch(func: Any) -> None:
    for layout in ([R], [S0], [S1]):
        with pytest.raises(RuntimeError, match="does not support bool input"):
            infer(func, Arg((5, 6), layout, torch.bool), 0, mesh_shape=(2,))


@pytest.mark.parametrize("args", [(), (0,)])
@pytest.mark.parametrize("func", [torch.argmax, torch.argmin, torch.amax, torch.amin, torch.min])
def test_extremes_of_nothing_are_refused_as_in_torch(func: Any, args: Any) -> None:
    with pytest.raises((RuntimeError, IndexError)) as plain:
        func(torch.zeros(0, 3), *args)
    for layout in ([R], [S0], [S1]):
        with pytest.raises(plain.type, match=re.escape(str(plain.value))):
            infer(func, Arg((0, 3), layout, torch.float32), *args, mesh_shape=(2,))
