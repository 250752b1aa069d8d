"""The gradient of what several ranks read is reduced while gradients of weights are computed: what
happens in which order, and that nothing else changes."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.autograd import grad_types
from disttensor.comm import collectives
from disttensor.comm.work import Work
from tests.support.oracle import check_program, grid, line, place, randn
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS, WIDTH = 96, 192  # a gradient of this size is worth it


@contextmanager
def events(*named):
    """What happens in a backward: what begins and is waited for, and gradients of these leaves."""
    seen, start, wait = [], collectives.start, Work.wait

    def started(kind, *args, **options):
        seen.append(kind)
        return start(kind, *args, **options)

    def waited(work):
        seen.append("wait")
        return wait(work)

    handles = [
        leaf.local.register_hook(lambda _, i=i: seen.append(i)) for i, leaf in enumerate(named)
    ]
    waits = mock.patch.object(Work, "wait", waited)
    with mock.patch.object(collectives, "start", started), waits:
        yield seen
    for handle in handles:
        handle.remove()


def leaf(*shape, seed=0, layout=R, dtype=torch.float64):
    return place(randn(*shape, seed=seed, dtype=dtype), line(), [layout]).requires_grad_()


def weights(n, rows=10):
    return [leaf(rows, WIDTH, seed=i, layout=S0) for i in range(n)]


def ones():
    return torch.ones(10, dtype=torch.float64)


CALLS = {
    "linear": lambda h, w: F.linear(h, w),
    "a bias": lambda h, w: F.linear(h, w, ones()),
    "matmul": lambda h, w: h @ w,
    "mm": lambda h, w: torch.mm(h, w),
    "addmm": lambda h, w: torch.addmm(ones(), h, w),
    "of a view": lambda h, w: F.linear(h.view(2, -1, WIDTH), w),
    "written to": lambda h, w: F.linear(h, w).mul_(2),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_a_weight_gradient_beside_the_reduction(name):
    turned = name in ("matmul", "mm", "addmm")
    x, w = leaf(ROWS, WIDTH), leaf(10, WIDTH, layout=S0)
    if turned:
        w = leaf(WIDTH, 10, layout=S1)
    out = CALLS[name](x.tanh(), w).square().sum()
    with events(w) as seen, dt.debugging.record_comms() as log:
        out.backward()
    assert seen == ["all_reduce", 0, "wait"]
    (record,) = log
    assert (record.kind, record.bytes, record.background) == ("all_reduce", ROWS * WIDTH * 8, True)
    assert "backward, overlapped" in str(log)


@on_ranks(2)
def test_several_products_share_one_reduction():
    """q, k and v, each with calls after it."""
    x, ws = leaf(ROWS, WIDTH), weights(3)
    h = x.tanh()
    parts = [F.linear(h, w).view(ROWS, 2, 5).transpose(0, 1) for w in ws]
    with events(*ws) as seen:
        sum(p.sin().sum() for p in parts).backward()
    assert seen == ["all_reduce", 2, 1, 0, "wait"]


@on_ranks(2)
def test_more_products_than_there_is_room_for():
    x, ws = leaf(ROWS, WIDTH), weights(6)
    h = x.tanh()
    with events(*ws) as seen:
        sum(F.linear(h, w).sin().sum() for w in ws).backward()
    assert seen == [5, 4, "all_reduce", 3, 2, 1, 0, "wait"]


@on_ranks(2)
def test_the_backward_of_a_gather_begins_ahead():
    """Sequence parallelism: the reduce-scatter of what was gathered."""
    x, w = leaf(ROWS, 2 * WIDTH, layout=S0), leaf(10, 2 * WIDTH, layout=S0)
    out = F.linear(dt.reshard(x.tanh(), line(), [R]), w).square().sum()
    with events(w) as seen, dt.debugging.record_comms() as log:
        out.backward()
    assert seen == ["reduce_scatter", 0, "wait"]
    assert log.counts() == {"reduce_scatter": 1}


def block(x, norm, gate, up, down):
    """A gated block, whose input is used again."""
    h = F.layer_norm(x, x.shape[-1:], norm)
    return (x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)).square().mean()


# 7: over four ranks 2, 2, 2, 1; 2: two of them have nothing
PARAMS = [((WIDTH,), R), ((7, WIDTH), S0), ((7, WIDTH), S0), ((WIDTH, 7), S1)]


def params(hidden=7, over=()):
    sizes = [tuple(hidden if n == 7 else n for n in shape) for shape, _ in PARAMS]
    layouts = [[*over, p] for _, p in PARAMS]
    return [(randn(*s, seed=sum(s)), p) for s, p in zip(sizes, layouts, strict=True)]


def program(x, *weights):
    return block((x * 1.5).tanh(), *weights)


@pytest.mark.parametrize("hidden", [7, 2, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_values_and_gradients(world, hidden):
    on_ranks(world)(_values_and_gradients)(hidden)


def _values_and_gradients(hidden):
    for rows in (ROWS, ROWS + 1):
        leaves = [(randn(rows, WIDTH, seed=9), [R]), *params(hidden)]
        check_program(program, leaves, mesh=line(), steps=2)
    if torch.distributed.get_world_size() == 4:
        for rows in (2 * ROWS, 2 * ROWS + 1):
            leaves = [(randn(rows, WIDTH, seed=9), [S0, R]), *params(hidden, [R])]
            check_program(program, leaves, mesh=grid(), steps=2)


def leaves(hidden=8):
    placed = [(randn(ROWS, WIDTH, seed=9), [R]), *params(hidden)]
    return [place(t, line(), p).requires_grad_() for t, p in placed]


def gradients(run):
    """What ``run(*leaves)`` leaves behind, on this rank, and what it sent."""
    ours = leaves()
    with dt.debugging.record_comms() as log:
        run(*ours)
    return [t.grad.to_local() for t in ours], [(r.kind, r.axis, r.bytes, r.phase) for r in log]


def both_ways(run):
    """With reductions that begin ahead, and without."""
    ahead = run()
    with mock.patch.object(grad_types, "reduction", lambda *_: None):
        grad_types.transition_between.cache_clear()  # what begins is decided once
        apart = run()
    grad_types.transition_between.cache_clear()
    return ahead, apart


def retained(*ours):
    loss = program(*ours)
    loss.backward(retain_graph=True)
    loss.backward()


def some_only(*ours):
    loss = program(*ours)
    for inputs in (ours[2:3], ours[:1], ours[1:]):
        loss.backward(inputs=list(inputs), retain_graph=True)


def hooked(*ours):
    h = (ours[0] * 1.5).tanh()
    h.register_hook(lambda g: g * 3)
    ours[2].register_hook(lambda g: g * 2)
    block(h, *ours[1:]).backward()


def checkpointed(*ours):
    def part(h, *weights):
        return block(h.tanh(), *weights)

    loss = checkpoint(part, ours[0] * 1.5, *ours[1:], use_reentrant=False)
    checkpoint(part, ours[0] * loss, *ours[1:], use_reentrant=False).backward()


RUNS = {
    "a backward": lambda *ours: program(*ours).backward(),
    "retain_graph": retained, "inputs": some_only, "hooks": hooked, "checkpoint": checkpointed,
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
@on_ranks(2)
def test_nothing_else_changes(name):
    """The bits of the gradients, and what is sent."""
    (ahead, sent), (alone, as_before) = both_ways(lambda: gradients(RUNS[name]))
    assert all(map(torch.equal, ahead, alone))
    assert sent == as_before and ("all_reduce", "x", ROWS * WIDTH * 8, "backward") in sent


@on_ranks(2)
def test_autocast():
    """Products are in bfloat16, and so are their gradients."""
    x, w = (
        leaf(4 * ROWS, WIDTH, dtype=torch.float32),
        leaf(10, WIDTH, layout=S0, dtype=torch.float32),
    )

    def run():
        x.grad = w.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(x.tanh(), w)
        assert out.dtype == torch.bfloat16
        with events(w) as seen:
            out.float().square().sum().backward()
        return seen, x.grad.to_local().clone(), w.grad.to_local().clone()

    ahead, alone = both_ways(run)
    assert ahead[0] == ["all_reduce", 0, "wait"] and alone[0] == [0]
    assert all(map(torch.equal, ahead[1:], alone[1:]))


@on_ranks(2)
def test_second_derivatives():
    """They take the way through the Move, as plain tensors do."""

    def second(*ours):
        grads = torch.autograd.grad(program(*ours), ours, create_graph=True)
        return sum(g.square().sum() for g in grads)

    placed = [(randn(ROWS, WIDTH, seed=9), [R]), *params()]
    check_program(second, placed, mesh=line())


@on_ranks(2)
def test_what_is_not_worth_it_is_as_before():
    x, w = leaf(4, 6), leaf(10, 6, layout=S0)
    out = F.linear(x.tanh(), w).square().sum()
    with events(w) as seen:
        out.backward()
    assert seen == [0]
