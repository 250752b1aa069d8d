"""Every rule in all forms of a call: each split in arguments by position and by name, numbers of
NumPy and 0-d tensors, one tensor several times, ``out=``.

Torch's own parser says which forms there are: what it refuses on plain tensors is no case.
"""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor import Replicate, Shard
from ops.registry import RULES
from ops.signatures import chosen, form_of
from tests.opinfo.kept import KILLS
from tests.opinfo.opinfo_call import close, seed
from tests.opinfo.opinfo_check import OPS, UNSET, common_methods_invocations, unseeded
from tests.support.oracle import fallbacks, mesh_of_world, replace_tensors, tensors_in
from tests.support.part import part
from tests.support.pool import on_ranks

# What draws numbers has other ones in each call.
DRAWS = "bernoulli cauchy exponential geometric log_normal normal uniform random dropout rrelu rand"


def forms_of(func, args, kwargs):
    """(name, args, kwargs) of other forms of a call."""
    said = chosen(func, args, kwargs)
    first = type(func).__name__ == "method_descriptor"  # of a method the tensor has no name
    if said is not None and len(args) <= len(said.names):
        for n in range(first, len(args)):
            items = [*zip(said.names[n:], args[n:], strict=False), *kwargs.items()]
            yield f"{n} by position", args[:n], dict(items)
            yield f"{n} by position, names last first", args[:n], dict(reversed(items))
    form = form_of(func, args, kwargs)
    if form.order is not None:
        yield "the one form", tuple(form.args), form.kwargs
    for name, of in (("NumPy", of_numpy), ("0-d tensors", of_tensors)):
        other = (tuple(map(of, args)), {k: of(v) for k, v in kwargs.items()})
        if repr(other) != repr((tuple(args), kwargs)):
            yield f"numbers of {name}", *other
    tensors = tensors_in((args, kwargs))
    if len(tensors) > 1:
        one = replace_tensors((args, kwargs), lambda t: tensors[0])
        yield "one tensor several times", *one


def of_numpy(value):
    if isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        return type(value)(map(np.int64, value))
    kinds = {int: np.int64, float: np.float64}
    return kinds[type(value)](value) if type(value) in kinds else value


def of_tensors(value):
    return torch.tensor(value) if type(value) in (int, float) else value


def calls_of(op):
    """(function, name of the form, call) for each form of the op's functions that have a rule."""
    samples = [
        ((s.input, *s.args), dict(s.kwargs))
        for s in itertools.islice(op.sample_inputs("cpu", torch.float32), 4)
    ]
    most = max(samples, key=lambda call: len(call[0]) + len(call[1]), default=((), {}))
    for func in (op.op, op.method_variant, op.inplace_variant):
        for name, *call in forms_of(func, *most) if func in RULES else ():
            yield func, name, call
    if op.op in RULES and op.supports_out:
        yield op.op, "out=", most


def copies(call):
    return replace_tensors(call, torch.clone)


def layout(t):
    return [Shard(0) if t.ndim else Replicate()]


def placed(call, mesh):
    return replace_tensors(copies(call), lambda t: dt.shard_tensor(t, mesh, layout(t)))


def problem_of(func, name, call, mesh):
    """ "" where it gives what plain torch gives; None where that refuses the call."""

    def run(call):
        args, kwargs = call
        seed(1)
        outs = {"out": replace_tensors(empty, torch.clone)} if name == "out=" else {}
        with torch.no_grad():
            result = func(*args, **kwargs, **outs)
        return tensors_in(outs or result)

    try:
        empty = None
        if name == "out=":
            with torch.no_grad():
                args, kwargs = copies(call)
                empty = replace_tensors(func(*args, **kwargs), torch.zeros_like)
        want = run(copies(call))
    except Exception:
        return None
    if name == "one tensor several times":
        tensors = []

        def once(t):
            tensors[:] = tensors or [dt.shard_tensor(t.clone(), mesh, layout(t))]
            return tensors[0]

        call = replace_tensors(call, once)
    else:
        call = placed(call, mesh)
    try:
        got = [t.full_tensor() if isinstance(t, dt.DistTensor) else t for t in run(call)]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    same = [a.shape for a in got] == [b.shape for b in want]
    if (
        same
        and not UNSET.search(func.__name__)
        and not any(d in func.__name__ for d in DRAWS.split())
    ):
        same = all(a.dtype == b.dtype and close(a, b) for a, b in zip(got, want, strict=True))
    return "" if same else "other values"


