"""The warm path in C: the same results as in Python, and nothing that a C module can get wrong."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import machinery, util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import disttensor as dt
import ops
from disttensor import cache, runtime
from disttensor.autograd import activation_checkpoint, token
from disttensor.comm import compare_programs, p2p
from disttensor.core.spec import spec_of
from disttensor.dispatch import dispatch, native
from disttensor.dispatch.call_plan import CONSTANT, Answer, CallPlan, PythonCall, Read, ReadKind
from disttensor.gradients import sync
from disttensor.pipeline.micro_batch_graph import MicroBatchGraph
from disttensor.random import counter
from disttensor.tensor import versions, views
from disttensor.tensor.uses import derivation_of
from ops.answer import TensorResult
from ops.registry import RULES
from tests.support.pool import fake_world

pytestmark = pytest.mark.skipif(native.module is None, reason=f"no C code: {native.why}")

ROOT = Path(__file__).resolve().parents[2]
R, S0, P = dt.Replicate(), dt.Shard(0), dt.Partial()


@pytest.fixture
def mesh() -> Iterator[dt.ProcessMesh]:
    """2 x 4 ranks, whose communication is faked; this process is rank 0."""
    gc.collect()
    gc.freeze()  # what there is already is left out when garbage is collected, which is quick then
    with fake_world(8), native.using(True):
        yield dt.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ("dp", "tp"))


def tensor(mesh: dt.ProcessMesh, *placements: dt.Placement, grad: bool = False) -> dt.DistTensor:
    local = torch.arange(24.0).reshape(4, 6).cos()
    x = dt.from_local(local, mesh, placements or [S0, R], shape=(8, 6))
    return x.requires_grad_() if grad else x


def counted(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """The result, and what the C code counts meanwhile."""
    before = native.module.counts()
    out = call()
    after = native.module.counts()
    return out, {k: after[k] - before[k] for k in after}


def parts(value: Any) -> list[Any]:
    """All that two runs must have in common, of each tensor."""
    if isinstance(value, dt.DistTensor):
        local = value.local.detach()
        derived = derivation_of(value) is not None  # by varying uses
        numbers = [local.shape, local.stride(), local.tolist()]
        return [value.spec, value.requires_grad, derived, *numbers]
    if isinstance(value, (list, tuple)):
        return [type(value), *(part for v in value for part in parts(v))]
    return [value.tolist() if isinstance(value, Tensor) else value]


@contextmanager
def erfinv_as(local: Callable[..., Any], rematerialize: int | None = None) -> Iterator[None]:
    """Meanwhile ``local(call)`` runs on the locals of ``torch.erfinv``."""
    made = RULES[torch.erfinv]

    def other(input: Any) -> ops.Factors:
        factors = ops.pointwise_factors([input], local=local)
        return dataclasses.replace(factors, rematerialize=rematerialize)

    ops.replace_rule(torch.erfinv, ops.Rule("other", other))
    try:
        yield
    finally:
        ops.replace_rule(torch.erfinv, made)
        cache.clear_caches()


def fused_step(x: Any, y: Any) -> list[Any]:
    """What it writes to autograd does not count, DistTensors and plain tensors."""
    with torch.no_grad():
        param, average, square, step = x * 2, y * 0, y * 0, torch.ones(())
        lists = [[param], [y * 1], [average], [square], [], [step]]
        factors = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_(*lists, amsgrad=False, maximize=False, **factors)
    written = [versions.version(t) for t in (param.local, square.local, step)]
    return [param, average, step, *[n - versions.UNTRACKED[0] for n in written]]


# name -> (a call, is it carried out in C?)
CALLS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "two tensors": (torch.add, True),
    "operator": (lambda x, y: x * y, True),
    "number": (lambda x, y: x * 2.5 - 1, True),
    "bool": (lambda x, y: x + True, True),
    "keyword": (lambda x, y: torch.sum(x, dim=1, keepdim=True), True),
    "asked reshard": (lambda x, y: dt.reshard(x, x.process_mesh, [R, S0]), False),
    "reshard outside": (
        lambda x, y: dt.reshard(
            dt.zeros(2, mesh=dt.ProcessMesh([1], ("x",))), dt.ProcessMesh([2], ("x",)), [R]
        ),
        False,
    ),
    "keyword tensor": (lambda x, y: torch.where(x > 0, input=x, other=y), True),
    "string": (lambda x, y: F.gelu(x, approximate="tanh"), True),
    "dtype": (lambda x, y: x.to(torch.float64), True),
    "layer norm": (lambda x, y: F.layer_norm(x, (6,)), True),
    "view": (lambda x, y: x.unsqueeze(1).transpose(0, 1), True),
    "index": (lambda x, y: x[:, 2:4], True),
    "itself": (lambda x, y: x.contiguous(), True),
    "several": (lambda x, y: x.chunk(2, 1), True),
    "named tuple": (lambda x, y: tuple(torch.max(x, 1)), True),
    "list": (lambda x, y: torch.cat([x, y], 1), True),
    "lists": (lambda x, y: torch._foreach_add([x, y], [y, x]), True),
    "in place": (lambda x, y: x.clone().add_(y), True),
    "lists in place": (lambda x, y: torch._foreach_mul_([x.clone(), y.clone()], 2.0), True),
    "assignment": (lambda x, y: x.clone().__setitem__((slice(None), 0), 1.0), True),
    "plain tensor": (lambda x, y: x + torch.arange(6.0), False),
    "reshard": (lambda x, y: x.sum() + 1, False),
    "reshard twice": (lambda x, y: x.sum().mul(y.sum()).relu(), False),
    "reshard of one": (lambda x, y: (s := x.sum(1, True).sum(0)) * s, False),
    "reshard and dims": (lambda x, y: torch.amax(x.sum(0, True), (0, 1)), False),
    "reshard in a list": (lambda x, y: torch.stack([x.sum(), y.sum()]).relu(), False),
    "reshard by name": (lambda x, y: torch.relu(input=x.sum()), False),
    "generator": (lambda x, y: torch.add(x, y, alpha=complex(2).real), True),
    "question": (lambda x, y: torch.is_complex(x), True),
    "fused": (fused_step, True),
    "device": (lambda x, y: x.to(torch.device("cpu")), False),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_what_they_are_in_python(mesh: dt.ProcessMesh, name: str, grad: bool) -> None:
    call, in_c = CALLS[name]
    x, y = tensor(mesh, grad=grad), tensor(mesh)
    with native.using(False):
        expected = parts(call(x, y))
    call(x, y)
    out, counts = counted(lambda: call(x, y))
    assert parts(out) == expected
    assert counts["first"] == 0
    assert not in_c or counts["in_c"] == counts["known"] > counts["unsure"] == 0, counts


def test_gradients_are_those_of_python(mesh: dt.ProcessMesh) -> None:
    def train() -> list[Any]:
        torch.manual_seed(0)
        # sums alone are exchanged: what ranks that are faked would have gathered is anything
        net = nn.Sequential(
            nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        )  # fmt: skip
        plan = {"0.weight": [R, S0], "0.bias": [R, S0], "2.weight": [R, dt.Shard(1)]}
        dt.shard_module(net, mesh, plan)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            h = net(tensor(mesh))
            h.view(8, 3).transpose(0, 1).softmax(0).square().mean().backward()
            optimizer.step()
        return [part for p in net.parameters() for v in (p, p.grad) for part in parts(v)]

    with native.using(False):
        expected = train()
    train()
    got, counts = counted(train)
    assert got == expected and counts["in_c"] > 150 and counts["first"] == 0


def test_gradients_are_read_as_in_python(mesh: dt.ProcessMesh) -> None:
    """Of no use, of one, of a use that varies, of both, again, replaced, written to, and none."""

    def train() -> list[Any]:
        w = dt.from_local(torch.arange(6.0).cos(), mesh, [R, R], shape=(6,)).requires_grad_()
        found = [w.grad]
        for use in (lambda: w * 2, lambda: tensor(mesh) * w, lambda: w + tensor(mesh) * w):
            w.grad = None
            for _ in range(2):
                use().sum().backward()
                found.append(w.grad)
                assert w.grad is found[-1] and w.grad.local is found[-1].local
        w.grad = found[-1] * 2
        found.append(w.grad)
        w.grad.mul_(2)
        w.register_hook(lambda g: g * 3)
        (w * 2).sum().backward()
        found.append(w.grad)
        w.grad = None
        return [*map(parts, found), w.grad]

    with native.using(False):
        expected = train()
    assert train() == expected and len({str(part) for part in expected}) > 5


def test_a_use_in_a_list_varies(mesh: dt.ProcessMesh) -> None:
    """Its gradient is pending; where there is none, C carries the call out."""
    x = tensor(mesh)
    w = dt.from_local(torch.ones(6), mesh, [R, R], shape=(6,)).requires_grad_()

    def product() -> Any:
        return torch._foreach_mul([x], [w])[0]

    product()
    product().sum().backward()
    assert w.grad is not None and w.grad.partial_status == {0: "sum"}
    with torch.no_grad():
        assert counted(product)[1]["in_c"] == 1


def test_outside_the_mesh(mesh: dt.ProcessMesh) -> None:
    other = dt.ProcessMesh([1, 2], ("x",))
    x = dt.zeros(4, 6, mesh=other, requires_grad=True)
    y = dt.zeros(4, 6, mesh=other)

    def calls() -> list[Any]:
        made: list[Any] = [x + y, y + y, torch.add(x, other=y, alpha=2), *y.chunk(2), x @ y.t()]
        made.append(y.view(24))
        assert views.base_of(made[-1]) is y and views.base_of(made[-3]) is y
        with torch.no_grad():
            made.append(x * 2)
        with torch.autocast("cpu", torch.bfloat16):
            made.append(x @ y.t())
        return [(t.spec, t.requires_grad) for t in made]

    with native.using(False):
        expected = calls()
    calls()
    got, counts = counted(calls)
    assert got == expected and counts["in_c"] >= 6 and counts["first"] == 0


def test_calls_outside_the_mesh_draw_where_they_have_dropout(mesh: dt.ProcessMesh) -> None:
    x = dt.zeros(2, 4, 6, mesh=dt.ProcessMesh([1, 2], ("x",)))
    for p, draws in ((0.0, False), (0.5, True), (0.0, False)):
        before = counter.get_state()
        F.dropout(x, p)
        assert (counter.get_state() != before) is draws
    for words, draws in (({}, 0), ({"dropout_p": 0}, 0), ({"dropout_p": 0.5}, 1)):
        attend = partial(F.scaled_dot_product_attention, x, x, x, **words)
        attend()
        before = counter.get_state()
        _, counts = counted(attend)
        assert counts["in_c"] == 1 - draws and (counter.get_state() != before) is bool(draws)


def test_a_pending_sum_that_was_reduced_is_read_instead(mesh: dt.ProcessMesh) -> None:
    x = dt.from_local(torch.ones(8, 6), mesh, [P, R], shape=(8, 6)).clone()
    for _ in range(3):
        assert (x * 2).partial_status == {0: "sum"}
    x.relu()  # reduces it
    _, counts = counted(lambda: x * 2)
    assert (x * 2).partial_status == {} and counts["in_c"] < counts["known"]


def test_what_a_call_reduces_is_kept_for_the_next(mesh: dt.ProcessMesh) -> None:
    x = dt.from_local(torch.ones(8, 6), mesh, [P, R], shape=(8, 6)).clone()
    x.clone().exp()
    _, counts = counted(x.exp)
    assert counts["known"] == 2 and x._reduced.value.placements == (R, R)
    value = x._reduced.value
    assert counted(x.exp)[1]["known"] == 2 and x._reduced.value is value


@pytest.mark.parametrize("first", [0, 1])
def test_the_table_is_emptied_between_a_call_that_reduces_and_what_it_makes(
    mesh: dt.ProcessMesh, first: int
) -> None:
    """All at once, where it is full: then the one is known and the other is not."""
    assert native.module is not None
    native.module.plans.clear()
    x = tensor(mesh)
    for i in range(16384 - 4 + first):  # kinds of calls; 16384 are kept
        torch.add(x, i)
    pending = dt.from_local(torch.ones(8, 6), mesh, [P, R], shape=(8, 6))
    for function in (torch.exp, torch.sin, torch.cos, torch.tanh, torch.sigmoid):
        for _ in range(3):
            out = function(pending.clone())
        torch.testing.assert_close(out.to_local(), function(torch.ones(8, 6)))
    native.module.plans.clear()


def test_calls_that_reduce_ask_python_first(mesh: dt.ProcessMesh) -> None:
    """Inside strict, of a gradient that is pending, and where a mode sees torch's functions."""
    x = dt.from_local(torch.ones(8, 6), mesh, [P, R], shape=(8, 6))
    for _ in range(2):
        x.clone().exp()
    with dt.debugging.strict(), pytest.raises(dt.errors.StrictError, match="implicit all_reduce"):
        x.exp()
    assert x._reduced is None
    w = dt.from_local(torch.ones(6), mesh, [R, R], shape=(6,)).requires_grad_()
    for _ in range(3):
        w.grad = None
        (tensor(mesh) * w).sum().backward()
        assert w.grad.partial_status == {0: "sum"}
        w.grad.exp()
        assert w.grad.partial_status == {} and w.grad._reduced is None  # for good

    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.exp(x.clone())
    assert torch.exp in seen


