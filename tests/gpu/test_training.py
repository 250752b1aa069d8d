"""Training on CUDA: every kind of parallelism gives the losses, gradients and parameters of one
process on the same device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard, pipeline
from tests.support.oracle import randint, randn
from tests.support.pool import on_ranks
from tests.support.training import EACH, adamw, check, compare, full, gradients, mlp, values

TP = {"0.*": [Shard(0)], "2.weight": [Shard(1)]}


def line() -> dt.ProcessMesh:
    return dt.ProcessMesh([0, 1], ("fsdp",), "cuda")


def model() -> nn.Module:
    return mlp().cuda()


class Recomputed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.last = mlp().cuda()[:4], nn.Linear(5, 1).double().cuda()
        self.dropout = dropout

    def forward(self, x):
        x = checkpoint(lambda x: F.dropout(self.inner(x), self.dropout), x, use_reentrant=False)
        return self.last(x)


@pytest.mark.parametrize("stage", [1, 2, 3, None])
@pytest.mark.parametrize("segments", [None, EACH])
@on_ranks(2)
def test_sharded_state(stage, segments):
    options = {"shard_axis": None} if stage is None else {"stage": stage}
    if segments is not None and stage is not None:
        options["segments"] = segments
    check(model, mesh=line(), optimizer=adamw, **options)


@on_ranks(2)
def test_sharded_state_with_recomputation():
    check(Recomputed, mesh=line(), stage=3, segments=["inner", "last"])


@on_ranks(2)
def test_tensor_parallelism():
    mesh, batches = line(), [randn(5, 6, seed=i) for i in range(3)]
    torch.manual_seed(0)
    plain = model()
    torch.manual_seed(0)
    ours = model()
    dt.shard_module(ours, mesh, TP)
    for net, xs in ((plain, batches), (ours, [dt.shard_tensor(b, mesh) for b in batches])):
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        for x in xs:
            opt.zero_grad()
            net(x).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
    compare((values(ours), gradients(ours)), (values(plain), gradients(plain)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@on_ranks(2)
def test_pipelines(schedule):
    stages = [dt.ProcessMesh([rank], ("x",), "cuda") for rank in range(2)]
    torch.manual_seed(0)
    plain = model()
    torch.manual_seed(0)
    ours = model()
    pipeline.split(ours, stages)
    batches = [randn(4, 6, seed=i) for i in range(4)]
    losses = {}
    for net in (plain, ours):
        is_ours = net is ours

        def loss_on(x, net=net, is_ours=is_ours):
            return net(dt.shard_tensor(x, stages[0]) if is_ours else x).square().mean() / 4

        if is_ours:
            shares = pipeline.run(loss_on, batches, schedule, stages=stages)
            losses[is_ours] = [dt.broadcast_value(s).item() for s in shares]
        else:
            shares = [loss_on(x) for x in batches]
            [s.backward() for s in shares]
            losses[is_ours] = [s.item() for s in shares]
        torch.optim.SGD(net.parameters(), lr=0.5).step()
    torch.testing.assert_close(losses[True], losses[False])
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        compare(a.detach().full_tensor(everywhere=True), b.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_autocast_and_loss_scaling(dtype):
    mesh, x = line(), randn(6, 6, dtype=torch.float32)
    losses = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        net = mlp(torch.float32).cuda()
        if is_ours:
            dt.shard_data_parallel(net, mesh, stage=2)
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        given = dt.shard_tensor(x, mesh, [Shard(0)]) if is_ours else x
        mine = []
        for _ in range(3):
            opt.zero_grad()
            with torch.autocast("cuda", dtype):
                loss = net(given).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            mine.append(full(loss).item())
        losses.append(mine)
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("policy", ["gather", "ring", "heads"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(2)
def test_attention_over_a_split_sequence(policy, dtype):
    """On CUDA the blocks of a ring are ordinary matrix products."""
    mesh = line()
    whole = [randn(2, 4, 10, 8, seed=i).to(dtype).requires_grad_() for i in range(3)]
    split = [dt.shard_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in whole]
    mask = randn(10, 10).tril() != 0
    for options in ({"is_causal": True}, {"attn_mask": mask}, {}):
        results = []
        for given in (whole, split):
            with dt.attention.policy(policy):
                out = F.scaled_dot_product_attention(*given, **options)
            out.sin().sum().backward()
            results.append([full(out), *[full(x.grad) for x in given]])
            for x in given:
                x.grad = None
        compare(results[1], results[0], 1e-9 if dtype == torch.float64 else 3e-2)


@on_ranks(2)
def test_losses_over_a_split_vocabulary():
    mesh = line()
    x, target = randn(6, 7), randint(0, 7, (6,))
    plain = x.clone().requires_grad_()
    want = F.cross_entropy(plain, target)
    want.backward()
    ours = dt.shard_tensor(x, mesh, [Shard(1)]).requires_grad_()
    loss = F.cross_entropy(ours, dt.shard_tensor(target, mesh, [Replicate()]))
    loss.backward()
    compare((full(loss), full(ours.grad)), (want.detach(), plain.grad))


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@on_ranks(2)
def test_hooks_and_custom_functions_in_the_backward():
    """Autograd runs the backward of CUDA tensors in a thread of its own."""
    mesh, seen = line(), []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 2 + 0 * x

    x = dt.shard_tensor(randn(5, 3), mesh, [Shard(0)]).requires_grad_()
    y = Double.apply(x.sin())
    y.register_hook(lambda g: seen.append(g.placements))
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
    y.sum().backward()
    assert len(seen) == 2
    compare(full(x.grad), 2 * randn(5, 3).cos())
    with pytest.raises(RuntimeError, match="from a hook"):
        z = (x * 3).sin()
        z.register_hook(lambda g: (_ for _ in ()).throw(RuntimeError("from a hook")))
        z.sum().backward()
    x.grad = None
    x.sin().sum().backward()
    compare(full(x.grad), randn(5, 3).cos())
