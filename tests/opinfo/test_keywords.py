"""Every rule, called by keyword only, last first; and 0-d tensors that stand for numbers.

Torch's own parser says which names there are: what it refuses on plain tensors is no case.
"""

from __future__ import annotations

import itertools
import warnings
from unittest import mock

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


def by_keyword(func, args, kwargs):
    """The call with all that may be named named, last first; None where torch says no names."""
    said = chosen(func, args, kwargs)
    if said is None or len(args) > len(said.names):
        return None
    first = type(func).__name__ == "method_descriptor"  # of a method the tensor has no name
    items = [*zip(said.names[first:], args[first:], strict=False), *kwargs.items()]
    return args[:first], dict(reversed(items))


def calls_of(op):
    """(function, the call with the most arguments) of each of its forms that has a rule."""
    samples = [
        ((s.input, *s.args), dict(s.kwargs))
        for s in itertools.islice(op.sample_inputs("cpu", torch.float32), 4)
    ]
    most = max(samples, key=lambda call: len(call[0]) + len(call[1]), default=((), {}))
    for func in (op.op, op.method_variant, op.inplace_variant):
        named = by_keyword(func, *most) if func in RULES else None
        if named is not None:
            yield func, named


def copies(call):
    return replace_tensors(call, torch.clone)


def placed(call, mesh):
    return replace_tensors(
        copies(call), lambda t: dt.shard_tensor(t, mesh, [Shard(0) if t.ndim else Replicate()])
    )


def problem_of(func, call, mesh):
    """ "" where it gives what plain torch gives; None where that refuses the call."""
    try:
        seed(1)
        args, kwargs = copies(call)
        want = tensors_in(func(*args, **kwargs))
    except Exception:
        return None
    args, kwargs = placed(call, mesh)
    seed(1)
    try:
        got = [t.full_tensor() if isinstance(t, dt.DistTensor) else t
               for t in tensors_in(func(*args, **kwargs))]  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    same = [a.shape for a in got] == [b.shape for b in want]
    if (
        same
        and not UNSET.search(func.__name__)
        and not any(d in func.__name__ for d in DRAWS.split())
    ):
        same = all(map(close, got, want))
    return "" if same else "other values"


@on_ranks(1, timeout=240)
@pytest.mark.limit(300)
def test_every_rule_takes_its_arguments_by_keyword_in_any_order():
    mesh, covered, failed = mesh_of_world(), set(), []
    with (
        warnings.catch_warnings(),
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded),
        fallbacks(),
    ):
        warnings.simplefilter("ignore")
        for name, op in part(sorted(OPS.items()), len(OPS) // 12):
            if name in KILLS or torch.float32 not in op.supported_dtypes("cpu"):
                continue
            for func, call in calls_of(op):
                problem = problem_of(func, call, mesh)
                if problem is not None:
                    covered.add(func)
                if problem:
                    failed.append(f"{name} {func!r} {[*call[1]]}: {problem}")
    assert not failed, "\n".join(failed)
    assert len(covered) > 30, len(covered)


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