def test_two_transfers_are_joined_outside_the_mesh(mesh: dt.ProcessMesh) -> None:
    other = dt.ProcessMesh([1, 2], ("x",))
    x, y, z = (dt.zeros(4, 6, mesh=other) for _ in range(3))
    for t in (x, y):
        t.local = t.local.clone().requires_grad_() * 1  # as what a transfer leaves
    x + z
    for a, b, joined in ((x, z, x.local), (z, y, y.local), (z, z, z.local), (x, x, x.local)):
        assert counted(lambda a=a, b=b: a + b)[1]["in_c"] == 1 and (a + b).local is joined
    above = (x + y).local.grad_fn
    assert {node for node, _ in above.next_functions} == {x.local.grad_fn, y.local.grad_fn}


def passing(other: dt.ProcessMesh, grad: bool) -> dt.DistTensor:
    x = dt.zeros(4, 6, mesh=other, placements=[S0])
    if grad:
        x.local = x.local.clone().requires_grad_() * 1  # as what a transfer leaves
    return x


@pytest.mark.parametrize("in_c", [False, True])
def test_a_reshard_between_other_meshes_is_a_new_wrapper_and_a_tag(
    mesh: dt.ProcessMesh, in_c: bool
) -> None:
    one, two = dt.ProcessMesh([1, 2], ("x",)), dt.ProcessMesh([3, 4], ("x",))
    tags = runtime.current_runtime().tags
    with native.using(in_c):
        for placements in ([R], [S0], [dt.Shard(1)], [P], (R,), None, [dt.attention.Balanced(0)]):
            for _ in range(2):
                x, leaf, y = passing(one, True), passing(one, False), passing(one, False)
                leaf.requires_grad_()
                before = tags[0] if tags else 0
                out, shared, free = [dt.reshard(t, two, placements) for t in (x, leaf, y)]
                assert tags[0] == before + 3
                assert out.local is x.local and not free.requires_grad
                assert shared.local is token.no_source_token(two.device)
                spec = spec_of(two, (4, 6), x.dtype, placements)
                assert {t.spec for t in (out, shared, free)} == {spec} and out is not x
        assert dt.reshard(x, two, [dt.Shard(0)]).placements == (S0,)
        assert dt.reshard(x, two, [dt.Shard(1)]).placements == (dt.Shard(1),)
        with torch.no_grad():
            assert not dt.reshard(x, two, [R]).requires_grad
        with p2p.channel(7):
            dt.reshard(x, two, [R])
        assert tags[7] == 1


