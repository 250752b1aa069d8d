"""shard_data_parallel: kinds of modules, and several of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import (
    EACH,
    S0,
    check,
    compare,
    engine,
    full,
    gradients,
    line,
    mlp,
    squares,
    stages,
    train,
    ways,
)


@on_ranks(2)
def test_frozen_segments_are_freed_in_the_backward():
    def make():
        m = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]).double()
        m[1:].requires_grad_(False)
        return m

    for make_ in (make,):
        m = make_()
        dt.shard_data_parallel(m, line(), segments=[str(i) for i in range(8)])
        most = [0]
        e = engine(m)
        from disttensor.fsdp.all_gather_buffer import AllGatherBuffer

        old = AllGatherBuffer.finish

        def finish(self):
            old(self)
            most[0] = max(most[0], sum(b.is_gathered for s in e.segments for b in s.buffers))

        AllGatherBuffer.finish = finish
        try:
            for _i in range(3):
                most[0] = 0
                squares(m, dt.shard_tensor(randn(5, 6), line(), [S0]))
        finally:
            AllGatherBuffer.finish = old
        assert most[0] <= 2, most


@stages
@on_ranks(2)
def test_batch_norm(stage):
    def make():
        return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)).double()

    check(make, mesh=line(), segments=["0", "1", "2"], **ways(stage))


@stages
@on_ranks(2)
def test_two_modules(stage):
    """GAN-like"""

    class Both(nn.Module):
        def __init__(s):
            super().__init__()
            s.a = mlp()
            s.b = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 3)).double()

        def forward(s, x):
            return s.b(s.a(x)) + s.b(s.a(x * 2).detach())

    torch.manual_seed(0)
    plain = Both()
    torch.manual_seed(0)
    m = Both()
    dt.shard_data_parallel(m.a, line(), segments=EACH, **ways(stage))
    dt.shard_data_parallel(m.b, line(), segments=["0", "2"], **ways(stage))
    bs = [randn(5, 6, seed=i) for i in range(3)]
    want = train(plain, squares, bs)
    got = train(m, squares, [dt.shard_tensor(b, line(), [S0]) for b in bs])
    compare(got, want)


@stages
@on_ranks(2)
def test_child_only(stage):
    torch.manual_seed(0)
    plain = mlp()
    torch.manual_seed(0)
    m = mlp()
    dt.shard_data_parallel(m[2], line(), **ways(stage))
    dt.shard_module(m, line(), {})
    bs = [randn(5, 6, seed=i) for i in range(3)]
    want = train(plain, squares, bs)

    def sq(model, x):
        loss = squares(model, x)
        dt.sync_gradients(model)
        return loss

    got = train(m, sq, [dt.shard_tensor(b, line(), [S0]) for b in bs])
    compare(got, want)


@stages
@on_ranks(2)
def test_ddp_style_methods(stage):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.net = mlp()
            s.w = nn.Parameter(torch.randn(6, 6).double())

        def loss(s, x):
            return s.net(F.linear(x, s.w)).square().sum()

    def step(m, x):
        loss = m.loss(x)
        loss.backward()
        return loss

    check(M, step, mesh=line(), segments=["net.0", "net.2"], **ways(stage))


@stages
@on_ranks(2)
def test_rnn_mha(stage):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.mha = nn.MultiheadAttention(6, 2, batch_first=True)
            s.t = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)

        def forward(s, x):
            return s.t(s.mha(x, x, x, need_weights=False)[0])

    check(
        lambda: M().double(),
        mesh=line(),
        shape=(5, 3, 6),
        segments=dt.fsdp.SegmentBySize(1e-6),
        **ways(stage),
    )


@stages
@on_ranks(2)
def test_empty_param(stage):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.net = mlp()
            s.e = nn.Parameter(torch.zeros(0, 6).double())
            s.s = nn.Parameter(torch.tensor(2.0).double())

        def forward(s, x):
            return s.net(x) * s.s + s.e.sum()

    check(M, mesh=line(), **ways(stage))


@stages
@on_ranks(2)
def test_clip(stage):
    def step(m, x):
        loss = squares(m, x)
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        return loss

    check(mlp, step, mesh=line(), segments=EACH, **ways(stage))


@stages
@on_ranks(2)
def test_write_in_forward(stage):
    """Autograd counts the one, and not the other."""

    def clamp(p):
        with torch.no_grad():
            p.clamp_(-0.1, 0.1)

    for write in (clamp, lambda p: p.data.clamp_(-0.1, 0.1)):

        class M(nn.Linear):
            change = staticmethod(write)

            def forward(s, x):
                s.change(s.weight)
                return super().forward(x)

        def make(M=M):
            return nn.Sequential(M(6, 6), nn.Tanh(), M(6, 5)).double()

        if stage is None:
            check(make, mesh=line(), segments=["0", "2"], **ways(stage))
            continue
        m = dt.shard_data_parallel(make(), line(), segments=["0", "2"], **ways(stage))
        with pytest.raises(RuntimeError, match="wrote to one of its parameters"):
            m(dt.shard_tensor(randn(5, 6), line(), [S0]))
        shards = [p.sharded_param for s in engine(m).segments for p in s.params]
        assert all(p is q for p, q in zip(m.parameters(), shards, strict=True))


@stages
@on_ranks(2)
def test_autocast(stage):
    m = dt.shard_data_parallel(mlp().float(), line(), segments=EACH, **ways(stage))
    p = mlp().float()
    with torch.no_grad():
        for a, b in zip(p.parameters(), m.parameters(), strict=False):
            a.copy_(full(b))
    x = randn(5, 6).float()

    def step(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(x).float().square().sum()
        loss.backward()
        return loss

    step(p, x)
    step(m, dt.shard_tensor(x, line(), [S0]))
    compare(gradients(m), gradients(p), 3e-2)
