"""After an exception of the user's code everything is as before: the steps that follow are those of
one plain process that fails at the same place."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.failing import POINT, Failure, Interrupt, armed, at_rest, changes, leftovers
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import compare, full, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")


class Trap(torch.autograd.Function):
    """The identity, whose backward may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        POINT("in the forward of a function")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        POINT("in the backward of a function")
        return g.clone()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        POINT("as a block begins")
        h = self.first(x)
        POINT("in a block")
        if h.requires_grad:
            h.register_hook(lambda _: POINT("in a hook of a tensor"))
        y = x + self.second(torch.tanh(h))
        POINT("as a block ends")
        return y


class Net(nn.Module):
    def __init__(self, recompute: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        POINT("as the forward begins")
        for i, block in enumerate(self.blocks):
            run = block
            for _ in range(self.recompute):
                run = partial(checkpoint, run, use_reentrant=False)
            x = run(x)
            if i == 1:
                x = Trap.apply(x)
            POINT("between blocks")
        x = x * self.scale
        POINT("as the forward ends")
        return x


MODULE_HOOKS = {
    "in a forward pre-hook": "register_forward_pre_hook",
    "in a forward hook": "register_forward_hook",
    "in a backward pre-hook": "register_full_backward_pre_hook",
    "in a backward hook": "register_full_backward_hook",
}


def put_hooks(net: Net) -> None:
    for module in (net, net.blocks[1], net.blocks[1].first):
        for point, register in MODULE_HOOKS.items():
            getattr(module, register)(lambda *_, p=point: POINT(p))


def put_gradient_hooks(net: Net, calls: list[str]) -> None:
    for name, p in net.named_parameters():

        def hook(_: Any, name: str = name) -> None:
            calls.append(name)
            POINT("in a post-accumulate hook")

        p.register_post_accumulate_grad_hook(hook)


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, whose step may fail anywhere."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                POINT("in the step")
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].mul_(0.9).add_(p.grad)
                    p.add_(state["momentum"], alpha=-group["lr"])


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.tanh.default:
            POINT("in a dispatch mode, forward")
        if func is torch.ops.aten.tanh_backward.default:
            POINT("in a dispatch mode, backward")
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            POINT("in a function mode")
        return func(*args, **(kwargs or {}))


def unpacked(x: Any) -> Any:
    POINT("in a hook of saved tensors")
    return x


def packed(x: Any) -> Any:
    POINT("in a hook that saves tensors")
    return x