def test_a_reshard_in_a_micro_batch_or_a_recomputation(mesh: dt.ProcessMesh) -> None:
    """Within a micro-batch, which notes its meshes, and within a region that is computed again,
    which counts nothing then. A view whose source was written to still says so."""
    one, two = dt.ProcessMesh([1, 2], ("x",)), dt.ProcessMesh([3, 4], ("x",))
    x, tags = passing(one, False), runtime.current_runtime().tags
    graph = MicroBatchGraph(lambda: None)

    def move() -> Any:
        return dt.reshard(x, two, [R])

    move()
    with graph:
        move()
    assert graph.meshes == [one, two]
    for again, more in ((False, 1), (True, 0)):
        before = tags[0]
        with activation_checkpoint.Run([], again):
            move()
        assert tags[0] == before + more
    before = tags[0]
    x.local = views.StaleView(x.local)
    x.local.message = "written to"
    with pytest.raises(RuntimeError, match="written to"):
        move()
    assert tags[0] == before


def test_a_reshard_on_one_mesh_is_found_again(mesh: dt.ProcessMesh) -> None:
    x = tensor(mesh, grad=True)
    expected = parts(dt.reshard(x, mesh, [R, S0]))
    for _ in range(2):
        assert parts(dt.reshard(x, mesh, [R, S0])) == expected
        assert dt.reshard(x, None, [R, R]).placements == (R, R)
        assert dt.reshard(x, mesh, [S0, R]) is x
        with pytest.raises(ValueError, match="placements"):
            dt.reshard(x, mesh, [R])


def test_uses_of_an_old_value_are_not_read(mesh: dt.ProcessMesh) -> None:
    """It was written to by way of what shares its memory."""
    h = tensor(mesh, grad=True).cos()
    w = dt.from_local(torch.ones(2, 6), mesh, [R, S0], shape=(8, 6))
    for write in (False, False, True):
        if write:
            h.local.detach().add_(1)
        before = h._uses and h._uses.aliases[1,][0]
        counts = counted(lambda: F.linear(h, w))[1]
        alias = h._uses.aliases[1,][0]
        assert alias.equal(h.local) and (alias is before) is (before is not None and not write)
    assert counts["in_c"] == 1


def test_what_is_made_without_gradients_is_not_derived(mesh: dt.ProcessMesh) -> None:
    def local(call: Any) -> Any:
        return lambda x: x.detach().clone().requires_grad_()

    with erfinv_as(local, rematerialize=0), torch.no_grad():
        x = tensor(mesh)
        with native.using(False):
            expected = [parts(torch.erfinv(x)) for _ in range(2)]
        torch.erfinv(x)
        out, counts = counted(lambda: torch.erfinv(x))
        assert [parts(out)] * 2 == expected and counts["in_c"] == 1
        with torch.enable_grad():
            assert derivation_of(torch.erfinv(x)) is not None


