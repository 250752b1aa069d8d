"""One call in several forms: by position and by name, with integers of other classes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import disttensor as dt
import ops
from disttensor import Replicate, Shard
from ops.signatures import form_of
from tests.support.oracle import fallbacks, line, randint, randn
from tests.support.pool import on_ranks
from tests.support.structure import replace_tensors, tensors_in

X, Y, Z = randn(6, 4, seed=1), randn(6, 4, seed=2), randn(6, 4, seed=3)
ODDS, SIGNS, CLASSES = X.sigmoid(), Y.sign(), randint(0, 4, (6,))

# Each row: a function, and calls of it that are equal.
FORMS: list[tuple[Any, ...]] = [
    (torch.randint_like, ((X, 2, 5), {}), ((X, 2), {"high": 5}), ((X,), {"high": 5, "low": 2}),
     ((X, 2), {"requires_grad": False, "high": 5})),
    (torch.randint_like, ((X, 5), {}), ((X,), {"high": 5}), ((), {"high": 5, "input": X})),
    (Tensor.random_, ((X, 2, 5), {}), ((X, 2), {"to": 5}), ((X,), {"to": 5, "from": 2})),
    (Tensor.random_, ((X, 5), {}), ((X,), {"to": 5})),
    (Tensor.random_, ((X.to(torch.int8), 3, None), {}), ((X.to(torch.int8), 3), {"to": None})),
    (Tensor.uniform_, ((X, 0.0, 3.0), {}), ((X,), {"to": 3.0}), ((X,), {"to": 3.0, "from": 0.0})),
    (Tensor.normal_, ((X, 0.0, 2.0), {}), ((X,), {"std": 2.0})),
    (Tensor.bernoulli_, ((X, 0.25), {}), ((X,), {"p": 0.25})),
    (F.dropout, ((X, 0.5, False), {}), ((X,), {"training": False})),
    (F.dropout, ((X, 0.25), {}), ((X,), {"training": True, "p": 0.25})),
    (torch.dropout, ((X, 0.5, False), {}), ((X,), {"train": False, "p": 0.5})),
    (F.alpha_dropout, ((X,), {}), ((X, 0.5, False), {}), ((), {"input": X})),
    (F.mse_loss, ((X, Y, None, None, "sum"), {}), ((X, Y), {"reduction": "sum"})),
    (F.mse_loss, ((X, Y, None, None, "none", ODDS), {}),
     ((X,), {"weight": ODDS, "reduction": "none", "target": Y})),
    (F.huber_loss, ((X, Y, "mean", 2.0), {}), ((X, Y), {"delta": 2.0})),
    (F.hinge_embedding_loss, ((X, SIGNS, 0.5), {}), ((X, SIGNS), {"margin": 0.5})),
    (F.binary_cross_entropy, ((ODDS, ODDS, ODDS, None, None, "sum"), {}),
     ((ODDS,), {"reduction": "sum", "weight": ODDS, "target": ODDS})),
    (F.multi_margin_loss, ((X, CLASSES, 2, 0.5), {}), ((X, CLASSES), {"margin": 0.5, "p": 2})),
    (F.triplet_margin_loss, ((X, Y, Z, 2.0), {}), ((X, Y), {"margin": 2.0, "negative": Z})),
    (F.gaussian_nll_loss, ((X, Y, ODDS, True), {}), ((X, Y, ODDS), {"full": True})),
    (torch.stft, ((X, 4, 2, 4, torch.ones(4).double(), True, "constant", False, True, True), {}),
     ((X, 4), {"window": torch.ones(4).double(), "hop_length": 2, "win_length": 4, "center": True,
               "pad_mode": "constant", "return_complex": True})),
    (torch.clamp, ((X, None, 0), {}), ((X,), {"max": 0})),
    (torch.sum, ((X, 1, True), {}), ((X,), {"keepdims": True, "axis": 1})),
    (Tensor.new_full, ((X, (6, 4), 2.0), {}), ((X,), {"fill_value": 2.0, "size": (6, 4)})),
    (torch.addcmul, ((X, Y, Z), {"value": 2}),
     ((), {"tensor2": Z, "tensor1": Y, "value": 2, "input": X})),
    (torch.where, ((X > 0, Y, Z), {}), ((), {"other": Z, "condition": X > 0, "input": Y})),
]  # fmt: skip


def whole(value: Any) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, dt.DistTensor) else t for t in tensors_in(value)]


@on_ranks(2)
def test_all_forms_of_a_call_give_the_same() -> None:
    mesh = line()

    def run(func: Any, call: Any, layout: Any) -> list[Tensor]:
        args, words = replace_tensors(call, lambda t: dt.shard_tensor(t.clone(), mesh, [layout]))
        torch.manual_seed(1)
        return whole(func(*args, **words))

    for func, *calls in FORMS:
        for layout in (Shard(0), Replicate()):
            with fallbacks() as fell:
                first, *others = [run(func, call, layout) for call in calls * 2]  # then by plan
            assert not fell, (func, fell)
            for call, other in zip(calls[1:] + calls, others, strict=True):
                for a, b in zip(first, other, strict=True):
                    assert torch.equal(a, b) and a.dtype == b.dtype, (func, call)
    low = run(torch.randint_like, ((X, 2), {"high": 5}), Shard(0))[0]
    assert (low >= 2).all() and (low < 5).all() and (low == 4).any()
    low = run(Tensor.random_, ((X.to(torch.int8), 100, None), {}), Shard(0))[0]
    assert (low >= 100).all()
    assert torch.equal(run(F.alpha_dropout, ((X,), {}), Shard(0))[0], X)


# Functions of a dim, or of other integers
NAMES = """sum mean amax max argmax prod any all std var var_mean median logsumexp softmax squeeze
count_nonzero nansum nanmean cumsum cumprod unbind mode unsqueeze amin logcumsumexp cummax"""
WITH_INTEGERS: dict[str, Any] = {
    **{name: lambda x, n, name=name: getattr(torch, name)(x, n) for name in NAMES.split()},
    "dims in a tuple": lambda x, n: x.sum((n, 0)),
    "dims in a list": lambda x, n: x.mean([0, n]),
    "a dim by name": lambda x, n: x.amax(dim=n),
    "dims of flip": lambda x, n: x.flip(n),
    "vector_norm": lambda x, n: torch.linalg.vector_norm(x, n, n),
    "norm": lambda x, n: x.norm(2, n),
    "normalize": lambda x, n: F.normalize(x, dim=n),
    "transpose": lambda x, n: x.transpose(0, n),
    "permute": lambda x, n: x.permute(n, 0),
    "select": lambda x, n: x.select(n, n),
    "index": lambda x, n: x[:, n],
    "slice": lambda x, n: x[:, n:],
    "two indices": lambda x, n: x[n, n],
    "narrow": lambda x, n: x.narrow(n, n, n),
    "view": lambda x, n: x.view(n, -1),
    "reshape": lambda x, n: x.reshape((n, -1)),
    "expand": lambda x, n: x.unsqueeze(0).expand(n, -1, -1),
    "repeat": lambda x, n: x.repeat(n, n),
    "split": lambda x, n: x.split(n, n),
    "chunk": lambda x, n: x.chunk(n, n),
    "cat": lambda x, n: torch.cat([x, x], n),
    "stack": lambda x, n: torch.stack([x, x], n),
    "topk": lambda x, n: x.topk(n),
    "diff": lambda x, n: x.diff(n, n),
    "roll": lambda x, n: x.roll(n, n),
    "pad": lambda x, n: F.pad(x, (n, n)),
    "sort": lambda x, n: x.sort(n),
    "tril": lambda x, n: x.tril(n),
    "new_zeros": lambda x, n: x.new_zeros(n, n),
    "new_tensor": lambda x, n: x.new_tensor([n, n]),
    "layer_norm": lambda x, n: F.layer_norm(x, (n * 4,)),
    "mul": lambda x, n: x * n,
    "pow": lambda x, n: x**n,
    "add": lambda x, n: x.add(x, alpha=n),
    "setitem": lambda x, n: x.__setitem__(n, n),
    "one_hot": lambda x, n: F.one_hot((x > 0).long(), n * 2),
    "glu": lambda x, n: F.glu(x, n),
    "tensordot": lambda x, n: torch.tensordot(x, x.T, n),
    "gather": lambda x, n: x.gather(n, (x > 0).long()),
    "full_like": lambda x, n: torch.full_like(x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "foreach": lambda x, n: torch._foreach_mul([x, x], n),
}


class Index:
    """An integer of another class, which torch accepts in the same places."""

    def __index__(self) -> int:
        return 1


@on_ranks(2)
def test_an_integer_of_numpy_is_an_integer() -> None:
    mesh = line()
    for layout in (Shard(0), Replicate()):
        for name, func in WITH_INTEGERS.items():
            want = tensors_in(func(X.clone(), 1))
            for n in (np.int64(1), np.uint8(1)):
                with fallbacks() as fell:
                    got = whole(func(dt.shard_tensor(X.clone(), mesh, [layout]), n))
                assert not fell, (name, fell)
                assert len(got) == len(want), name
                for a, b in zip(got, want, strict=True):
                    assert a.dtype == b.dtype, (name, n)
                    torch.testing.assert_close(a, b, msg=f"{name} {n!r}")
    x = dt.shard_tensor(X, mesh, [Shard(0)])
    assert torch.equal(x.sum(Index()).full_tensor(), X.sum(1))
    with pytest.raises(TypeError):
        x.sum(np.float64(1))
    with fallbacks():
        assert x[np.array([1, 0])].full_tensor().equal(X[[1, 0]])


def test_the_place_of_each_argument_in_the_one_form() -> None:
    """Each order is a permutation, and the form of a form is itself."""
    for func, *calls in FORMS:
        for args, words in calls:
            form = form_of(func, args, words)
            n = len(args) + len(words)
            assert form.order is None or sorted(form.order) == [*range(n)], func
            assert form_of(func, form.args, form.kwargs).order is None, (func, words)


def is_number(value: ast.AST) -> bool:
    """Returns True for the code of a number: ``1.0 / n``, ``-1``, ``math.sqrt(n)``, ``len(x)``."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).startswith(("math.", "len", "max", "min", "int", "float"))
    return isinstance(value, (ast.UnaryOp, ast.BinOp)) and not isinstance(
        getattr(value, "op", None), (ast.Not, ast.BitOr, ast.BitAnd, ast.Mult, ast.Mod)
    )


def test_no_number_gets_its_default_by_or() -> None:
    """``scale or 1.0`` takes scale=0.0 for a missing one."""
    found = []
    for file in Path(ops.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
                found += [f"{file.name}:{node.lineno}"] * is_number(node.values[-1])
    assert not found, found


@on_ranks(2)
def test_a_scale_of_zero_is_a_scale() -> None:
    q = randn(2, 4, 6, 3)
    for p in (0.0, 1e-9):
        x = dt.shard_tensor(q, line(), [Shard(0)])
        got = F.scaled_dot_product_attention(x, x, x, dropout_p=p, scale=0.0)
        want = q.mean(2, keepdim=True).expand_as(q)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-6, atol=1e-6)
    assert x.to(torch.complex128).conj().is_conj()
    assert torch.is_conj(x.to(torch.complex128).conj()) and not x.is_conj()
    assert x.to(torch.complex128).conj().imag.is_neg() and not torch.is_neg(x)