class Program:
    """A training program, plain or on ranks. ``wrap`` is a context around each step."""

    def __init__(self, kind: str, on: bool, how: Any, recompute: int, before: bool) -> None:
        torch.manual_seed(0)
        self.net: Any = Net(recompute).double()
        self.on, self.kind, self.calls = on, kind, list[str]()
        self.accumulates = "accumulate" in kind
        if before:
            put_hooks(self.net)
        self.mesh, self.split = how(self.net) if on else (None, None)
        if not before:
            put_hooks(self.net)
        put_gradient_hooks(self.net, self.calls)
        self.held = list(self.net.parameters())
        self.opt = Momentum(self.held)
        self.opt.register_step_pre_hook(lambda *_: POINT("in a hook before the step"))
        self.opt.register_step_post_hook(lambda *_: POINT("in a hook after the step"))

    def given(self, x: Tensor) -> Tensor:
        x = dt.shard_tensor(x, self.mesh, self.split) if self.on else x
        return x.requires_grad_()  # or hooks on modules complain

    def backward(self, seed: int) -> Tensor:
        x = self.given(randn(5, 6, seed=seed))
        POINT.in_forward = True  # until it ends without an error
        out = self.net(x)
        POINT.in_forward = False
        if self.on and "whole" in self.kind:
            out = out.full_tensor()
        loss = out.square().sum()
        POINT("before the backward")
        loss.backward()
        POINT("after the backward")
        return loss

    def step(self, seed: int) -> Any:
        losses = []
        if "modes" in self.kind:
            saved = torch.autograd.graph.saved_tensors_hooks(packed, unpacked)
            with SeesOperators(), SeesFunctions(), saved:
                losses.append(self.backward(seed))
        elif self.accumulates:
            for i in range(3):
                if self.on and "sharded" in self.kind:
                    way = "none" if "none" in self.kind else "scatter"
                    with dt.accumulate(self.net, last=i == 2, reduce=way):
                        losses.append(self.backward(10 * seed + i))
                        POINT("in accumulate")
                else:
                    losses.append(self.backward(10 * seed + i))
                    POINT("in accumulate")
        else:
            losses.append(self.backward(seed))
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 3.0)
        POINT("after the clipping")
        grads = [full(p.grad) for p in self.net.parameters()]
        self.opt.step()
        return [full(x) for x in losses], grads

    def state(self) -> Any:
        momentum = [self.opt.state.get(p, {}).get("momentum") for p in self.held]
        return [full(p) for p in self.held], [full(m) for m in momentum]

    def run(self, point: str, nth: int, error: Any, to_none: bool, first: bool) -> Any:
        """Steps before a failure, the failure, and three steps after it; whether it failed."""
        out: list[Any] = []
        for i in range(0 if first else 2):
            self.opt.zero_grad()
            out.append(self.step(i))
        before = leftovers()
        self.calls.clear()
        failed = False
        self.opt.zero_grad()
        with armed(point, nth, error) as given:
            try:
                self.step(7)
            except (Failure, Interrupt) as caught:
                failed = True
                assert caught is given, caught
                assert caught.args == (point,)
        del given
        if error is Failure or not POINT.in_forward:
            assert [id(p) for p in self.net.parameters()] == [id(p) for p in self.held]
            self.net.zero_grad(set_to_none=to_none)
        after = leftovers()
        assert after == before, changes(before, after)
        self.opt.zero_grad(set_to_none=to_none)
        assert all(p.grad is None or not full(p.grad).any() for p in self.held)
        out.append(self.state())
        self.calls.clear()
        for i in range(3):
            out.append(self.step(20 + i))
            out.append(self.state())
            self.opt.zero_grad()
        counts = {name: self.calls.count(name) for name in self.calls}
        if self.accumulates:  # hooks may be called once for three micro-batches
            counts = {name: 3 if n == 9 else n for name, n in counts.items()}
        out.append(counts)
        if self.on:
            assert leftovers() == before, changes(before, leftovers())
            at_rest(self.net)
        return failed, out


def plain_dp(net: Any) -> Any:
    mesh = mesh_of((2,), ("dp",))
    dt.shard_module(net, mesh)
    return mesh, [Shard(0)]


def tp(net: Any) -> Any:
    mesh = mesh_of((2,), ("tp",))
    plan = {"*.first.*": [Shard(0)], "*.second.weight": [Shard(1)]}
    dt.shard_module(net, mesh, plan)
    return mesh, [Replicate()]


def sharded(net: Any, **options: Any) -> Any:
    mesh = mesh_of((2,), ("fsdp",))
    dt.shard_data_parallel(net, mesh, **{"segments": ["blocks.*"], **options})
    return mesh, [Shard(0)]


def hsdp(net: Any, **options: Any) -> Any:
    mesh = mesh_of((2, 2), ("dp", "fsdp"))
    dt.shard_data_parallel(
        net, mesh, replicate_axis="dp", segments=["blocks.*.first", "blocks.*.second"], **options
    )
    return mesh, [Shard(0), Shard(0)]


def tp_and_sharded(net: Any) -> Any:
    mesh = mesh_of((2, 2), ("tp", "fsdp"))
    plan = {"*.first.*": [Shard(0), Replicate()], "*.second.weight": [Shard(1), Replicate()]}
    dt.shard_module(net, mesh, plan)
    dt.shard_data_parallel(net, mesh, segments=["blocks.*"])
    return mesh, [Replicate(), Shard(0)]


