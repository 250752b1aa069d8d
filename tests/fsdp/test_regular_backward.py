"""Backwards that start at a regular tensor gather the segments of fully_shard again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import DistTensor, Partial, Shard
from disttensor.comm.log import record_comms
from disttensor.fsdp import engine
from tests.support.oracle import line, randn
from tests.support.pool import on_ranks
from tests.support.training import full

ROWS = randn(8, 4, seed=1)


class Kernel(nn.Linear):
    """A linear layer with a kernel of its own, on regular tensors."""

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight, self.bias
        if isinstance(w, DistTensor):
            w, b = (t.to_local(grad_placements=[Partial()]) for t in (w, b))
        self.seen = F.linear(x, w * w, b).sum()
        return F.linear(x, w, b)


class Whole(nn.Linear):
    """A linear layer that reads its parameters by ``full_tensor``."""

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight, self.bias
        if isinstance(w, DistTensor):
            w, b = (t.full_tensor(grad_placements=[Partial()]) for t in (w, b))
        return F.linear(x, w, b)


def mine(x: Tensor) -> Tensor:
    mesh = line()
    return x.chunk(mesh.size)[mesh.get_rank()]


def by_grad(model: Any, x: Tensor) -> None:
    params = list(model.parameters())
    loss = torch.vmap(model)(x).square().sum()
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g


def twice(model: Any, x: Tensor) -> None:
    loss = torch.vmap(model)(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def by_attribute(model: Any, x: Tensor) -> None:
    model(x)
    (model[0].seen + model[2].seen).backward()


def by_input(transform: Callable[..., Any]) -> Callable[[Any, Tensor], Tensor]:
    return lambda model, x: transform(lambda row: model(row).square().sum())(x[0])


# Name -> the class of the layers, whether each rank has its own rows, the program; its result
CASES: dict[str, tuple[Any, bool, Callable[[Any, Tensor], Any]]] = {
    "to_local": (Kernel, True, lambda m, x: m(x).square().sum().backward()),
    "full_tensor": (Whole, True, lambda m, x: m(x).square().sum().backward()),
    "attribute": (Kernel, True, by_attribute),
    "edge": (Kernel, True, lambda m, x: torch.autograd.backward(m(x), torch.ones(x.shape[0], 3))),
    "vmap": (nn.Linear, False, lambda m, x: torch.vmap(m)(x).square().sum().backward()),
    "vmap and grad": (nn.Linear, False, by_grad),
    "vmap, twice": (nn.Linear, False, twice),
    "grad of the input": (nn.Linear, False, by_input(torch.func.grad)),
    "jacrev of the input": (nn.Linear, False, by_input(torch.func.jacrev)),
}


def trained(case: str, shard: Callable[[Any], object] | None) -> list[Any]:
    layer, own, run = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(layer(4, 8), nn.Tanh(), layer(8, 3)).double()
    if shard is not None:
        shard(model)
    out = [run(model, mine(ROWS) if own and shard is not None else ROWS) for _ in range(2)]
    grads = [*(p.grad for p in model.parameters()), out[-1]]
    return [g.full_tensor() if isinstance(g, DistTensor) else g for g in grads]


@on_ranks(2)
def test_a_backward_from_a_regular_tensor_gathers_the_segments():
    wrong = []
    for case in CASES:
        want = trained(case, None)
        for options in ({}, {"segments": ["0", "2"]}):
            got = trained(case, lambda m, o=options: dt.fully_shard(m, mesh=line(), **o))
            for here, plain in zip(got, want, strict=True):
                both = here is not None and plain is not None
                if not (torch.allclose(here, plain) if both else here is plain):
                    wrong.append(f"{case} {options}: {here}, plain {plain}")
    assert not wrong, "\n".join(wrong)


def in_thread(run: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run, *args).result()


def summed(out: Tensor) -> Tensor:
    return out.square().sum()


# Name -> the forward and the backward of a model, in one thread or two
THREADS: dict[str, Callable[[Any, Tensor], None]] = {
    "one other": lambda m, x: in_thread(lambda: summed(m(x)).backward()),
    "forward in another": lambda m, x: summed(in_thread(m, x)).backward(),
    "backward in another": lambda m, x: in_thread(summed(m(x)).backward),
    "loss in another": lambda m, x: in_thread(summed, m(x)).backward(),
}


@on_ranks(2)
def test_forward_and_backward_run_in_any_threads():
    wrong = []
    for case, run in THREADS.items():
        grads = []
        for shard in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Kernel(4, 8), nn.Tanh(), Kernel(8, 3)).double()
            if shard:
                dt.fully_shard(model, mesh=line(), segments=["0", "2"])
                x = torch.ones(1, requires_grad=True)
                for _ in range(20 * dist.get_rank()):  # numbers differ between ranks
                    x = x + 1
                model(mine(ROWS))
            run(model, mine(ROWS) if shard else ROWS)
            grads.append([full(p.grad) for p in model.parameters()])
        if not all(map(torch.allclose, *grads)):
            wrong.append(case)
    assert not wrong


@on_ranks(2)
def test_a_graph_of_forwards_in_two_threads_is_refused():
    model = dt.fully_shard(nn.Linear(4, 8).double(), mesh=line())
    loss = summed(model(ROWS)) + summed(in_thread(model, ROWS))
    with pytest.raises(RuntimeError, match="forwards ran in several threads"):
        loss.backward()
    summed(model(ROWS)).backward()


@on_ranks(2)
def test_a_backward_of_one_rank_in_its_own_thread_gathers_nothing():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).double()
    dt.fully_shard(model, mesh=line())

    def fit() -> None:
        x = torch.ones(3, requires_grad=True)
        for _ in range(200):  # its nodes have the numbers of the forward's, too
            x = x + 1
        x.sum().backward()

    loss = in_thread(lambda: summed(model(ROWS)))
    if dist.get_rank() == 0:
        with record_comms() as calls:
            in_thread(fit)
        assert not calls
    loss.backward()


@on_ranks(2)
def test_a_backward_that_fails_in_a_thread_of_one_rank_ends_no_other():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(5, 3)).double()
    dt.fully_shard(model, mesh=line(), segments=["0", "1", "2"])

    def fail(_: Tensor) -> None:
        raise ValueError("of the thread")

    def fit() -> None:
        x = torch.ones(3, requires_grad=True)
        x.register_hook(fail)
        x.sum().backward()

    def meanwhile(_: DistTensor) -> None:
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="of the thread"):
                in_thread(fit)

    out = model[1](model[0](ROWS))
    out.register_hook(meanwhile)
    summed(model[2](out)).backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_a_forward_begins_while_a_thread_of_one_rank_runs_a_backward():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).double()
    dt.fully_shard(model, mesh=line())
    summed(model(ROWS)).backward()
    reached, ended = Event(), Event()

    def fit() -> None:
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda _: (reached.set(), ended.wait(), None)[-1])
        x.sum().backward()

    with ThreadPoolExecutor(1) as threads:
        found = None
        if dist.get_rank() == 0:
            found = threads.submit(fit)
            reached.wait()
        loss = summed(model(ROWS))
        ended.set()
        if found is not None:
            found.result()
    loss.backward()


@on_ranks(2)
def test_a_region_of_one_rank_in_its_own_thread_gathers_nothing():
    """A plain checkpointed region, whose forward runs while that of the model does."""
    region: list[Tensor] = []

    def fit() -> None:
        x = torch.ones(3, requires_grad=True)
        region.append(checkpoint(torch.exp, x, use_reentrant=False).sum())

    def meanwhile(*_: Any) -> None:
        if dist.get_rank() == 0 and not region:
            in_thread(fit)

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).double()
    dt.fully_shard(model, mesh=line(), segments=["0", "1"])
    model[0].register_forward_hook(meanwhile, prepend=True)
    loss = summed(model(ROWS))
    if dist.get_rank() == 0:
        in_thread(region[0].backward)
    loss.backward()


@on_ranks(4)
def test_the_gradient_of_a_piece_of_one_column_has_the_strides_of_its_parameter():
    wrong = []
    for columns in (line().size, 3, 8):
        model = nn.Linear(columns, 6)
        placements = {2: Shard(1), 1: Shard(0)}
        dt.fully_shard(model, mesh=line(), shard_placement_fn=lambda p: placements[p.ndim])
        for _ in range(2):
            model(torch.ones(8, columns)).square().sum().backward()
            p = model.weight
            if p.grad.stride() != p.stride() or not p.grad.is_contiguous():
                wrong.append((columns, p.grad.stride()))
    assert not wrong


@on_ranks(2)
def test_engines_of_modules_that_are_gone_leave_nothing_behind():
    gc.collect()
    before = len(engine._ENGINES)
    for _ in range(3):
        model = nn.Linear(2, 2)
        dt.fully_shard(model, mesh=line())
        del model
    gc.collect()
    assert len(engine._ENGINES) == before