def lists(mesh: dt.ProcessMesh) -> list[Any]:
    """Writes to lists of what has been used, or reduced, or neither, and of plain tensors."""
    used = tensor(mesh, grad=True).cos()
    pending = dt.from_local(torch.ones(8, 6), mesh, [P, R], shape=(8, 6))
    used.local_for((1,))
    pending.relu()
    first = [tensor(mesh), used]
    with torch.no_grad():
        torch._foreach_mul_(first, 2.0)
        torch._foreach_mul_([pending], 2.0)
        assert used._uses is None and pending._reduced is None
        ones, states = [dt.ones(8, 6, mesh=mesh) for _ in range(6)], [torch.ones(()) for _ in "ab"]
        for member in ones:
            member.local_for((1,))
        args: Any = ones[:2], ones[2:4], ones[4:], [tensor(mesh).abs() for _ in "ab"], [], states
        before = [versions.version(x.local) for x in ones]
        torch._fused_adamw_(
            *args, amsgrad=False, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
            maximize=False,
        )  # fmt: skip
        changed = [versions.version(x.local) > b for x, b in zip(ones, before, strict=True)]
    return [*parts([*first, pending]), *parts(list(args)), changed]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return parts(call())
    except RuntimeError as error:
        return str(error)


def copies(mesh: dt.ProcessMesh) -> list[Any]:
    """Writes around copies that stand in place of views."""
    x, brought = tensor(mesh), []
    torch._foreach_neg_([x.clone()])
    lost, kept = x.clone(), x.clone()
    views.register_copy(lost, x, "split")
    views.register_copy(kept, x, "select", brought.append)
    row, part = lost.unsqueeze(1), kept.unsqueeze(1)
    made = [outcome(row.neg_), outcome(lost.neg_), outcome(lambda: torch._foreach_neg_([lost]))]
    made += [outcome(kept.neg_), outcome(part.neg_), outcome(lambda: torch._foreach_neg_([part]))]
    made += [*parts(brought), outcome(x.neg_)]
    return [*made, *(outcome(lambda t=t: t + 1) for t in (lost, kept, row, part, x))]


def uses(mesh: dt.ProcessMesh) -> list[Any]:
    """Writes to what has been used varying over an axis, and to what has been reduced."""
    x = tensor(mesh, grad=True).cos()
    x.local_for((1,))
    pending = dt.from_local(torch.ones(8, 6), mesh, [P, R], shape=(8, 6)).clone()
    pending.relu()
    before = [x._uses is None or x._uses.aliases is None, pending._reduced is None]
    x.mul_(2)
    pending.mul_(2)
    after = [x._uses is None or x._uses.aliases is None, pending._reduced is None]
    assert (before, after) == ([False, False], [True, True])
    return [parts(x), parts(pending)]


@pytest.mark.parametrize("program", [uses, copies, lists])
def test_writes_do_what_they_do_in_python(
    mesh: dt.ProcessMesh, program: Callable[[dt.ProcessMesh], list[Any]]
) -> None:
    with native.using(False):
        expected = program(mesh)
    program(mesh)
    got, counts = counted(lambda: program(mesh))
    assert got == expected and counts["in_c"] > 2
    assert program is not copies or sum("copy" in str(part) for part in got) >= 4


def test_calls_are_noted_as_in_python(mesh: dt.ProcessMesh) -> None:
    """What ranks compare of their programs."""
    x, y = tensor(mesh, grad=True), tensor(mesh)

    def noted(in_c: bool) -> list[int]:
        with native.using(in_c):
            compare_programs.CALLS.clear()
            for call, _ in CALLS.values():
                call(x, y)
            return [
                noted.call.mark for noted in compare_programs.CALLS if noted.call.mesh is not None
            ]

    noted(True)
    assert noted(True) == noted(False) and len(noted(True)) > len(CALLS)