KINDS: dict[str, Any] = {
    "dp": plain_dp,
    "dp, whole results": plain_dp,
    "dp, modes": plain_dp,
    "tp": tp,
    "tp, modes": tp,
    "sharded none": partial(sharded, shard_axis=None),
    "sharded 1": partial(sharded, stage=1),
    "sharded 2": partial(sharded, stage=2),
    "sharded 3": sharded,
    "sharded 3, whole results": sharded,
    "sharded 3, modes": sharded,
    "sharded 1, modes": partial(sharded, stage=1),
    "sharded 3, prefetch": partial(sharded, prefetch=2),
    "sharded 3, no prefetch": partial(sharded, prefetch=0),
    "sharded 3, kept": partial(sharded, reshard_after_forward=False),
    "sharded 3, one segment": partial(sharded, segments=dt.fsdp.SegmentBySize()),
    "sharded 3, accumulate": sharded,
    "sharded 3, accumulate none": sharded,
    "sharded 2, accumulate": partial(sharded, stage=2),
    "sharded 2, accumulate none": partial(sharded, stage=2),
    "sharded 1, accumulate": partial(sharded, stage=1),
    "dp, accumulate": plain_dp,
}
KINDS_4: dict[str, Any] = {
    "hsdp sharded 3": hsdp,
    "hsdp sharded 2": partial(hsdp, stage=2),
    "hsdp sharded 1": partial(hsdp, stage=1),
    "hsdp sharded 3, accumulate": hsdp,
    "hsdp sharded 2, accumulate": partial(hsdp, stage=2),
    "hsdp sharded 2, accumulate none": partial(hsdp, stage=2),
    "hsdp sharded 1, accumulate": partial(hsdp, stage=1),
    "tp x sharded 3": tp_and_sharded,
    "tp x sharded 3, modes": tp_and_sharded,
}
MODES = [
    "in a dispatch mode, forward", "in a dispatch mode, backward", "in a function mode",
    "in a hook of saved tensors", "in a hook that saves tensors",
]  # fmt: skip
POINTS = [
    "in the forward of a function", "in the backward of a function", "as a block begins",
    "in a block", "in a hook of a tensor", "as a block ends", "as the forward begins",
    "between blocks", "as the forward ends", *MODULE_HOOKS, "in a post-accumulate hook",
    "before the backward", "after the backward", "after the clipping",
    "in a hook before the step", "in the step", "in a hook after the step",
]  # fmt: skip


def cases(kinds: dict[str, Any]) -> list[Any]:
    out: list[Any] = []
    for kind in kinds:
        points = [*POINTS, *(MODES if "modes" in kind else [])]
        points += ["in accumulate"] if "accumulate" in kind else []
        out += itertools.product(
            [kind], points, (1, 2, 3, 5), (0, 1, 2), (Failure, Interrupt), *[(False, True)] * 3
        )
    return out


def check_case(
    kinds: dict[str, Any], kind: str, point: str, nth: int, recompute: int, error: Any,
    before: bool = False, first: bool = False, to_none: bool = True,
) -> None:  # fmt: skip
    """``before``: hooks on modules are there before they are sharded. ``first``: no step comes
    before the failure. ``to_none``: what zero_grad does."""
    results = []
    for on in (False, True):
        program = Program(kind, on, kinds[kind], recompute, before)
        results.append(program.run(point, nth, error, to_none, first))
    (failed, want), (fails, got) = results
    assert fails == failed
    compare(got, want)


def check_cases(kinds: dict[str, Any], chosen: list[Any]) -> None:
    for case in chosen:
        try:
            check_case(kinds, *case)
        except BaseException as error:
            error.add_note(str(case))
            raise


# what was wrong once
FOUND: list[Any] = [
    ("sharded 3", "in a block", 2, 0, Interrupt),
    ("sharded 2", "as the forward ends", 1, 0, Interrupt),
    ("sharded 3", "in a forward pre-hook", 2, 0, Failure, True),
    ("sharded 3", "in a block", 5, 1, Interrupt),
    ("sharded 3, whole results", "in a hook of a tensor", 2, 0, Failure),
    ("sharded 2, accumulate none", "as the forward begins", 3, 0, Interrupt, False, False, False),
    ("dp, whole results", "in a backward hook", 1, 0, Interrupt, False, True),
    ("dp, modes", "after the backward", 1, 0, Failure, False, False, False),
]
FOUND_4 = (
    "hsdp sharded 3, accumulate", "in a hook of a tensor", 3, 0, Failure, True, False, False,
)  # fmt: skip


@pytest.mark.parametrize("case", FOUND, ids=str)
@on_ranks(2)
def test_steps_after_failures_that_left_something(case):
    check_cases(KINDS, [case])


@pytest.mark.parametrize("number", range(3))
@on_ranks(2, timeout=120)
def test_steps_after_a_failure(number):
    check_cases(KINDS, part(cases(KINDS), 12)[number::3])


@on_ranks(4, timeout=120)
def test_steps_after_a_failure_on_four_ranks():
    check_cases(KINDS_4, [FOUND_4, FOUND_4, *part(cases(KINDS_4), 3)])