@on_ranks(2, timeout=240)
@pytest.mark.limit(300)
def test_every_rule_gives_the_same_in_every_form():
    mesh, covered, failed = mesh_of_world(), set(), []
    with (
        warnings.catch_warnings(),
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded),
        fallbacks(),
    ):
        warnings.simplefilter("ignore")
        for name, op in part(sorted(OPS.items()), len(OPS) // 24):
            if name in KILLS or torch.float32 not in op.supported_dtypes("cpu"):
                continue
            for func, form, call in calls_of(op):
                problem = problem_of(func, form, call, mesh)
                if problem is not None:
                    covered.add(func)
                if problem:
                    failed.append(f"{name} {func!r} {form}: {problem}")
    assert not failed, "\n".join(failed)
    assert len(covered) > 15, len(covered)


def test_the_names_and_the_order_of_torch():
    """A pure look at the form itself."""
    a, b, c = "abc"
    form = form_of(torch.baddbmm, [], {"batch2": c, "beta": 2, "batch1": b, "input": a})
    assert form == ([a, b, c], {"beta": 2}, (3, 2, 0, 1))
    form = form_of(torch.Tensor.sum, [a], {"keepdims": True, "axis": 1})
    assert form == ([a, 1, True], {}, (0, 2, 1))
    form = form_of(F.layer_norm, [a, (4,)], {"eps": 1, "bias": b})
    assert form == ([a, (4,)], {"bias": b, "eps": 1}, (0, 1, 3, 2))
    assert form_of(F.layer_norm, [a, (4,)], {"bias": b, "eps": 1}).order is None
    assert form_of(torch.cosine_similarity, [], {"x2": b, "x1": a}) == ([a, b], {}, (1, 0))
    assert form_of(torch.Tensor.var, [a], {"unbiased": False}) == ([a, False], {}, (0, 1))
    form = form_of(torch.randint_like, [a, 2], {"requires_grad": False, "high": 5})
    assert form == ([a, 2, 5], {"requires_grad": False}, (0, 1, 3, 2))


CALLS = {
    torch.baddbmm: ("input batch1 batch2", (2, 3, 3), (2, 3, 3), (2, 3, 3)),
    torch.addbmm: ("input batch1 batch2", (3, 3), (2, 3, 3), (2, 3, 3)),
    torch.addmm: ("input mat1 mat2", (3, 3), (3, 3), (3, 3)),
    torch.addmv: ("input mat vec", (3,), (3, 3), (3,)),
    torch.addr: ("input vec1 vec2", (3, 3), (3,), (3,)),
    torch.bmm: ("input mat2", (2, 3, 3), (2, 3, 3)),
    torch.mv: ("input vec", (3, 3), (3,)),
    torch.dot: ("input tensor", (3,), (3,)),
    torch.outer: ("input vec2", (3,), (3,)),
    torch.matmul: ("input other", (3, 3), (3, 3)),
    torch.sub: ("a other", (3, 3), (3, 3)),
    torch.max: ("input other", (3, 3), (3, 3)),
    torch.min: ("input other", (3, 3), (3, 3)),
    torch.cosine_similarity: ("x1 x2", (3, 3), (3, 3)),
    F.cosine_similarity: ("x1 x2", (3, 3), (3, 3)),
    torch.trapezoid: ("y x", (3, 3), (3, 3)),
    torch.linalg.vecdot: ("x y", (3, 3), (3, 3)),
    F.linear: ("input weight bias", (3, 3), (3, 3), (3,)),
    F.layer_norm: ("input weight bias", (3, 3), (3,), (3,), {"normalized_shape": (3,)}),
    torch.transpose: ("input", (3, 2), {"dim1": 1, "dim0": 0}),
    torch.swapaxes: ("input", (3, 2), {"axis1": 1, "axis0": 0}),
    torch.softmax: ("x", (3, 3), {"axis": 0}),
    torch.sum: ("x", (3, 3), {"keepdims": True, "axis": 0}),
}


def three():
    return torch.tensor(3)


# With a 0-d tensor where torch wants a number, alone or in a list.
NUMBERS = {
    "view": lambda x, n: x.view(2, torch.div(n * 4, 4, rounding_mode="trunc"), 2),
    "view of a list": lambda x, n: x.view([2, n, -1]),
    "reshape": lambda x, n: x.reshape(n, -1),
    "expand": lambda x, n: x[:1].expand(n, -1),
    "repeat": lambda x, n: x.repeat(n, 1),
    "split": lambda x, n: x.split(n, 1),
    "torch.split": lambda x, n: torch.split(x, (n, 6 - n, 0), dim=n - 2),
    "chunk": lambda x, n: x.chunk(n, dim=1),
    "unsqueeze": lambda x, n: x.unsqueeze(n - 2),
    "sum": lambda x, n: x.sum(n - 2),
    "softmax": lambda x, n: F.softmax(x, n - 2),
    "norm": lambda x, n: x.norm(n, 1),
    "cat": lambda x, n: torch.cat([x, x], dim=n - 2),
    "roll": lambda x, n: x.roll(n, n - 2),
    "transpose": lambda x, n: x.transpose(n - 3, n - 2),
    "select": lambda x, n: x.select(n - 2, n),
    "index": lambda x, n: x[:, n],
    "slice": lambda x, n: x[..., n - 2 : n],
    "one_hot": lambda x, n: F.one_hot(x.long().clamp(0, 2), n),
    "one_hot by name": lambda x, n: F.one_hot(x.long().clamp(0, 2), num_classes=n),
    "pad": lambda x, n: F.pad(x, (n - 1, 0)),
    "layer_norm": lambda x, n: F.layer_norm(x, [n * 2]),
    "max_pool1d": lambda x, n: F.max_pool1d(x, n),
    "new_zeros": lambda x, n: x.new_zeros(n, 2),
    "topk": lambda x, n: x.topk(n).values,
    "unflatten": lambda x, n: x.unflatten(1, (n, 2)),
    "add": lambda x, n: x.add(x, alpha=n),
    "max": lambda x, n: x.max(n - 2, True),
    "min by name": lambda x, n: torch.min(x, keepdim=True, dim=n - 2),
}


@on_ranks(2)
def test_calls_of_torch_by_its_names_and_with_tensors_for_numbers():
    mesh = mesh_of_world()
    for func, (names, *rest) in CALLS.items():
        words = rest.pop() if isinstance(rest[-1], dict) else {}
        seed(1)
        given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in rest]
        want = func(**dict(zip(names.split(), given, strict=True)), **words)
        dist = [dt.shard_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_() for t in given]
        named = dict(reversed([*zip(names.split(), dist, strict=True), *words.items()]))
        got = func(**named)
        assert close(got.detach().full_tensor(), want.detach()), (func, got, want)
        got.square().sum().backward()
        want.square().sum().backward()
        for mine, plain in zip(dist, given, strict=True):
            assert close(mine.grad.full_tensor(), plain.grad), func
    x = torch.randn(2, 6)
    for name, func in NUMBERS.items():
        want = tensors_in(func(x, 3))
        for n in (three(), dt.shard_tensor(three(), mesh, [Replicate()])):
            with fallbacks() as fell:
                got = tensors_in(func(dt.shard_tensor(x, mesh, [Shard(0)]), n))
            assert not fell, (name, fell)
            assert [t.shape for t in got] == [t.shape for t in want], name
            assert all(close(a.full_tensor(), b) for a, b in zip(got, want, strict=True)), name
    # The value is no part of a plan: the next call of the kind has another one.
    for n in (2, 3, 6):
        y = dt.shard_tensor(x, mesh, [Shard(0)])
        assert y.view(2, torch.tensor(n), -1).shape == (2, n, 6 // n)
        assert y[:, : torch.tensor(n)].shape == (2, n)
