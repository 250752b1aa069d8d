"""Calls that draw random numbers, or communicate in a way of their own, in compiled programs: no
graph ends at them, and they give the bits of eager calls."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import disttensor as dt
from disttensor import Partial, Replicate, Shard, attention
from tests.support.oracle import randn
from tests.support.pool import on_ranks, run_on_ranks
from tests.trace.test_compile import compiled
from tests.trace.test_compile import pytestmark as ignored
from tests.trace.test_replay import mesh_of
from tests.trace.twins import agree

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
pytestmark = [*ignored, pytest.mark.limit(250)]
worlds = pytest.mark.parametrize(("n", "backend"), [(2, "eager"), (4, "aot_eager")])


def fed_with(mesh, *tensors):
    """Returns what makes the arguments of a call; ``tensors``: (shape, placements)."""
    numbers = [randn(*shape, seed=i, dtype=torch.float32) for i, (shape, _) in enumerate(tensors)]

    def make():
        pairs = zip(numbers, tensors, strict=True)
        return [dt.shard_tensor(x, mesh, at).requires_grad_() for x, (_, at) in pairs]

    return make


def same(function, backend, *tensors, around=nullcontext):
    """Compares compiled calls of a function with eager ones."""
    batch = fed_with(mesh_of(dist.get_world_size()), *tensors)
    fast = agree(lambda: function, batch, batch, batch, through=compiled(backend), around=around)
    assert fast.breaks() == [] and fast.why() == []


def drawing(x):
    F.dropout(x, 0.5)  # draws, too
    y = F.dropout(x, 0.5) * F.dropout(x, 0.5) + F.alpha_dropout(x.sin(), 0.3, True).cos()
    y = y + F.dropout1d(x, 0.5) + F.rrelu(x, training=True) * torch.bernoulli(x.sigmoid())
    return y + torch.rand_like(x) + torch.normal(x, 1.0)


def drawing_for_replicas(x):
    pending = (x @ x.mT).redistribute(placements=[R, Partial()])
    return F.dropout(pending, 0.5), F.dropout(x.redistribute(placements=[R, R]).sin(), 0.5)


def draw(backend):
    same(drawing, backend, ((5, 6), (S0, S1)))
    invariant = lambda: dt.random.rng("invariant")  # noqa: E731
    same(drawing_for_replicas, backend, ((5, 6), (R, S1)), around=invariant)


@worlds
def test_random_numbers(n, backend):
    run_on_ranks(n, draw, backend, timeout=200)


def windows(x, w):
    y = F.conv2d(x.sin(), w, padding=1, stride=2).relu()
    return F.conv2d(y, w, padding=1) + F.instance_norm(y)


def slide(backend):
    same(windows, backend, ((3, 2, 9, 5), (S0, S2)), ((2, 2, 3, 3), (R, R)))


@worlds
def test_images_split_where_a_window_slides(n, backend):
    run_on_ranks(n, slide, backend, timeout=200)


def attending(q, k, v):
    causal = F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True) * 2
    return F.scaled_dot_product_attention(q, causal, v)


def attending_with_dropout(q):
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)


def attend(backend):
    qkv = [((2, 4, 7, 8), (S0, S2))] * 3
    for policy in ("ring", "heads"):
        same(attending, backend, *qkv, around=lambda policy=policy: attention.policy(policy))
    same(attending_with_dropout, backend, qkv[0], around=lambda: attention.policy("ring"))


@worlds
def test_attention_over_a_split_sequence(n, backend):
    run_on_ranks(n, attend, backend, timeout=200)


def reduce(backend):
    same(lambda x: x.logsumexp(1) + x.amax(1) - x.amin(1), backend, ((5, 6), (S0, S1)))


@worlds
def test_reductions_with_a_backward_of_their_own(n, backend):
    run_on_ranks(n, reduce, backend, timeout=200)


def lower(q, w):
    return F.scaled_dot_product_attention(q.sin(), q.cos() @ w, q.exp(), dropout_p=0.3)


@on_ranks(2, timeout=200)
def test_autocast_holds_inside_of_a_call():
    """In the forward: a compiled backward runs without autocast, wherever it is called."""
    batch = fed_with(mesh_of(2), ((2, 4, 7, 8), (R, S1)), ((8, 8), (R, R)))
    around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    through = compiled("aot_eager")
    fast = agree(lambda: lower, batch, batch, batch, through=through, around=around, backward=False)
    assert fast.breaks() == [] and fast.why() == []


@on_ranks(2, timeout=200)
def test_large_products_are_products_of_torch():
    """A compiled program does not overlap their backward by nodes of its own."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    function = lambda x, w: F.linear(x.redistribute(placements=[R, R]), w)  # noqa: E731
    same(function, backend, ((64, 512), (R, S0)), ((512, 512), (R, S0)))
    assert graphs and not any("disttensor.call" in text for text in graphs)


@pytest.mark.filterwarnings("ignore")  # inductor warns of torch's own code
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a compiler")
@on_ranks(2, timeout=200)
def test_inductor_draws_the_same_numbers_and_keeps_what_a_backward_needs():
    """It writes to memory that the program has no more use for: of q, k, v and the result."""

    def function(x, w):
        q = F.dropout(x.sin(), 0.5) @ w
        out = F.scaled_dot_product_attention(q * 2, q * 3, q + 1, dropout_p=0.3)
        return (out * 3 + 1).tanh() * 2

    batch = fed_with(mesh_of(2), ((2, 4, 7, 8), (R, S2)), ((8, 8), (R, R)))
    torch._dynamo.reset()
    fast = dt.compile(function)
    for _ in range(3):
        found = []
        for call in (function, fast):
            dt.manual_seed(3)
            given = batch()
            with attention.policy("ring"):
                out = call(*given)
            out.square().sum().backward()
            found.append([out.full_tensor(), *[x.grad.full_tensor() for x in given]])
        for got, want in zip(found[1], found[0], strict=True):
            # inductor's sine and exponential differ in last bits, of values as large as the largest
            scale = want.abs().max().item()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6 * scale)
    assert fast.replays == 2 and not fast.breaks()
