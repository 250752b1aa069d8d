"""Rules of elementwise functions, casts and factories: values, gradients, and where a Partial may
flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ops
from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg
from ops.pointwise import elementwise
from ops.registry import RULES, functions_named
from tests.support.simulate import check_rule

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial("sum")
AVG, MAX = Partial("avg"), Partial("max")

torch.manual_seed(0)
X = torch.rand(5, 6, dtype=torch.float64) * 0.8 + 0.1
Y = torch.rand(5, 6, dtype=torch.float64) * 0.8 + 0.1
ROW = torch.rand(6, dtype=torch.float64) + 0.5
COLUMN = torch.rand(5, 1, dtype=torch.float64) + 0.5
C = torch.complex(X, Y)
I = torch.arange(30).reshape(5, 6) % 7  # noqa: E741
J = torch.arange(30).reshape(5, 6) % 5 + 1
B = X > 0.5


def placed(*placements: Any, shape: tuple[int, ...] = (5, 6), dtype: Any = torch.float32) -> Arg:
    return Arg(shape, placements, dtype)


def wanted(func: Any, *args: Any, **kwargs: Any) -> Any:
    return ops.infer(func, *args, **kwargs).inputs


def given(func: Any, *args: Any, **kwargs: Any) -> Any:
    return ops.infer(func, *args, **kwargs).outputs[0]


def called(call: Any) -> str:
    return ", ".join([call[0].__name__, *map(str, call[1:])])


def functions(names: str, *, inplace: bool = False) -> list[Any]:
    return [
        pytest.param(func, id=f"{name}-{i}")
        for name in names.split()
        for i, (func, writes) in enumerate(functions_named(name, elementwise.PLACES))
        if writes == inplace
    ]


def check(func: Any, *args: Any, **kwargs: Any) -> Any:
    """check_rule, without gradients where torch has none."""
    try:
        return check_rule(func, *args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if "derivative" not in str(error) and "differentiable" not in str(error):
            raise
        return check_rule(func, *args, grad=False, **kwargs)


# Values and gradients -----------------------------------------------------------------------------

NEED_MORE = {"mvlgamma": (1,), "multigammaln": (1,), "polygamma": (), "threshold": (0.5, 0.1),
    "_threshold": (0.5, 0.1),
             "clamp": (0.3, 0.6), "clip": (0.3, 0.6), "clamp_max": (0.5,),
             "clamp_min": (0.5,)}  # fmt: skip
INTEGER = {"gcd", "lcm", "__invert__"}


@pytest.mark.parametrize("func", functions(elementwise.UNARY))
def test_functions_of_one_tensor(func: Any) -> None:
    name = func.__name__.removeprefix("special_")
    if name == "polygamma":
        args: Any = (X, 1) if func is torch.Tensor.polygamma else (1, X)
    elif name == "__abs__":
        pytest.skip("Tensor.__abs__ is abs")
    elif name in ("__invert__",):
        args = (I,)
    else:
        args = (X, *NEED_MORE.get(name, ()))
    check(func, *args, tries=6)


@pytest.mark.parametrize("func", functions(elementwise.UNARY, inplace=True))
def test_functions_of_one_tensor_in_place(func: Any) -> None:
    name = func.__name__.removesuffix("_")
    args: Any = (X, 1) if name == "polygamma" else (X, *NEED_MORE.get(name, ()))
    for got in check(func, *args, tries=8):
        assert got.decision.output_layouts == got.decision.input_layouts[:1]


@pytest.mark.parametrize(
    "func", functions(elementwise.BINARY + elementwise.COMPARISON + elementwise.LOGICAL)
)
def test_functions_of_two_tensors(func: Any) -> None:
    name = func.__name__.removeprefix("special_")
    if name == "logical_not":
        check_rule(func, X, tries=6)
        return
    x, y = (I, J) if name in INTEGER else (X, Y)
    if "polynomial" in name:
        y = (Y * 4).round()
    check(func, x, y, tries=6)
    if x is X and "polynomial" not in name:
        check(func, x, ROW, tries=6)


@pytest.mark.parametrize("func", functions(elementwise.BITWISE))
def test_bitwise_functions(func: Any) -> None:
    one = "not" in func.__name__
    check_rule(func, *((I,) if one else (I, J % 3)), tries=6)


@pytest.mark.parametrize(
    "func", functions(" ".join([elementwise.SUMS, elementwise.PRODUCTS, elementwise.QUOTIENTS]))
)
@pytest.mark.parametrize("partial", [("sum",), ("avg",), ("max",), ("sum", "avg")], ids=str)
def test_arithmetic(func: Any, partial: tuple[str, ...]) -> None:
    if func is torch.complex:
        partial = ()  # (no comparison with a tolerance for complex results)
    check_rule(func, X, Y, tries=8, partial=partial)
    if not func.__name__.startswith("__i"):
        check_rule(func, X, ROW, tries=8, partial=partial)
        check_rule(func, COLUMN, ROW, tries=8, partial=partial)
    if func.__name__ != "complex":
        check_rule(func, X, 3.0, tries=6, partial=partial)
        check_rule(func, X, torch.tensor(2.0, dtype=torch.float64), tries=6, partial=partial)


@pytest.mark.parametrize("func", functions("add sub mul div", inplace=True))
@pytest.mark.parametrize("partial", [("sum",), ("avg", "sum")], ids=str)
def test_arithmetic_in_place_keeps_the_placement(func: Any, partial: tuple[str, ...]) -> None:
    for other in (Y, ROW, COLUMN, 2.0):
        for got in check_rule(func, X, other, tries=12, partial=partial):
            assert got.decision.output_layouts == got.decision.input_layouts[:1]


def test_the_other_linear_functions() -> None:
    for func in (torch.neg, torch.deg2rad, torch.rad2deg, torch.Tensor.negative, torch.positive):
        check_rule(func, X, partial=("sum", "avg"))
    check_rule(torch.ldexp, X, J)
    check_rule(torch.frexp, X, grad=False)
    check_rule(torch.add, X, Y, alpha=2)
    check_rule(torch.sub, X, other=Y, alpha=2)
    check_rule(torch.rsub, X, Y, alpha=2)
    check_rule(torch.div, X, Y, rounding_mode="floor")


@pytest.mark.parametrize("partial", [("sum",), ("avg",), ("max",)], ids=str)
def test_functions_of_three_tensors(partial: tuple[str, ...]) -> None:
    for func in (torch.addcmul, torch.addcdiv, torch.Tensor.addcmul_, torch.Tensor.addcdiv_):
        check_rule(func, X, Y, ROW, value=0.5, partial=partial)
        check_rule(func, X, tensor2=Y, tensor1=COLUMN, partial=partial)
    check_rule(torch.lerp, X, Y, 0.3, partial=partial)
    check_rule(torch.lerp, X, Y, ROW, partial=partial)
    check_rule(torch.Tensor.lerp_, X, ROW, 0.3, partial=partial)
    check_rule(torch.where, B, X, ROW, partial=partial)
    check_rule(torch.where, B, X, 0.0, partial=partial)
    check_rule(torch.where, B, 1.0, X, partial=partial)
    check_rule(torch.Tensor.where, X, B, Y, partial=partial)
    check_rule(torch.clamp, X, ROW * 0.3, Y, partial=partial)
    check_rule(torch.clamp, X, max=ROW * 0.5, partial=partial)
    check_rule(torch.Tensor.clamp_, X, 0.2, 0.6, partial=partial)


def test_activations_with_weights_and_options() -> None:
    image = torch.randn(3, 5, 2, dtype=torch.float64)
    check_rule(F.prelu, image, torch.rand(5, dtype=torch.float64))
    check_rule(F.prelu, image, torch.rand(1, dtype=torch.float64))
    check_rule(F.prelu, torch.randn(4, dtype=torch.float64), torch.rand(1, dtype=torch.float64))
    check_rule(F.rrelu, image)
    check_rule(F.gelu, image, approximate="tanh")
    check_rule(F.leaky_relu, image, 0.2)
    check_rule(F.softplus, image, 2, 10)
    check_rule(F.hardtanh, image, -0.5, 0.5)
    check_rule(F.elu, image, 0.5)


@pytest.mark.parametrize(
    "func",
    [F.relu, F.silu, F.leaky_relu, F.elu, F.hardtanh, F.hardswish, F.mish, F.selu],
    ids=lambda f: f.__name__,
)
def test_inplace_true_has_no_rule_of_its_own(func: Any) -> None:
    with pytest.raises(ops.NoRule):
        check_rule(func, X, inplace=True)


def test_pieces_that_are_empty_and_tensors_of_no_dims() -> None:
    check_rule(torch.mul, X[:1], Y, mesh_shape=(2, 3))
    check_rule(torch.add, X[:0], ROW, mesh_shape=(2, 3))
    check_rule(torch.exp, X[:2], mesh_shape=(4,))
    check_rule(torch.mul, X[0, 0], Y[0, 0])


# Casts and copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128, torch.int64, torch.bool], ids=str
)
def test_casts(dtype: Any) -> None:
    partial = (
        () if dtype.is_complex else ("sum", "avg")
    )  # (no comparison of complex numbers with a tolerance)
    check_rule(torch.Tensor.to, X * 5, dtype, partial=partial)
    check_rule(torch.Tensor.to, X * 5, dtype=dtype, copy=True, partial=partial)
    check_rule(torch.Tensor.type, X * 5, dtype, partial=partial)
    check_rule(torch.Tensor.to, I, dtype)


def test_casts_by_name_and_by_example() -> None:
    for name in ("double", "int", "long", "bool", "short", "cpu"):
        for kind in ("sum", "max"):
            check_rule(getattr(torch.Tensor, name), X * 5, partial=(kind,))
    check_rule(torch.Tensor.float, X, rtol=1e-5, atol=1e-5)
    check_rule(torch.Tensor.to, X * 5, ROW)
    check_rule(torch.Tensor.to, X * 5, I)
    check_rule(torch.Tensor.type_as, X * 5, I)
    check_rule(torch.Tensor.to, X, "cpu")
    check_rule(torch.Tensor.type, X * 5, "torch.LongTensor")


def test_complex_parts() -> None:
    for func in (torch.real, torch.imag, torch.conj, torch.view_as_real, torch.Tensor.real.__get__):  # type: ignore[attr-defined]
        check_rule(func, C, grad=False, partial=())
        assert given(func, placed(P, S0, dtype=torch.complex64))[:2] == (P, S0)
    check_rule(torch.abs, C, grad=False)
    check_rule(torch.view_as_complex, torch.rand(5, 2, dtype=torch.float64), grad=False, partial=())
    assert given(torch.view_as_complex, placed(S1, R, shape=(6, 2))) == (S0, R)
    check_rule(torch.complex, X, Y, grad=False, partial=())
    assert given(torch.complex, placed(P, S0), placed(P, R)) == (P, S0)


@pytest.mark.parametrize("partial", [("sum",), ("avg",), ("max",), ("sum", "avg")], ids=str)
def test_what_only_writes(partial: tuple[str, ...]) -> None:
    for src in (Y, ROW, torch.tensor(1.5, dtype=torch.float64), Y.float(), I):
        for got in check_rule(torch.Tensor.copy_, X, src, partial=partial, grad=False, atol=1e-6):
            assert got.decision.output_layouts == got.decision.input_layouts[:1]
    check_rule(torch.Tensor.copy_, I, X * 5, partial=partial, grad=False)
    check_rule(torch.Tensor.zero_, X, partial=partial)
    check_rule(torch.Tensor.fill_, X, 3.0, partial=partial)
    check_rule(
        torch.Tensor.fill_, X, torch.tensor(3.0, dtype=torch.float64), partial=partial, grad=False
    )
    check_rule(torch.fill, X, 3.0, partial=partial, grad=False)


# Factories ----------------------------------------------------------------------------------------


def test_factories() -> None:
    for func in (torch.zeros_like, torch.ones_like):
        check_rule(func, X, grad=False, partial=("sum", "max"))
        check_rule(func, X, dtype=torch.int32, grad=False)
    check_rule(torch.full_like, X, 3, grad=False)
    for func in (torch.Tensor.new_zeros, torch.Tensor.new_ones):
        check_rule(func, X, (5, 6), grad=False)
        check_rule(func, X, 4, 2, grad=False)
        check_rule(func, X, size=(5, 6), grad=False, dtype=torch.int64)
        check_rule(func, X, (), grad=False)
    check_rule(torch.Tensor.new_full, X, (5, 6), 2.0, grad=False)
    check_rule(torch.Tensor.new_full, X, size=(3,), fill_value=2.0, grad=False)
    check_rule(torch.Tensor.new_tensor, X, [[1.0, 2.0]], grad=False)
    check_rule(torch.Tensor.new, X, [1.0, 2.0], grad=False)


def test_factories_lie_as_their_model() -> None:
    assert given(torch.zeros_like, placed(S0, R)) == (S0, R)
    assert wanted(torch.ones_like, placed(P, S1)) == ((P, S1),)
    assert given(torch.ones_like, placed(P, S1)) == (R, S1)
    assert given(torch.Tensor.new_empty, placed(S0, R), (5, 6)) == (S0, R)
    assert given(torch.Tensor.new_zeros, placed(S0, P), (5, 6)) == (S0, R)
    assert given(torch.Tensor.new_zeros, placed(S0, R), (5, 7)) == (R, R)
    assert given(torch.Tensor.new, placed(S0, R), 5, 7) == (R, R)


# Where a Partial flows ----------------------------------------------------------------------------


@pytest.mark.parametrize("pending", [P, AVG], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        (torch.neg,), (torch.mul, 2), (torch.mul, 2.0), (torch.div, 2), (torch.Tensor.float,),
        (torch.Tensor.double,),
        (torch.Tensor.to, torch.bfloat16), (torch.Tensor.cpu,), (torch.Tensor.mul_, -5),
        (torch.Tensor.zero_,),
        (torch.Tensor.__truediv__, 2), (torch.Tensor.__rmul__, 2), (torch.Tensor.fill_, 1.0),
    ],
    ids=called,
)  # fmt: skip
def test_linear_functions_keep_a_pending_sum(call: Any, pending: Any) -> None:
    func, *rest = call
    assert given(func, placed(pending, S0), *rest) == (pending, S0)


@pytest.mark.parametrize(
    "call",
    [
        (torch.add, 3), (torch.sub, 3.0), (torch.Tensor.__rsub__, 2), (torch.Tensor.__rdiv__, 2),
        (torch.pow, 2),
        (torch.Tensor.__rpow__, 2), (torch.abs,), (torch.relu,), (torch.square,), (torch.sign,),
        (torch.nan_to_num,),
        (torch.Tensor.int,), (torch.Tensor.bool,), (torch.Tensor.to, torch.int32), (torch.round,),
        (torch.clamp, 0),
        (torch.div, 2, "floor"), (torch.eq, 2), (torch.isnan,),
        (torch.Tensor.to, torch.float8_e5m2),
    ],
    ids=called,
)  # fmt: skip
def test_other_functions_reduce_it_first(call: Any) -> None:
    func, *rest = call
    kwargs = {"rounding_mode": rest.pop()} if "floor" in rest else {}
    assert wanted(func, placed(P, S0), *rest, **kwargs) == ((R, S0),)
    assert given(func, placed(P, S0), *rest, **kwargs) == (R, S0)


def test_a_cast_from_integers_keeps_the_sum_exact() -> None:
    assert given(torch.Tensor.float, placed(P, R, dtype=torch.int64)) == (R, R)


def test_comparing_two_partials_reduces_both() -> None:
    minus_five, two = placed(P, R), placed(P, R)
    assert wanted(torch.eq, minus_five, two) == ((R, R), (R, R))
    check_rule(torch.Tensor.__eq__, -5 * X, 2 * X, layouts=[[P, R], [P, R]])


def test_a_pending_maximum_never_flows_through_arithmetic() -> None:
    for call in ((torch.neg,), (torch.mul, -5), (torch.add, 1), (torch.div, -2)):
        assert given(call[0], placed(MAX, R), *call[1:]) == (R, R)
    assert given(torch.positive, placed(MAX, R)) == (MAX, R)


def test_a_sum_of_partials_is_partial_and_a_product_is_not() -> None:
    assert given(torch.add, placed(P, R), placed(P, R)) == (P, R)
    assert wanted(torch.mul, placed(P, R), placed(P, R)).count((P, R)) == 1
    assert given(torch.mul, placed(P, R), placed(R, R)) == (P, R)
    assert given(torch.div, placed(R, R), placed(P, R)) == (R, R)
    assert given(torch.div, placed(P, R), placed(R, R)) == (R, R)  # it may be zero
    assert given(torch.addcdiv, placed(P, R), placed(P, R), placed(R, R)) == (R, R)
    assert given(torch.add, placed(P, R), placed(AVG, R)) == (R, R)


@pytest.mark.parametrize(
    "func",
    [torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_, torch.Tensor.copy_],
    ids=lambda f: f.__name__,
)
def test_the_target_keeps_its_placement(func: Any) -> None:
    for target in ((R, R), (S0, R), (S1, S0)):
        for other in ((S0, R), (R, S1), (P, R), (R, R)):
            assert given(func, placed(*target), placed(*other)) == target
            assert wanted(func, placed(*target), placed(*other))[0] == target


def test_what_a_partial_target_cannot_do_is_left_to_a_copy() -> None:
    assert check_rule(torch.Tensor.clamp_, X, 0.2, layouts=[[P, R]]) == []
    assert check_rule(torch.Tensor.add_, X, 3.0, layouts=[[P, R]]) == []
    (got,) = check_rule(torch.Tensor.add_, X, Y, layouts=[[P, R], [S0, R]])
    assert got.outputs(2) == ((P, R),)


# Every name ---------------------------------------------------------------------------------------


OPERATORS = """
x + 1; 1 + x; x - 1; 1 - x; x * 2; 2 * x; x / 2; 2 / x; x // 2; 2 // x; x % 2; 2 % x; x ** 2; 2 ** x
-x; +x; abs(x); x == 1; x != 1; x < 1; x <= 1; x > 1; x >= 1; 1 == x; 1 < x; 1 >= x; ~i
i & i; 1 & i; i | 1; 1 | i; i ^ 1; 1 ^ i; i << 1; 1 << i; i >> 1; 1 >> i
x += 1; x -= 1; x *= 2; x /= 2; x //= 2; x %= 2; x **= 2; i &= i; i |= 1; i ^= 1; i <<= 1; i >>= 1
""".strip().replace("\n", ";")


def test_what_operators_call_has_a_rule() -> None:
    seen: list[Any] = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    for text in OPERATORS.split(";"):
        x: Any = torch.rand(3).as_subclass(Logged)
        i: Any = torch.arange(1, 4).as_subclass(Logged)
        exec(text.strip(), {"x": x, "i": i})
    assert len(seen) == len(OPERATORS.split(";"))
    assert [f for f in seen if f not in RULES] == []


def test_functions_whose_names_say_that_they_write_have_rules_that_do() -> None:
    names = {getattr(f, "__name__", ""): rule for f, rule in RULES.items()}
    writing = {n for n in names if n.endswith("_") and not n.endswith("__")}
    assert writing and {n for n in writing if not names[n].inplace} == set()