def test_another_dtype_does_not_run_the_function_again(mesh: dt.ProcessMesh) -> None:
    calls = []

    def local(call: Any) -> Any:
        def counting(x: Tensor) -> Tensor:
            calls.append(x.dtype)
            return x.bfloat16() if torch.is_autocast_enabled("cpu") else x.clone()

        return counting

    with erfinv_as(local):
        x = tensor(mesh)
        torch.erfinv(x)
        torch.erfinv(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.erfinv(x).dtype is torch.bfloat16
        assert len(calls) == 3


def test_results_of_a_subclass_are_derived_as_in_python(mesh: dt.ProcessMesh) -> None:
    """As of tensors without data, on which a step is simulated."""

    class Other(Tensor):
        pass

    x = tensor(mesh, grad=True)
    x.local = x.local.as_subclass(Other)
    calls: list[Callable[[], Any]] = [lambda: x.unsqueeze(1), lambda: x.cos(), lambda: x.bfloat16()]
    for call in calls:
        with native.using(False):
            expected = call()
        call()
        out, counts = counted(call)
        assert counts["in_c"] == 1
        assert (derivation_of(out) is None) is (derivation_of(expected) is None)
        assert type(out.local) is type(expected.local) and out.spec is expected.spec
    with native.using(False):
        assert derivation_of(x.unsqueeze(1)) is not None


@pytest.mark.parametrize("in_c", [False, True])
def test_what_is_kept_of_a_call_holds_no_tensor(mesh: dt.ProcessMesh, in_c: bool) -> None:
    cache.clear_caches()
    with native.using(in_c):
        for turn in range(2):
            refs = {}
            for name, (call, _) in CALLS.items():
                x, y = tensor(mesh, grad=True), tensor(mesh)
                call(x, y)
                refs[name] = [weakref.ref(t) for t in (x, y, x.local, y.local)]
                del x, y
            gc.collect()
            held = [name for name, of in refs.items() if any(ref() is not None for ref in of)]
            assert not held, (turn, held)


# Keys ---------------------------------------------------------------------------------------------

VALUES = [
    0, 1, -1, True, False, None, 1.0, 2.0, "a", "b", (1, 2), [1, 2], (1, (2,)), ((1,), 2), [], (),
    torch.Size([1, 2]), slice(1), slice(0, 1), slice(1, 0), Ellipsis, torch.float32, torch.int64,
    torch.strided, torch.contiguous_format, torch.channels_last, 2**58, -(2**58), 2**70, 1j,
    torch.ones(2), torch.ones(3), torch.ones(1, 2), torch.ones(2).int(),
    nn.Parameter(torch.ones(2)),
    [torch.ones(2)], (torch.ones(2),), torch.device("cpu"), {"a": 1}, range(2),
]  # fmt: skip


def test_calls_of_one_key_in_c_have_one_in_python(
    mesh: dt.ProcessMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_of(*call: Any) -> Any:
        return Answer(object())  # of this kind of call

    def asked() -> None:
        """A function that nothing else knows."""

    monkeypatch.setattr(dispatch, "plan_of", plan_of)
    x = tensor(mesh)
    kinds: list[Any] = [((x, v), {}) for v in VALUES]
    kinds += [((v, x, w), {}) for v in VALUES for w in VALUES[::3]]
    kinds += [((x,), {name: v}) for v in VALUES for name in ("a", "b")] + [((x,), {})]
    same = 0
    for args, kwargs in kinds * 2:
        in_c = native.module.dispatch(asked, (), args, kwargs)
        known = dispatch.first_call(asked, args, kwargs)[1]  # None: it has no key in Python
        same += known is not None
        assert known is None or in_c is known.value, (args, kwargs)
    assert same > len(kinds)
    cache.clear_caches()


def test_what_may_be_made_for_each_call_has_no_key(mesh: dt.ProcessMesh) -> None:
    """Bound methods: each would be a kind of call."""
    x, count = tensor(mesh), native.module.counts
    for func in (x.local.sum, Tensor.is_leaf.__get__, x.full_tensor):  # type: ignore[attr-defined]
        before = count()["unsure"]
        with pytest.raises((dt.errors.FallbackWarning, TypeError)):
            native.module.dispatch(func, (), (x, "a", "b", "c"))
        assert count()["unsure"] == before + 1


def test_no_object_is_taken_for_one_that_was_there_before(
    mesh: dt.ProcessMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key has addresses, and those of objects that are gone are given to others."""
    x, seen = tensor(mesh), set()
    monkeypatch.setattr(
        dispatch, "_call", lambda func, key: compare_programs.CallSignature(str, None, 0)
    )
    for number in range(300):

        def asked() -> None:
            """Another function each time."""

        seen.add(id(asked))
        runner: Any = lambda planned, args, kwargs, number=number: number  # noqa: E731
        planned = PythonCall(asked, runner)
        monkeypatch.setattr(dispatch, "plan_of", lambda *call, planned=planned: planned)
        assert [native.module.dispatch(asked, (), (x,)) for _ in range(3)] == [number] * 3
        dispatch.PLANS.clear()
        compare_programs.CALLS.clear()
        del asked, runner, planned
    assert len(seen) == 300  # all are still there
    cache.clear_caches()


def test_plans_are_bounded(mesh: dt.ProcessMesh) -> None:
    x, most = tensor(mesh), 0
    for i in range(16384 + 300):
        native.module.dispatch(torch.result_type, (), (x, i))
        if i % 100 == 0:
            most = max(most, native.module.counts()["kinds"])
    assert 16000 < most <= 16384 and native.module.counts()["kinds"] < 1000
    assert torch.result_type(x, 5) is torch.float32
    cache.clear_caches()


# What a C module can get wrong --------------------------------------------------------------------


def test_the_table_is_emptied_while_a_call_runs(mesh: dt.ProcessMesh) -> None:
    def local(call: Any) -> Any:
        def clearing(x: Tensor) -> Tensor:
            cache.clear_caches()
            gc.collect()
            return x.clone()

        return clearing

    with erfinv_as(local):
        x = tensor(mesh)
        native.module.plans.clear()
        torch.erfinv(x)
        for _ in range(20):
            assert torch.erfinv(x).spec is x.spec
            assert native.module.counts()["kinds"] <= 1


@pytest.mark.parametrize("targets", [None, (0,)])
def test_a_list_that_comes_to_hold_itself(
    mesh: dt.ProcessMesh, monkeypatch: pytest.MonkeyPatch, targets: Any
) -> None:
    """Between its key and its use: getters of torch run code of the user's where there is a
    mode."""
    x, plain = tensor(mesh), torch.ones(6)
    given: list[Any] = [x]

    class Turning(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given[:] = [x, given]
            return func(*args, **(kwargs or {}))

    def asked() -> None:
        """A function that nothing else knows."""

    reads = Read(ReadKind.LIST), CONSTANT
    plan = CallPlan(
        asked, mesh, lambda given, plain: given, (), reads, (), (), writes=targets, native=True
    )
    monkeypatch.setattr(dispatch, "plan_of", lambda *call: plan)
    monkeypatch.setattr(dispatch, "run", lambda *call: "python")
    assert native.module.dispatch(asked, (), (given, plain)) == "python"
    with Turning(), pytest.raises(RecursionError):
        native.module.dispatch(asked, (), (given, plain))
    cache.clear_caches()


def test_deep_calls_are_carried_out_by_python(mesh: dt.ProcessMesh) -> None:
    """Which counts its frames: in C alone the stack would end first."""
    x, left = tensor(mesh), [0]

    def local(call: Any) -> Any:
        def again(local: Tensor) -> Tensor:
            left[0] -= 1
            return torch.erfinv(x).local if left[0] > 0 else local.clone()

        return again

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(2000)
    try:
        with erfinv_as(local):
            torch.erfinv(x)
            for depth, unsure in ((150, False), (250, True)):
                left[0] = depth
                counts = counted(lambda: torch.erfinv(x))[1]
                assert left[0] == 0 and (counts["unsure"] > 0) is unsure
            sys.setrecursionlimit(before)
            left[0] = 10**9
            with pytest.raises(RecursionError):
                torch.erfinv(x)
            left[0] = 0
            assert counted(lambda: torch.erfinv(x))[1]["unsure"] == 0
    finally:
        sys.setrecursionlimit(before)


CIRCLE = """
import sys, torch, disttensor as dt
x = dt.ones(3, mesh=dt.init_mesh((1,)))
x + x
x.local = x
try:
    x + x
except RecursionError:
    print("refused")
"""


def test_a_tensor_whose_local_is_itself_ends_in_an_error() -> None:
    done = in_a_process(CIRCLE)
    assert done.stdout.strip() == "refused", done.stderr


def test_an_interrupt_is_no_argument_without_a_key(mesh: dt.ProcessMesh) -> None:
    """The getters that the key asks run code of the user's where there is a mode."""

    class Interrupting(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if first.pop():
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    x, plain, first = tensor(mesh), torch.ones(6), [False] * 99 + [True]
    with Interrupting(), pytest.raises(KeyboardInterrupt):
        native.module.dispatch(torch.add, (), (x, plain))


def test_names_of_arguments_may_be_of_another_class(mesh: dt.ProcessMesh) -> None:
    class Name(str):
        pass

    x = tensor(mesh)
    for name in (Name("other"), "".join(["ot", "her"])):
        out, counts = counted(
            lambda name=name: native.module.dispatch(torch.add, (), (x,), {name: x})
        )
        assert parts(out) == parts(x + x) and counts["unsure"] == 1


def test_threads(mesh: dt.ProcessMesh) -> None:
    x, y = tensor(mesh), tensor(mesh)
    expected, failures, stop = parts(x.add(y).chunk(2, 1)), [], threading.Event()

    def work() -> None:
        try:
            for i in range(300):
                if parts(x.add(y).chunk(2, 1)) != expected or (x * i).spec is not x.spec:
                    failures.append("another result")
        except Exception as error:
            failures.append(repr(error))

    def clear() -> None:
        while not stop.wait(0.001):
            native.module.plans.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(4)]
    clearing = threading.Thread(target=clear)
    try:
        for thread in (*threads, clearing):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        clearing.join()
        sys.setswitchinterval(before)
    assert not failures, failures[:3]


def test_wrappers_die_and_are_found_by_the_collector(mesh: dt.ProcessMesh) -> None:
    x = tensor(mesh)
    x + x
    alone, cycle = x + x, x + x
    cycle.myself = cycle  # type: ignore[attr-defined]
    refs = [weakref.ref(alone), weakref.ref(cycle), weakref.ref(cycle.local)]
    del alone
    assert refs[0]() is None and refs[1]() is not None
    del cycle
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_wrapper_that_torch_has_made_a_view_serves_once(mesh: dt.ProcessMesh) -> None:
    """``torch.Tensor(x)`` makes a view in C++, and ``torch.tensor`` detaches a copy in place."""
    x = tensor(mesh)
    for _ in range(3):
        x.float()  # a known call, whose results wait
    for _ in range(3):
        assert torch.Tensor(x.float()).spec.dtype == torch.float32
        assert torch.tensor(x, dtype=torch.float32).spec.dtype == torch.float32


def test_a_wrapper_that_somebody_has_a_hold_of_is_not_used_again(mesh: dt.ProcessMesh) -> None:
    """Its __dict__, or itself from C++, or the collector that takes a cycle apart."""

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, plain: Tensor, dist: Any) -> Tensor:
            ctx.save_for_backward(dist)
            return plain * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (dist,) = ctx.saved_tensors
            return g * dist.mine, None

    x = tensor(mesh)
    expected = parts(x + x)
    y = x + x
    y.mine = 3.0  # type: ignore[attr-defined]
    theirs = vars(y)
    del y
    z = x + x
    assert theirs == {"mine": 3.0} and vars(z) == {}
    saved, plain = x + x, torch.ones(2, requires_grad=True)
    saved.mine = 3.0  # type: ignore[attr-defined]
    out = super(torch.autograd.Function, Saving).apply(plain, saved)  # type: ignore[misc]
    del saved
    made = [x + x for _ in range(50)]
    out.sum().backward()
    assert plain.grad is not None and plain.grad.tolist() == [3.0, 3.0]
    assert all(parts(m) == expected and vars(m) == {} for m in made)
    for _ in range(3):
        cycle = [x + x for _ in range(40)]
        cycle.append(cycle)  # type: ignore[arg-type]
        cycle[0].myself = cycle  # type: ignore[attr-defined]
        del cycle
        gc.collect()
        made = [x + x for _ in range(80)]
        assert all(parts(m) == expected for m in made)


def test_methods_of_known_calls_come_past_the_parser_of_torch(mesh: dt.ProcessMesh) -> None:
    x, y = tensor(mesh, grad=True), tensor(mesh)
    calls: list[Callable[[], Any]] = [
        lambda: x.view(8, 2, 3), lambda: x.view((8, 2, 3)), lambda: x.sum(dim=1, keepdim=True),
        lambda: x + y, lambda: 2 * x, lambda: x - 1.5, lambda: x / y, lambda: x @ y.t(), lambda: -x,
        lambda: y.clone().add_(x, alpha=2), lambda: x.transpose(0, 1), lambda: x.chunk(2, dim=1),
        lambda: y.clone().__iadd__(2), lambda: x.max(dim=1).values, lambda: x.to(torch.float64),
    ]  # fmt: skip
    for call in calls:
        with native.using(False):
            expected, counts = counted(lambda: parts(call()))
            assert counts["past"] == 0
        call()
        got, counts = counted(lambda: parts(call()))
        assert got == expected and counts["past"] >= 1 and counts["first"] == 0


def test_methods_have_the_names_and_docstrings_of_torch(mesh: dt.ProcessMesh) -> None:
    for name in native.METHODS:
        ours, theirs = getattr(dt.DistTensor, name), getattr(Tensor, name)
        assert (ours.__name__, ours.__doc__) == (theirs.__name__, theirs.__doc__)
    x = tensor(mesh)
    bound = x.add
    assert bound.__self__ is x and parts(bound(x)) == parts(dt.DistTensor.add(x, x)) == parts(x + x)
    with pytest.raises(TypeError):
        dt.DistTensor.add()  # type: ignore[call-overload]


def test_methods_go_the_way_of_torch_where_somebody_else_is_asked_first(
    mesh: dt.ProcessMesh,
) -> None:
    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Other:
        def __radd__(self, other: Any) -> str:
            return "theirs"

    x, seen = tensor(mesh), []
    x.add(x)
    x + x
    with Seeing():
        x.add(x)
        x + x
    assert seen == [Tensor.add, Tensor.add]
    assert x + Other() == "theirs"
    for wrong in (lambda: x.view("a"), lambda: x.add(), lambda: x.add(x, gamma=1)):
        with pytest.raises(TypeError):
            wrong()
    assert x.view(*[1] * 30, 48).ndim == 31
    assert dt.DistTensor.add(x, x).spec is Tensor.add(x, x).spec is x.add(x).spec


def test_a_gradient_that_was_read_grows_by_those_of_other_uses(mesh: dt.ProcessMesh) -> None:
    read = []
    for in_c in (False, True):
        with native.using(in_c):
            w = dt.shard_tensor(torch.arange(6.0), mesh, [R, R], requires_grad=True)
            w.square().sum().backward()
            read.append(parts(w.grad))
            (tensor(mesh, S0, R) * w).sum().backward()
            assert w.grad is not None and w.grad is w.grad
            read.append(parts(w.grad))
    assert read[:2] == read[2:] and read[0] != read[1]


def test_gradients_that_wait_are_found_as_in_python(mesh: dt.ProcessMesh) -> None:
    """Of leaves that were used in one way or in several, that have hooks, that have no gradient or
    were given one, twice the same, of plain ones, and outside the mesh."""
    R2, line = [R, R], dt.ProcessMesh([0, 1], ("x",))

    def leaves() -> list[Any]:
        whole = [dt.shard_tensor(torch.ones(6), mesh, R2, requires_grad=True) for _ in range(6)]
        one, several, hooked, unused, given, reduced = whole
        hooked.register_hook(lambda g: g * 2)
        x = tensor(mesh, S0, R)
        ((x + one) * several * hooked * reduced).sum().backward()
        several.square().sum().backward()
        given.grad = dt.shard_tensor(torch.ones(6), mesh, R2)
        dt.sync_gradients([reduced])
        outside = dt.zeros(4, mesh=dt.ProcessMesh([1, 2], ("x",)), requires_grad=True)
        outside.sum().backward()
        other = dt.shard_tensor(torch.ones(6), line, [R], requires_grad=True)
        (dt.shard_tensor(torch.ones(6, 6), line, [S0]) @ other).sum().backward()
        plain = nn.Parameter(torch.ones(2))
        plain.sum().backward()
        return [one, unused, several, plain, given, hooked, outside, one, None, other, reduced]

    for made_in_c in (False, True):
        with native.using(made_in_c):
            params = leaves()
        found = []
        for in_c in (False, True):
            with native.using(in_c):
                found.append([m for members in sync.buckets(params) for m in members])
        assert [m.number for m in found[0]] == [0, 2, 9]
        for python, c in zip(*found, strict=True):
            assert python.number == c.number and python.grad is c.grad
            assert python.param is c.param is params[c.number]


def test_gradients_are_dropped_as_in_python(mesh: dt.ProcessMesh) -> None:
    """Of leaves that were used in one way or in several, that have hooks, and outside the mesh."""
    elsewhere = dt.ProcessMesh([1, 2], ("x",))
    for hooked in (False, True):
        for in_c in (False, True):
            with native.using(in_c):
                w = dt.shard_tensor(torch.ones(6), mesh, [R, R], requires_grad=True)
                if hooked:
                    w.register_hook(lambda g: g * 2)
                w.grad = None
                for _ in range(2):
                    (tensor(mesh, S0, R) * 0 + w).sum().backward()
                    w.sum().backward()
                    assert w.grad is not None
                    assert w._grad_slot.grad is not None
                    w.grad = None
                    assert w.grad is None and w.local.grad is None
                    assert w._grad_slot.grad is None
                    aliases = w._uses.aliases if w._uses else None
                    leaves = [a for a, at, _ in (aliases or {}).values() if at < 0]
                    assert all(alias.grad is None for alias in leaves)
                    assert leaves
                with pytest.raises(TypeError, match="a tensor or None"):
                    w.grad = 3  # type: ignore[assignment]
                del w.grad
    outside = dt.zeros(4, mesh=elsewhere, requires_grad=True)
    outside.grad = None
    assert outside.grad is None


def test_what_is_known_is_seen_by_the_collector(mesh: dt.ProcessMesh) -> None:
    x = tensor(mesh)
    native.module.plans.clear()
    x + x
    plan = dispatch.first_call(Tensor.add, (x, x), None)[1]
    (entry,) = native.module.plans.values()
    assert plan in gc.get_referents(entry) and gc.is_tracked(entry)


def test_without_torch_functions_the_net_below_catches_it(mesh: dt.ProcessMesh) -> None:
    x = tensor(mesh)
    x + x
    with torch._C.DisableTorchFunctionSubclass():
        for call in (lambda: x + x, x.relu, lambda: torch.add(x, 1), lambda: x.view(48)):
            with pytest.raises(RuntimeError, match="below __torch_function__"):
                call()
    assert type(x + x) is dt.DistTensor


def test_a_wrapper_that_is_resurrected_is_what_it_was(mesh: dt.ProcessMesh) -> None:
    saved = []

    class Keeper:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __del__(self) -> None:
            saved.append(self.value)

    x = tensor(mesh)
    for _ in range(3):
        y = x + x
        expected = parts(y)
        y.keeper = Keeper(y)  # type: ignore[attr-defined]
        del y
        gc.collect()
        assert parts(saved.pop()) == expected


def test_errors_are_those_of_python(mesh: dt.ProcessMesh) -> None:
    x = tensor(mesh)
    calls: list[Callable[[], Any]] = [
        lambda: x.view(5, 5), lambda: torch.add(x, x, gamma=1), lambda: x.chunk(0),
        lambda: dt.DistTensor.__torch_function__(torch.add, (), (x, "a")),
        lambda: dt.DistTensor.__torch_function__(torch.add, (), [x, x], None, None),
        lambda: dt.DistTensor.__torch_function__(torch.add, (), (x, object())),
    ]  # fmt: skip
    for call in calls:
        errors = []
        for in_c in (False, True, True):
            with native.using(in_c), pytest.raises(Exception) as info:
                call()
            errors.append((type(info.value), str(info.value)))
        assert errors[0] == errors[1] == errors[2], errors


def test_a_plan_of_another_form_is_not_followed(mesh: dt.ProcessMesh) -> None:
    x = tensor(mesh)
    one = Read(ReadKind.TENSOR)
    good = CallPlan(
        torch.relu, mesh, torch.relu, (x.spec,), (one,), (), (x.spec,), native=True
    )  # fmt: skip
    out = TensorResult(0, x.spec.shape, x.spec.dtype, (0,), None, None, None)
    off_mesh = replace(good, local=None, template=out)
    wrong: list[Any] = [
        replace(good, native=False), replace(good, reads=(one,) * 30), replace(good, reads=None),
        replace(good, keywords=("a", "b")), replace(good, reads=(one._replace(spec=x.spec),)),
        replace(good, reads=(one._replace(kind=ReadKind.TREE),)), replace(good, reads=(3,)),
        replace(good, results=(1,)), replace(good, writes=("a",)), replace(good, writes=(-3,)),
        replace(good, writes=(1, 0)), replace(good, may_reuse=1),
        replace(off_mesh, template=out._replace(sources=(7,))), replace(off_mesh, template=(3,)),
        replace(off_mesh, template=out._replace(viewed=5)), replace(off_mesh, template=3),
        replace(off_mesh, template=(out, out)),
        PythonCall(torch.relu, lambda planned, args, kwargs: x),
    ]  # fmt: skip
    named = replace(good, keywords=("input",))
    calls = [((torch.relu, x.spec), (x,), {}, plan) for plan in (good, off_mesh, *wrong)]
    calls += [
        (((torch.relu,), "input", x.spec), (), {"input": x}, plan)
        for plan in (named, replace(named, keywords=(1,)))
    ]
    for key, args, kwargs, plan in calls:
        native.module.plans.clear()
        call = dispatch._call(torch.relu, key)

        def first(planned: Any, args: Any, kwargs: Any) -> str:
            dispatch.PLANS[key] = replace(plan, call=call)
            return "first"

        dispatch.PLANS[key] = PythonCall(torch.relu, first, call=call)
        assert torch.relu(*args, **kwargs) == "first"
        before = native.module.counts()["in_c"]
        with suppress(Exception):  # Python cannot carry it out either
            torch.relu(*args, **kwargs)
        in_c = any(plan is p for p in (good, off_mesh, named))
        assert native.module.counts()["in_c"] == before + in_c, plan
    cache.clear_caches()


def test_configure_wants_all_it_needs() -> None:
    with pytest.raises(TypeError, match="configure needs DistTensor"):
        native.module.configure(a=1)
    with pytest.raises(TypeError, match="keyword"):
        native.module.configure()
    with pytest.raises(RuntimeError, match="once"):
        native._configure(native.module)


def test_calls_leave_nothing_behind(mesh: dt.ProcessMesh) -> None:
    """``make leaks`` looks for less, in a million calls."""
    x, y = tensor(mesh, grad=True), tensor(mesh)
    watched = [
        x, y, x.local, y.local, x.spec, x.spec.meta_tensor, torch.float32, dt.DistTensor,
        native.module.dispatch, torch.add, torch.sum, True, False, Ellipsis, "tanh", "approximate",
    ]  # fmt: skip

    def counts() -> list[int]:
        for call, _ in CALLS.values():
            call(x, y)
        compare_programs.CALLS.clear()
        gc.collect()
        alive = gc.get_objects()
        kinds = [dt.DistTensor, Tensor, tuple, list, dict]
        return [*map(sys.getrefcount, watched), *(sum(type(o) is k for o in alive) for k in kinds)]

    for _ in range(40):  # until as many wrappers wait as may
        before = counts()
    for _ in range(10):
        after = counts()
    grown = [n - b for b, n in zip(before, after, strict=True)]
    assert max(grown) < 8, str(grown)


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, **variables},
    )  # fmt: skip


