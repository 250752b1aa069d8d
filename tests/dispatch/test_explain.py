"""What explain says of a call is what the call then does."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor import Replicate, Shard, errors
from disttensor.dispatch import dispatch
from disttensor.dispatch.key import key_of
from ops import Arg, Factors, letters
from ops.notation import notation
from tests.support import oracle
from tests.support.pool import on_ranks

S0, S1, R, P = Shard(0), Shard(1), Replicate(), dt.Partial()
T = torch.Tensor


def tensors(mesh):
    x = dt.shard_tensor(torch.randn(5, 6), mesh, [S0])
    w = dt.shard_tensor(torch.randn(6, 7), mesh, [S1]).requires_grad_()
    p = dt.from_local(torch.randn(5, 6), mesh, [P])
    return x, w, p


CASES = {
    "as it is": lambda x, w, p: (torch.relu, x),
    "one operand moves": lambda x, w, p: (torch.matmul, x, w),
    "a pending sum": lambda x, w, p: (torch.exp, p),
    "whole dim, by an alias": lambda x, w, p: (torch.topk, x.mT.contiguous(), 2),
    "in place": lambda x, w, p: (T.add_, x.clone(), p),
    "several results": lambda x, w, p: (torch.split, p, 2, 1),
    "a list": lambda x, w, p: (torch.cat, [x, x], 0),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_bytes_and_placements_are_those_of_the_call(case):
    mesh = dt.ProcessMesh([0, 1], ("x",))
    func, *args = CASES[case](*tensors(mesh))
    with dt.debugging.record_comms() as log:
        said = dt.debugging.explain(func, *args)
    assert said.way == "rule"
    assert not log, "explaining communicated"
    with dt.debugging.record_comms() as log, torch.no_grad():
        outs = oracle.tensors_in(func(*args))
    # of uneven pieces it says what the first rank sends, which holds most
    assert (
        log.total_bytes == said.bytes if mesh.coordinate == (0,) else log.total_bytes <= said.bytes
    )
    assert [o.spec.layout for o in outs] == [s.layout for s in said.gives]
    assert [tuple(o.shape) for o in outs] == [tuple(s.shape) for s in said.gives]


@on_ranks(2)
def test_a_call_is_printed_whole():
    mesh = dt.ProcessMesh([0, 1], ("x",))
    _, w, _ = tensors(mesh)
    x = dt.shard_tensor(torch.randn(11, 6), mesh, [S0])
    lines = str(dt.debugging.explain(torch.matmul, x, w)).splitlines()
    assert lines == [
        "torch.matmul: by rule",
        "  letters  m k, k n -> m n   k: sum",
        "  argument 0: f32[11@x, 6]",
        "  argument 1: f32[6, 7@x] is wanted as f32[6, 7]",
        "    all_gather over x: f32[6, 7@x] -> f32[6, 7] (96 bytes)",
        "    its gradient is pending over x: each rank has the part of its own piece",
        "  result 0: f32[11@x, 7]",
        "  sends 96 bytes per rank before it runs",
    ]


@on_ranks(2)
def test_what_does_not_go_by_a_rule_says_why():
    mesh = dt.ProcessMesh([0, 1], ("x",))
    x, _, p = tensors(mesh)
    assert dt.debugging.explain(torch.equal, x, x).way == "direct"
    body = dt.debugging.explain(F.multi_head_attention_forward, x)
    assert (body.way, body.bytes) == ("body", None)
    gathers = dt.debugging.explain(torch.histc, x)
    assert gathers.way == "gather"
    assert "no rule" in str(gathers)
    with warnings.catch_warnings(), dt.debugging.record_comms() as log:
        warnings.simplefilter("ignore", dt.errors.FallbackWarning)
        torch.histc(x)
    assert gathers.bytes == log.total_bytes > 0
    with pytest.raises(TypeError, match="no argument is a DistTensor"):
        dt.debugging.explain(torch.add, torch.ones(2), 1)
    out = dt.zeros(5, 6, mesh=mesh)
    assert "out=" in str(dt.debugging.explain(torch.add, x, 1, out=out))
    written = dt.debugging.explain(T.exp_, p)
    assert written.way == "gather"


@on_ranks(2)
def test_the_plan_is_the_one_that_the_call_runs():
    mesh = dt.ProcessMesh([0, 1], ("x",))
    off_mesh = dt.ProcessMesh([1], ("y",))
    for x in (tensors(mesh)[0], dt.ones(4, 3, mesh=off_mesh)):
        for func, args in ((torch.add, (x, x)), (T.view, (x, -1)), (T.mul_, (x, 2.0))):
            found = dt.debugging.explain(func, *args).plan
            func(*args)
            key = func, *[key_of(a) if not isinstance(a, T) else a.spec for a in args]
            kept = dispatch.PLANS[key]
            assert found == replace(kept, is_checked=found.is_checked), (found, kept)
    assert dt.debugging.explain(torch.histc, x).plan is None


@on_ranks(2)
def test_a_fallback_names_the_line_once():
    mesh = dt.ProcessMesh([0, 1], ("x",))
    x, _, _ = tensors(mesh)
    errors.warned.discard(
        ("torch", "torch.histc")
    )  # another test of this process may have called it
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.histc(x)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert re.search(r"torch.histc at .*test_explain.py:\d+", str(seen[0].message))


def test_notation():
    x = Arg((4, 6))
    plain = letters("m k, k n -> m n", x, Arg((6, 5)), reduced={"k": "sum"})
    assert notation(plain) == "m k, k n -> m n   k: sum"
    assert notation(plain.replace(unsplittable=frozenset("k"))) == "m k, k n -> m n   whole: k"
    view = Factors(((0,),), ((0, 1),), {0: 4, 1: 2}, divisible_only=frozenset({0}))
    assert notation(view) == "a -> a b   even: a"
    merged = Factors(((0, 1),), (((0, 1),),), {0: 4, 1: 2})
    assert notation(merged) == "a b -> (a b)   whole: b"
    assert notation(Factors(((0, None),), ((),), {0: 4})) == "a _ -> []   whole: a"
    assert notation(plain.replace(per_item=((plain, (0, 1)),))).startswith("each on its own: m k")
