"""Every family of functions on real ranks, against the plain function: values, gradients,
placements, replicas.

Each line of a table runs in many layouts (R, S(d), P, and plain tensors), on 2 ranks and on 2x2,
uneven; a failing line is named with its layouts. To add a function, add a line.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from disttensor import Partial, Replicate, Shard
from tests.support.oracle import Case, case, check_cases, randint, randn
from tests.support.part import EVERYTHING, part
from tests.support.pool import on_ranks

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)

A, B = randn(5, 3, seed=1), randn(5, 3, seed=2)
ROW, COL, ONE = randn(3, seed=3), randn(5, 1, seed=4), randn(seed=5)
POS = randn(5, 3, seed=6).abs() + 0.5
CUBE = randn(3, 5, 4, seed=7)
IMG = randn(3, 6, 7, 5, seed=8)
INT = randint(-4, 9, (5, 3))
MASK = randn(5, 3, seed=9) > 0
LONG = randn(7, seed=10)
FLOAT32 = randn(5, 3, seed=11, dtype=torch.float32)


def of(name: str, *args: object, **options: object) -> Case:
    """A function of torch, F or Tensor by its name."""
    places = (F, torch, Tensor, torch.linalg, torch.special)
    found = [getattr(p, name) for p in places if hasattr(p, name)]
    assert found, name
    func = found[0]
    return case(name, func, *args, **options)


UNARY = [
    "abs", "neg", "exp", "sin", "cos", "tanh", "sigmoid", "relu", "gelu", "silu", "softplus", "erf",
    "square", "sign", "floor", "round",
    "ceil", "trunc", "frac", "atan", "sinh", "cosh", "asinh", "expm1", "exp2", "elu", "selu",
    "celu", "leaky_relu", "hardtanh",
    "hardswish", "hardsigmoid", "mish", "relu6", "softsign", "logsigmoid", "tanhshrink",
    "softshrink", "hardshrink", "isnan",
    "isfinite", "isinf", "signbit", "nan_to_num", "sinc", "deg2rad", "positive", "clone",
    "logical_not", "erfc", "i0",
]  # fmt: skip
BINARY = [
    "add", "sub", "mul", "div", "maximum", "minimum", "atan2", "fmod", "remainder", "hypot",
    "copysign", "fmax", "fmin", "eq", "ne",
    "lt", "le", "gt", "ge", "logaddexp", "logical_and", "logical_or", "logical_xor", "isclose",
    "true_divide",
    "rsub", "float_power",
]  # fmt: skip

POINTWISE = [
    *(of(n, A) for n in UNARY), of("sgn", A, grad=False), of("floor_divide", A, POS, grad=False),
    *(of(n, POS) for n in ("log", "sqrt", "rsqrt", "log2", "log1p", "reciprocal", "lgamma",
        "digamma", "log10", "entr")),
    *(of(n, A, POS) for n in BINARY),
    *(of(n, A, POS[0], most=8) for n in ("add", "sub", "mul", "div", "maximum", "eq")),
    of("pow", POS, B),
    of("add", A, COL), of("mul", COL, ROW), of("sub", ROW, COL), of("add", A, ONE),
    of("mul", ONE, A), of("div", ROW, ONE.abs() + 1),
    case("alpha", lambda x, y: torch.add(x, y, alpha=2.5), A, B),
    case("sub alpha", lambda x, y: x.sub(y, alpha=3), A, B),
    case("x + 3", lambda x: x + 3, A), case("3 - x", lambda x: 3 - x, A),
    case("x * -5", lambda x: x * -5.0, A), case("2 / x", lambda x: 2 / x, POS),
    case("x / 4", lambda x: x / 4, A), case("x ** 2", lambda x: x**2, A),
    case("2 ** x", lambda x: 2**x, A), case("-x", lambda x: -x, A),
    case("x % 2", lambda x: x % 2, A), case("x // 2", lambda x: x // 2, A, grad=False),
    case("abs", lambda x: abs(x), A), case("x > 0", lambda x: x > 0, A),
    case("1 + 2x - x", lambda x: 1 + 2 * x - x, A),
    case("x*y+z", lambda x, y, z: x * y + z, A, B, ROW), case("x - x", lambda x: x - x, A),
    case("x * x", lambda x: x * x, A), case("x + x.T.T", lambda x: x + x.T.T, A),
    case("~m", lambda m: ~m, MASK), case("m & m", lambda m, n: m & n, MASK, A > B),
    case("m | i", lambda m, n: m | n, MASK, A > B), case("m ^ n", lambda m, n: m ^ n, MASK, A > B),
    case("i << 1", lambda i: i << 1, INT),
    case("i + 1", lambda i: i + 1, INT), case("i * 2", lambda i: i * 2, INT),
    case("i / 2", lambda i: i / 2, INT), case("i * x", lambda i, x: i * x, INT, A),
    case("i + 1.5", lambda i: i + 1.5, INT),
    case("f32 + f64 0-d", lambda x, y: x + y, FLOAT32, ONE),
    case("f32 + f64", lambda x, y: x + y, FLOAT32, A, rtol=1e-5, atol=1e-5),
    of("clamp", A, -0.5, 0.7), case("clamp min", lambda x: x.clamp(min=0.1), A),
    of("clamp", A, B - 1, B + 1), of("clip", A, 0.0), of("clamp_min", A, 0.2),
    of("clamp_max", A, 0.2),
    of("where", MASK, A, B), of("where", A > 0, A, 0.0), of("where", MASK, ROW, COL),
    of("lerp", A, B, 0.3), of("lerp", A, B, POS),
    of("addcmul", A, B, POS, value=0.5), of("addcdiv", A, B, POS, value=0.5),
    of("addcmul", ROW, COL, ONE), of("threshold", A, 0.1, 2.0), of("xlogy", A, POS),
    of("ldexp", A, INT), of("heaviside", A, B, grad=False), of("nextafter", A, B, grad=False),
    of("gcd", INT, INT + 3), of("bitwise_and", INT, INT + 1), of("prelu", A, ROW.abs()),
    of("polygamma", 1, POS), of("logit", torch.sigmoid(A)), of("mvlgamma", POS + 3, 2),
    of("softmin", A, 1), of("glu", randn(5, 6), 1), of("glu", randn(6, 3), 0),
    of("frexp", A, grad=False),
    of("zeros_like", A), of("ones_like", A), of("full_like", A, 3.0),
    case("new_zeros", lambda x: x.new_zeros(2, 3), A),
    case("new_full", lambda x: x.new_full((3,), 2.0), A),
]  # fmt: skip

MATMUL = [
    of("mm", A, randn(3, 4)), of("matmul", A, randn(3, 4)), of("matmul", A, ROW),
    of("matmul", ROW, randn(3, 4)), of("matmul", ROW, randn(3, seed=8)),
    of("matmul", CUBE, randn(4, 5)), of("matmul", CUBE, randn(3, 4, 2)),
    of("matmul", randn(2, 1, 5, 4), CUBE.mT), of("matmul", A, randn(2, 3, 4)),
    of("bmm", CUBE, randn(3, 4, 5)),
    case("@", lambda x, y: x @ y, A, randn(3, 4)), case("x @ x.T", lambda x: x @ x.T, A),
    case("x.T @ x", lambda x: x.T @ x, A),
    of("linear", A, randn(4, 3), randn(4)), of("linear", A, randn(4, 3)),
    of("linear", CUBE, randn(6, 4), randn(6)), of("linear", ROW, randn(4, 3), randn(4)),
    of("linear", A, ROW),
    of("addmm", randn(4), A, randn(3, 4)),
    of("addmm", randn(5, 4), A, randn(3, 4), beta=0.5, alpha=2.0),
    of("addmm", randn(5, 1), A, randn(3, 4)),
    of("baddbmm", randn(3, 5, 5), CUBE, randn(3, 4, 5)),
    of("baddbmm", randn(5), CUBE, randn(3, 4, 5), beta=2), of("mv", A, ROW),
    of("dot", LONG, randn(7, seed=2)), of("outer", LONG, ROW),
    of("addmv", randn(5), A, ROW), of("addr", A, randn(5), ROW), of("inner", A, B),
    of("vdot", LONG, randn(7, seed=2)), of("ger", LONG, ROW),
    of("addbmm", randn(5, 5), CUBE, randn(3, 4, 5)),
    of("einsum", "ij,kj->ik", A, B), of("einsum", "bij,bkj->bik", CUBE, randn(3, 2, 4)),
    of("einsum", "ij->ji", A), of("einsum", "ij->", A), of("einsum", "ii->i", randn(5, 5)),
    of("einsum", "bhqd,bhkd->bhqk", randn(2, 3, 5, 4), randn(2, 3, 6, 4)),
    of("einsum", "i,j,ijk->k", randn(3), randn(5), CUBE),
    of("einsum", "...i,ij", CUBE, randn(4, 3)), of("einsum", "ij,ij->j", A, B),
    of("tensordot", CUBE, randn(5, 4, 2), 2), of("tensordot", A, B, ([0], [0])),
    of("bilinear", A, randn(5, 4), randn(2, 3, 4), randn(2)), of("cosine_similarity", A, B),
    of("cosine_similarity", A, B, 0),
    of("vecdot", A, B), of("multi_dot", [A, randn(3, 4), randn(4, 2)], may_fall_back=True, most=6),
    of("kron", A, randn(2, 2), may_fall_back=True, most=4),
    of("cdist", A, B, may_fall_back=True, most=4),
    case("f32 mm", torch.mm, FLOAT32, randn(3, 4, dtype=torch.float32)),
    case("cross", lambda x, y: torch.linalg.cross(x, y), A, B, may_fall_back=True, most=4),
    of("matrix_power", randn(5, 5), 2, may_fall_back=True, most=4),
    of("trace", randn(5, 5), may_fall_back=True, most=6),
    of("det", randn(4, 4), may_fall_back=True, most=4),
]  # fmt: skip

REDUCTIONS = [
    *(of(n, A, *dims) for n in ("sum", "mean", "prod", "amax", "amin", "var", "std", "logsumexp",
        "norm", "nansum", "nanmean") for dims in ((0,), (1,))),
    *(of(n, A) for n in ("sum", "mean", "prod", "max", "min", "amax", "amin", "var", "std", "norm",
        "median", "nansum", "var_mean", "std_mean", "aminmax")),
    *(of(n, A, d) for n in ("max", "min", "argmax", "argmin", "median", "mode") for d in (0, 1)),
    *(of(n, A) for n in ("argmax", "argmin", "count_nonzero")),
    *(of(n, MASK, *dims) for n in ("any", "all") for dims in ((), (0,), (1,))),
    *(of(n, A) for n in ("any", "all")), of("sum", MASK), of("sum", INT), of("sum", INT, 0),
    of("prod", INT, 1), of("max", INT, 0), of("amax", INT, 1),
    of("sum", A, (0, 1)), of("sum", A, 1, keepdim=True), of("mean", A, 0, keepdim=True),
    of("sum", CUBE, (0, 2)), of("mean", CUBE, (1, 2)), of("amax", CUBE, (0, 1)),
    of("logsumexp", CUBE, (0, 2)), of("var", CUBE, (1, 2), unbiased=False),
    of("var", A, 0, correction=0), of("std", A, 1, keepdim=True),
    of("sum", A, 0, dtype=torch.float32), of("mean", FLOAT32, 0, dtype=torch.float64),
    of("std_mean", A, 1), of("var_mean", CUBE, 1),
    of("sum", ONE), of("mean", ONE), of("max", LONG), of("sum", LONG, 0), of("mean", LONG),
    of("norm", LONG),
    *(of("vector_norm", A, p) for p in (2, 1, 3.5, float("inf"), -float("inf"), 0)),
    *(of("vector_norm", A, p, 1) for p in (2, 1, float("inf"), 3)),
    *(of("vector_norm", A, p, 0) for p in (2, 1, float("inf"), -float("inf"))),
    of("norm", A, 1), of("norm", A, float("inf"), 0), of("norm", A, "fro"),
    of("norm", A, 3, 1, True), case("x.norm(p=2, dim=0)", lambda x: x.norm(p=2, dim=0), A),
    of("matrix_norm", A, may_fall_back=True, most=8), of("normalize", A, dim=0),
    of("normalize", A, dim=1), of("renorm", A, 2, 0, 1.0, may_fall_back=True, most=4),
    of("dist", A, B, may_fall_back=True, most=6),
    of("pairwise_distance", A, B, may_fall_back=True, most=4), of("cumsum", A, 0),
    of("cumsum", A, 1), of("cumprod", A, 0), of("cummax", A, 0), of("cummin", A, 1),
    of("logcumsumexp", A, 0), of("cumsum", INT, 0), of("diff", A, may_fall_back=True, most=6),
    of("trapezoid", A, may_fall_back=True, most=4),
    of("histc", A, 4, grad=False, may_fall_back=True, most=4),
    of("bincount", randint(0, 5, (7,)), may_fall_back=True, most=4),
    of("quantile", A, 0.3, 0, most=6), of("nanmedian", A, 1, most=6), of("kthvalue", A, 2, 1),
    of("kthvalue", A, 2, 0),
    of("topk", A, 2, 1), of("topk", A, 2, 0), of("topk", LONG, 3), of("topk", A, 2, 1, False),
    of("sort", A, 0), of("sort", A, 1, True), of("argsort", A, 0), of("msort", A), of("sort", LONG),
    of("softmax", A, 0), of("softmax", A, 1), of("log_softmax", A, 0), of("log_softmax", A, 1),
    of("softmax", CUBE, 1),
    case("softmax dtype", lambda x: torch.softmax(x, 1, dtype=torch.float64), FLOAT32),
    case("x.softmax(-1)", lambda x: x.softmax(-1), CUBE), of("logsumexp", LONG, 0),
    of("equal", A, B, grad=False, may_fall_back=True),
    of("allclose", A, A, grad=False, may_fall_back=True),
    case("x.max().item()", lambda x: x.max().item(), A, grad=False),
    case("argmax axis", lambda x: x.argmax(axis=0), A),
    case("sum axis keepdims", lambda x: x.sum(axis=0, keepdims=True), A),
]  # fmt: skip

EVEN = randn(4, 6, seed=21)
VIEWS = [
    of("view", CUBE, 15, 4), of("view", CUBE, -1), of("view", EVEN, 2, 2, 6),
    of("view", EVEN, 4, 2, 3), of("view", EVEN, 24), of("view", EVEN, 8, 3),
    of("reshape", A, (15,)), case("reshape 3 5", lambda x: x.reshape(3, 5), A),
    of("reshape", EVEN, (4, 3, 2)), of("reshape", EVEN.T.contiguous().T, (24,)),
    of("flatten", CUBE), of("flatten", CUBE, 1), of("flatten", IMG, 0, 1),
    of("unflatten", EVEN, 1, (2, 3)), of("unflatten", EVEN, 0, (2, -1)), of("unsqueeze", A, 0),
    of("unsqueeze", A, -1), of("squeeze", COL), of("squeeze", COL, 1),
    of("squeeze", randn(1, 3, 1), 0),
    of("transpose", CUBE, 0, 2), of("t", A), of("permute", CUBE, (2, 0, 1)),
    case("permute varargs", lambda x: x.permute(1, 2, 0), CUBE), case(".T", lambda x: x.T, A),
    case(".mT", lambda x: x.mT, CUBE), of("movedim", CUBE, 0, 2), of("swapaxes", CUBE, 0, 1),
    of("expand", COL, 5, 4), of("expand", ROW, 2, 3), of("expand", ONE, 2, 2),
    of("expand", COL, -1, 6),
    of("expand_as", COL, A), of("broadcast_to", ROW, (5, 3)), of("repeat", A, 2, 1),
    of("repeat", A, 2, 3), of("repeat", ROW, 4, 1), of("tile", A, (2,)),
    of("repeat_interleave", A, 2, 0), of("repeat_interleave", A, 2),
    of("repeat_interleave", A, torch.tensor([1, 2, 0, 1, 3]), 0, may_fall_back=True, most=5),
    of("ravel", A),
    case("view then mul", lambda x: x.view(2, 2, 6) * 2, EVEN), of("view_as", EVEN, randn(6, 4)),
    of("diagonal", A), of("diag", A), of("diag", LONG), of("diag_embed", A), of("tril", A),
    of("triu", A, 1), of("tril", CUBE, -1), of("roll", A, 1, 0), of("roll", A, (1, -2), (0, 1)),
    of("roll", A, 2), of("flip", A, (0,)), of("flip", A, (0, 1)), of("rot90", A), of("fliplr", A),
    of("flipud", A),
    of("cat", [A, B]), of("cat", [A, randn(2, 3)]), of("cat", [A, B], 1), of("cat", [A, COL], 1),
    of("cat", [A, B, A * 2], 1), of("cat", [CUBE, CUBE], 2), of("stack", [A, B]),
    of("stack", [A, B], 1), of("stack", [A, B], 2), of("hstack", [A, B]), of("vstack", [A, B]),
    of("cat", [LONG, LONG[:2]]), of("concat", [A, A]), of("cat", [A, INT], 0),
    of("stack", [ONE, ONE]), of("column_stack", [A, B], most=6),
    of("split", A, 2), of("split", A, 2, 1), of("split", A, [1, 4]), of("split", EVEN, 3, 1),
    of("split", A, [1, 2], 1), of("chunk", EVEN, 2, 1), of("chunk", A, 2), of("chunk", A, 3, 0),
    of("unbind", A), of("unbind", A, 1), of("tensor_split", A, 2), of("tensor_split", LONG, (2, 5)),
    of("unsafe_chunk", EVEN, 2), case("qkv", lambda x: sum(x.chunk(3, -1)), EVEN),
    case("swiglu", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], EVEN),
    of("contiguous", A.T), case("T.contiguous", lambda x: x.T.contiguous(), A),
    of("pad", A, (1, 1)), of("pad", A, (0, 0, 1, 2)),
    of("pad", IMG, (1, 1, 1, 1), mode="reflect", may_fall_back=True, most=5),
    case("unfold", lambda x: x.unfold(0, 3, 2), LONG),
    of("block_diag", A, B, may_fall_back=True, most=3), of("meshgrid", LONG, ROW, indexing="ij"),
    of("cartesian_prod", LONG, ROW, may_fall_back=True, most=3),
    of("atleast_2d", LONG, most=4, may_fall_back=True),
    of("narrow", A, 0, 1, 3), of("narrow", A, 1, 0, 2), of("select", A, 0, 2),
    of("select", A, 1, -1), of("select", CUBE, 1, 4),
    case("heads", lambda x: x.view(3, 5, 2, 2).transpose(1, 2), CUBE),
    case("heads back", lambda x: x.transpose(1, 2).reshape(2, 5, 12), randn(2, 4, 5, 3)),
    case("merge split", lambda x: x.reshape(8, 3).reshape(4, 6), EVEN),
]  # fmt: skip

INDEX = [
    *(case(f"x[{n}]", f, A) for n, f in { "0": lambda x: x[0], "-1": lambda x: x[-1],
        "1:3": lambda x: x[1:3], "::2": lambda x: x[::2], ":, 1": lambda x: x[:, 1],
        ":, :2": lambda x: x[:, :2], "..., 0": lambda x: x[..., 0], "None": lambda x: x[None],
        ":, None": lambda x: x[:, None], "2, 1": lambda x: x[2, 1], "1:, 1:": lambda x: x[1:, 1:],
        "()": lambda x: x[()], "...": lambda x: x[...], ":": lambda x: x[:], "5:": lambda x: x[5:],
        "[0, 3, 3]": lambda x: x[[0, 3, 3]], "[0,1],[2,0]": lambda x: x[[0, 1], [2, 0]],
        ":, [2, 0]": lambda x: x[:, [2, 0]], "-2:": lambda x: x[-2:], ":-1": lambda x: x[:-1],
        "1::3, ::2": lambda x: x[1::3, ::2], "shift": lambda x: x[1:] - x[:-1],
        "rotate half": lambda x: torch.cat([-x[..., 1:], x[..., :1]], -1), }.items()),
    case("x[i]", lambda x, i: x[i], A, torch.tensor([4, 0, 0])),
    case("x[i2]", lambda x, i: x[i], A, torch.tensor([[4, 0], [1, 1]])),
    case("x[:, i]", lambda x, i: x[:, i], A, torch.tensor([2, 0])),
    case("x[i, j]", lambda x, i, j: x[i, j], A, torch.tensor([4, 0]), torch.tensor([2, 1])),
    case("x[-i]", lambda x, i: x[i], A, torch.tensor([-1, -5])),
    case("x[mask]", lambda x, m: x[m], A, MASK, may_fall_back=True, most=6),
    case("x[row mask]", lambda x, m: x[m], A, MASK[:, 0], may_fall_back=True, most=6),
    case("x[bytes]", lambda x, m: x[m.byte()], A, MASK, may_fall_back=True, most=2),
    case("x[:, bytes]", lambda x, m: x[:, m.byte()], A, MASK[0], may_fall_back=True, most=2),
    of("masked_select", A, MASK, may_fall_back=True, most=6),
    of("nonzero", A, grad=False, may_fall_back=True, most=4),
    of("unique", INT, may_fall_back=True, most=4),
    of("index_select", A, 0, torch.tensor([4, 0, 4])),
    of("index_select", A, 1, torch.tensor([2, 0])), of("gather", A, 0, randint(0, 5, (4, 3))),
    of("gather", A, 1, randint(0, 3, (5, 2))), of("gather", CUBE, 1, randint(0, 5, (3, 2, 4))),
    of("take_along_dim", A, randint(0, 3, (5, 1)), 1),
    of("take", A, torch.tensor([0, 14, 7]), most=8), of("masked_fill", A, MASK, 0.5),
    of("masked_fill", A, MASK[0], 0.5),
    of("masked_fill", CUBE, randn(5, 4) > 0, float("-inf"), grad=False),
    of("masked_fill", A, MASK, ONE), of("scatter", A, 0, randint(0, 5, (2, 3)), B[:2]),
    of("scatter", A, 1, randint(0, 3, (5, 2)), 1.5),
    of("scatter_add", A, 0, randint(0, 5, (4, 3)), B[:4]),
    of("scatter_add", A, 1, randint(0, 3, (5, 3)), B),
    of("index_add", A, 0, torch.tensor([0, 3, 3]), B[:3], most=20),
    of("index_fill", A, 1, torch.tensor([0, 2]), 0.3),
    of("index_copy", A, 0, torch.tensor([1, 4]), B[:2]),
    of("index_put", A, (torch.tensor([0, 3]),), B[:2]),
    of("masked_scatter", A, MASK, B, may_fall_back=True, most=5),
    of("select_scatter", A, ROW, 0, 2), of("slice_scatter", A, B[:2], 0, 1, 3),
    of("scatter_reduce", A, 0, randint(0, 5, (4, 3)), B, "amax", most=6, grad=False),
    of("one_hot", randint(0, 4, (5,)), 4),
    of("isin", INT, torch.tensor([1, 2]), may_fall_back=True, most=4),
    of("bucketize", A, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), may_fall_back=True,
        grad=False, most=4),
    of("searchsorted", torch.arange(5.0, dtype=torch.float64), LONG, may_fall_back=True, grad=False,
        most=4),
    of("embedding", randint(0, 7, (5, 3)), randn(7, 4), most=30),
    of("embedding", randint(0, 7, (5,)), randn(7, 4), padding_idx=2),
    of("embedding", randint(0, 5, (3, 2)), A),
    of("embedding_bag", randint(0, 7, (5, 3)), randn(7, 4), may_fall_back=True, most=5),
    of("tril", randn(5, 5)),
    of("put", A, torch.tensor([1, 7]), LONG[:2], may_fall_back=True, most=4),
]  # fmt: skip

CLASS, POSW = (
    torch.tensor([1.0, 2, 0.5, 0, 3, 1], dtype=torch.float64),
    torch.tensor([2.0, 0.5, 1], dtype=torch.float64),
)
T5 = randint(0, 6, (5,), seed=3)
LOGITS = randn(5, 6, seed=30)
SEQ, TSEQ = randn(2, 6, 5, seed=31), randint(0, 6, (2, 5), seed=4)
WITH_IGNORED = torch.tensor([0, -100, 3, 5, -100])
Q, K, V = randn(2, 4, 5, 6, seed=40), randn(2, 4, 7, 6, seed=41), randn(2, 4, 7, 6, seed=42)
MODEL = [
    *(of("cross_entropy", LOGITS, T5, reduction=r, most=30) for r in ("mean", "sum", "none")),
    *(of("cross_entropy", LOGITS, WITH_IGNORED, reduction=r, most=20) for r in ("mean", "none")),
    of("cross_entropy", LOGITS, T5, label_smoothing=0.2),
    of("cross_entropy", LOGITS, T5, weight=CLASS, frozen=[1, 2]),
    of("cross_entropy", LOGITS, WITH_IGNORED, weight=CLASS, frozen=[1, 2], label_smoothing=0.1),
    of("cross_entropy", LOGITS, torch.softmax(randn(5, 6, seed=5), 1)),
    of("cross_entropy", SEQ, TSEQ, most=20), of("cross_entropy", SEQ, TSEQ, reduction="none"),
    of("cross_entropy", LOGITS, T5, ignore_index=3),
    of("cross_entropy", LONG[:6], torch.tensor(2), most=6),
    of("nll_loss", torch.log_softmax(LOGITS, 1), T5),
    of("nll_loss", LOGITS, WITH_IGNORED, reduction="sum"),
    of("nll_loss", LOGITS, T5, weight=CLASS, frozen=[1, 2]), of("nll_loss", SEQ, TSEQ),
    *(of(n, A, B, reduction=r) for n in ("mse_loss", "l1_loss", "smooth_l1_loss",
        "huber_loss") for r in ("mean", "sum", "none")),
    of("binary_cross_entropy", torch.sigmoid(A), torch.sigmoid(B)),
    of("binary_cross_entropy_with_logits", A, torch.sigmoid(B)),
    of("binary_cross_entropy_with_logits", A, torch.sigmoid(B), pos_weight=POSW, frozen=[2]),
    of("kl_div", A, torch.softmax(B, 1), reduction="batchmean"),
    of("kl_div", A, torch.softmax(B, 1), reduction="sum"), of("poisson_nll_loss", A, POS),
    of("gaussian_nll_loss", A, B, POS), of("hinge_embedding_loss", A, A.sign(), frozen=[1]),
    of("soft_margin_loss", A, B.sign(), frozen=[1]),
    of("margin_ranking_loss", LONG, randn(7, seed=3), LONG.sign(), frozen=[2]),
    of("triplet_margin_loss", A, B, POS),
    of("cosine_embedding_loss", A, B, torch.tensor([1, -1, 1, 1, -1])),
    of("multi_margin_loss", LOGITS, T5), of("smooth_l1_loss", A, B, beta=0.3),
    of("ctc_loss", torch.log_softmax(randn(6, 2, 4), 2), torch.tensor([[1, 2], [3, 1]]),
        torch.tensor([6, 6]), torch.tensor([2, 2])),
    of("layer_norm", A, (3,), ROW, ROW + 1), of("layer_norm", A, (3,)),
    of("layer_norm", CUBE, (5, 4), randn(5, 4), randn(5, 4, seed=2)),
    of("layer_norm", CUBE, (4,), randn(4), randn(4, seed=3), most=20),
    of("layer_norm", CUBE, (4,), randn(4)), of("rms_norm", CUBE, (4,), randn(4)),
    of("rms_norm", A, (3,)), of("group_norm", IMG, 2, randn(6), randn(6, seed=1)),
    of("group_norm", IMG, 3), of("instance_norm", IMG, may_fall_back=True, most=6),
    of("batch_norm", IMG, None, None, randn(6), randn(6, seed=1), True, most=8),
    of("batch_norm", IMG, randn(6).abs(), randn(6, seed=9).abs() + 1, randn(6), randn(6, seed=1),
        most=6, grad=False),
    of("local_response_norm", IMG, 2, may_fall_back=True, most=3),
    of("scaled_dot_product_attention", Q, K, V, most=25),
    of("scaled_dot_product_attention", Q, Q * 0.5, Q - 1, is_causal=True, most=25),
    of("scaled_dot_product_attention", Q, K, V, randn(5, 7)),
    of("scaled_dot_product_attention", Q, K, V, randn(2, 1, 5, 7) > -0.5),
    of("scaled_dot_product_attention", Q[0], K[0], V[0], scale=0.2),
    of("scaled_dot_product_attention", Q, K[:, :2], V[:, :2], enable_gqa=True),
    of("conv1d", randn(3, 4, 9), randn(5, 4, 3), randn(5), padding=1),
    of("conv1d", randn(3, 4, 9), randn(5, 4, 3)),
    of("conv1d", randn(3, 4, 9), randn(6, 2, 3), randn(6), groups=2),
    of("conv2d", IMG, randn(4, 6, 3, 3), randn(4), padding=1, most=15),
    of("conv2d", IMG, randn(4, 6, 3, 3), None, 2),
    of("conv2d", IMG, randn(6, 1, 3, 3), randn(6), groups=6, padding=1),
    of("conv_transpose2d", IMG, randn(6, 4, 3, 3), may_fall_back=True, most=4),
    of("max_pool2d", IMG, 2, may_fall_back=True), of("avg_pool2d", IMG, 2, may_fall_back=True),
    of("adaptive_avg_pool2d", IMG, 1, may_fall_back=True),
    of("interpolate", IMG, scale_factor=2, may_fall_back=True, most=4),
    of("pixel_shuffle", randn(2, 4, 3, 3), 2, may_fall_back=True, most=3),
    of("conv3d", randn(2, 3, 4, 4, 4), randn(4, 3, 2, 2, 2), may_fall_back=True, most=4),
    of("dropout", A, 0.5, False), of("dropout", A, 0.0),
    case("attention by hand", lambda q, k, v: torch.softmax((q @ k.mT) / 3 + torch.full((5, 7),
        -1.0, dtype=q.dtype), -1) @ v, Q, K, V, most=16),
    case("mlp", lambda x, w, b, v: F.linear(F.gelu(F.linear(x, w, b)), v), A, randn(6, 3), randn(6),
        randn(4, 6), most=25),
    case("causal mask", lambda x: (x @ x.mT).masked_fill(torch.ones(5, 5).triu(1).bool(),
        float("-inf")).softmax(-1), CUBE, most=12),
    case("rms by hand", lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        CUBE, randn(4)),
    case("var norm by hand", lambda x: (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt(), A),
]  # fmt: skip

INPLACE = [
    *(case(n, f, A, B, inplace=True) for n, f in {"add_": lambda x, y: x.add_(y), "sub_": lambda x,
        y: x.sub_(y), "mul_": lambda x, y: x.mul_(y), "div_": lambda x, y: x.div_(y),
        "copy_": lambda x, y: x.copy_(y), "+=": lambda x, y: x.__iadd__(y), "*=": lambda x,
        y: x.__imul__(y), "add_ alpha": lambda x, y: x.add_(y, alpha=-2), "lerp_": lambda x,
        y: x.lerp_(y, 0.25)}.items()),
    *(case(n, f, A, inplace=True) for n, f in {"mul_ 2": lambda x: x.mul_(2),
        "add_ 1": lambda x: x.add_(1), "zero_": lambda x: x.zero_(),
        "fill_": lambda x: x.fill_(2.5), "relu_": lambda x: x.relu_(),
        "clamp_": lambda x: x.clamp_(-0.1, 0.3), "exp_": lambda x: x.exp_(),
        "neg_": lambda x: x.neg_(), "tanh_": lambda x: x.tanh_(), "tril_": lambda x: x.tril_(),
        "F.relu": lambda x: F.relu(x, inplace=True), "div_ 3": lambda x: x.div_(3),
        "sigmoid_": lambda x: x.sigmoid_(), "pow_": lambda x: x.pow_(2),
        "cumsum_": lambda x: x.cumsum_(0), "clamp_min_": lambda x: x.clamp_min_(0)}.items()),
    case("add_ row", lambda x, y: x.add_(y), A, ROW, inplace=True),
    case("mul_ col", lambda x, y: x.mul_(y), A, COL, inplace=True),
    case("addcmul_", lambda x, y, z: x.addcmul_(y, z, value=0.5), A, B, POS, inplace=True),
    case("addcdiv_", lambda x, y, z: x.addcdiv_(y, z), A, B, POS, inplace=True),
    case("addmm_", lambda x, y, z: x.addmm_(y, z), A, randn(5, 4), randn(4, 3), inplace=True),
    case("masked_fill_", lambda x, m: x.masked_fill_(m, 0.5), A, MASK, inplace=True),
    case("index_add_", lambda x, i, y: x.index_add_(0, i, y), A, torch.tensor([0, 3]), B[:2],
        inplace=True),
    case("scatter_", lambda x, i, y: x.scatter_(1, i, y), A, randint(0, 3, (5, 2)), B[:, :2],
        inplace=True),
    case("index_fill_", lambda x, i: x.index_fill_(0, i, 1.5), A, torch.tensor([1]), inplace=True),
    case("int add_", lambda x, y: x.add_(y), INT, INT + 1, inplace=True),
    case("mask &=", lambda x, y: x.logical_and_(y), MASK, A > B, inplace=True),
    case("bool copy_", lambda x, y: x.copy_(y), MASK, A > B, inplace=True),
    case("copy_ cast", lambda x, y: x.copy_(y), A, FLOAT32, inplace=True),
    case("copy_ broadcast", lambda x, y: x.copy_(y), A, ROW, inplace=True),
    case("int copy_ of float", lambda x, y: x.copy_(y), INT, A * 5, inplace=True, grad=False),
    case("x[1] = y", lambda x, y: (x.__setitem__(1, y), x)[1], A, ROW, inplace=True),
    case("x[:, 1:] = 0", lambda x: (x.__setitem__((slice(None), slice(1, None)), 0.0), x)[1], A,
        inplace=True),
    case("x[mask] = 0", lambda x, m: (x.__setitem__(m, 0.5), x)[1], A, MASK, inplace=True,
        may_fall_back=True, most=8),
    case("x[i] = y", lambda x, i, y: (x.__setitem__(i, y), x)[1], A, torch.tensor([0, 4]), B[:2],
        inplace=True, may_fall_back=True, most=8),
    case("x[2:4] = y", lambda x, y: (x.__setitem__(slice(2, 4), y), x)[1], A, B[:2], inplace=True),
]  # fmt: skip

CASTS = [
    *(case(f"to {d}", lambda x, d=d: x.to(d), A, most=10) for d in (torch.float32, torch.float64,
        torch.int64, torch.int32, torch.bool, torch.bfloat16)),
    *(case(n, f, A) for n, f in {"float": lambda x: x.float(), "long": lambda x: x.long(),
        "bool": lambda x: x.bool(), "int": lambda x: x.int(), "half": lambda x: x.half(),
        "double": lambda x: x.double(), "type": lambda x: x.type(torch.float32),
        "to cpu": lambda x: x.to("cpu"), "to other": lambda x: x.to(torch.zeros(1)),
        "to kw": lambda x: x.to(dtype=torch.float32),
        "type_as": lambda x: x.type_as(torch.zeros(1)), "detach": lambda x: x.detach(),
        "data": lambda x: x.data, }.items()),
    case("round trip", lambda x: x.float().double() * 2, A, rtol=1e-5, atol=1e-5),
    *(case(n, f, INT) for n, f in {"int float": lambda x: x.float(), "int bool": lambda x: x.bool(),
        "int double": lambda x: x.double(), "int uint8": lambda x: x.abs().to(torch.uint8),
        "int8": lambda x: x.to(torch.int8)}.items()),
    case("mask float", lambda m: m.float(), MASK),
    case("mask long sum", lambda m: m.long().sum(), MASK),
    case("mask * x", lambda m, x: m * x, MASK, A), case("5x to int", lambda x: (5 * x).long(), A),
    case("complex", lambda x, y: torch.complex(x, y).abs(), A, B, most=8),
    case("view_as_complex", lambda x: torch.view_as_real(torch.view_as_complex(x) * (1 + 2j)),
        randn(5, 3, 2), most=8),
]  # fmt: skip

EMPTY = [
    case("2 rows of 3", lambda x: (x.sum(0), x.mean(), x.amax(), x.var(), x.norm(), x.logsumexp(0),
        x.max(0), x.argmax(), x.prod(0)), randn(2, 3)),
    case("1 row", lambda x: (x.sum(), x.max(), x.softmax(0), x.cumsum(0), x.amin(0)), randn(1, 3)),
    case("0 rows", lambda x: (x.sum(0), x * 2, x.T, x.sum(), x.mean(1)), randn(0, 3)),
    case("0 rows mm", lambda x, w: x @ w, randn(0, 3), randn(3, 4)),
    case("0 inner mm", lambda x, w: x @ w, randn(2, 0), randn(0, 4)),
    case("0 rows cat", lambda x, y: torch.cat([x, y]), randn(0, 3), A),
    case("1 row cat", lambda x, y: torch.cat([x, y]), randn(1, 3), A),
    case("1 row mm", lambda x, w: F.linear(x, w), randn(1, 3), randn(1, 3, seed=4)),
    case("1 row norm", lambda x, w: F.layer_norm(x, (3,), w), randn(1, 3), ROW),
    case("1 row loss", lambda x, t: F.cross_entropy(x, t), randn(1, 3), torch.tensor([2])),
    case("1 embedding", lambda i, w: F.embedding(i, w), torch.tensor([0, 2, 1]), randn(3, 1)),
    case("topk of 1", lambda x: x.topk(1, 0), randn(1, 3)),
    case("sort of 1", lambda x: x.sort(0), randn(1, 3)),
    case("0-d", lambda y: (y + y, y * 2, y.sum(), y.exp(), y.view(1), y.expand(3), y.reshape(1, 1),
        y.max(), y.mean(), y.softmax(0)), ONE),
    case("any/all of 0 rows", lambda m: (m.any(), m.all(), m.any(0), m.all(0)), MASK[:0]),
    case("3 of 4", lambda x, y: (x * y, x @ y, x.outer(y), torch.stack([x, y]), torch.cat([x, y])),
        randn(3), randn(3, seed=2)),
    case("1 conv", lambda x, w: F.conv1d(x, w), randn(1, 1, 5), randn(1, 1, 3)),
    case("1 sdpa", lambda q: F.scaled_dot_product_attention(q, q, q), randn(1, 1, 3, 4)),
    case("1 split", lambda x: (*x.split(1), *x.split(2, 1), *x.chunk(2)), randn(1, 3)),
    case("1 index", lambda x: (x[0], x[:, 1], x[0:1], x[[0, 0]]), randn(1, 3)),
    case("1 gather", lambda x, i: x.gather(0, i), randn(1, 3),
        torch.tensor([[0, 0, 0], [0, 0, 0]])),
]  # fmt: skip

FAMILIES = {
    "pointwise": POINTWISE, "matmul": MATMUL, "reductions": REDUCTIONS, "views": VIEWS,
    "index": INDEX, "model": MODEL, "inplace": INPLACE,
    "casts": CASTS, "empty": EMPTY,
}  # fmt: skip
PARTS = {
    f"{name} {i // 45}": cases[i : i + 45]
    for name, cases in FAMILIES.items()
    for i in range(0, len(cases), 45)
}
# A run takes all: some on 2x2 ranks, the others on two.
ON_GRID = part(PARTS, len(PARTS) // 8)
ON_TWO = [name for name in PARTS if EVERYTHING or name not in ON_GRID]


@pytest.mark.feature("Rules")
@on_ranks(2, timeout=240)
@pytest.mark.parametrize("name", ON_TWO)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_on_2_ranks(name):
    check_cases(PARTS[name], most=8)


@on_ranks(4, timeout=240)
@pytest.mark.parametrize("name", ON_GRID)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_on_2x2_ranks(name):
    check_cases(PARTS[name], most=4)