def test_python_can_be_chosen() -> None:
    code = "import disttensor as dt; print(dt.debugging.info()['dispatch'])"
    for value, said in (("1", "Python (DISTTENSOR_PYTHON is set)"), ("0", "C")):
        done = in_a_process(code, DISTTENSOR_PYTHON=value)
        assert done.stdout.strip() == said, done.stderr


def test_what_was_compiled_of_another_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tmp_path / "native.c"
    changed.write_text("int x;")
    monkeypatch.setattr(native, "_FILE", changed)
    assert native._compiled() == (None, "it was compiled from another native.c: run make native")
    monkeypatch.setattr(native, "_FILE", tmp_path / "gone.c")  # as where it is installed
    assert native._compiled() == (native.module, "")


ENDING = """
import atexit, sys, torch, disttensor as dt
mesh = dt.init_mesh((1,))
class Late:
    def __init__(self, x): self.x = x
    def __del__(self):
        try:
            self.x + self.x
        except Exception:
            pass
x = dt.ones(3, mesh=mesh)
x + x
late = Late(x)
x.late = Late(x)
sys.modules["late"] = Late(x)
atexit.register(lambda: print((x + x).to_local().tolist()))
dt.DistTensor.late = Late(x)
torch.Tensor.late = Late(x)
"""


def test_a_second_module_of_the_file_is_refused() -> None:
    loader = machinery.ExtensionFileLoader("_native", native.module.__file__)
    other = util.module_from_spec(util.spec_from_loader("_native", loader))  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="loaded once"):
        loader.exec_module(other)


UNCONFIGURED = """
from importlib import machinery, util
loader = machinery.ExtensionFileLoader("_native", FILE)
module = util.module_from_spec(util.spec_from_loader("_native", loader))
loader.exec_module(module)
module.enable(True)
for args in ((sum, (), ()), (1, 2, 3), ()):
    try:
        module.dispatch(*args)
    except TypeError as error:
        print(str(error).endswith("after configure"))
"""


def test_calls_before_configure_are_refused() -> None:
    done = in_a_process(UNCONFIGURED.replace("FILE", repr(native.module.__file__)))
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_python_may_end_at_any_moment() -> None:
    """Calls while modules are taken apart, with tensors that outlive them."""
    done = in_a_process(ENDING)
    assert done.returncode == 0 and done.stdout.strip() == "[2.0, 2.0, 2.0]", done.stderr


OTHER_INTERPRETER = """
try:
    import _interpreters as interpreters
    number = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    number = interpreters.create(isolated=False)
interpreters.run_string(number, '''
from importlib import machinery, util
loader = machinery.ExtensionFileLoader("_native", FILE)
try:
    module = util.module_from_spec(util.spec_from_loader("_native", loader))
    loader.exec_module(module)
    print("taken", flush=True)
except ImportError as error:
    print("refused", flush=True)
''')
"""


def test_another_interpreter_is_refused() -> None:
    done = in_a_process(OTHER_INTERPRETER.replace("FILE", repr(native.module.__file__)))
    assert done.stdout.strip() == "refused", (done.stdout, done.stderr)
