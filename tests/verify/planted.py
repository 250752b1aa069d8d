"""Training programs in which bugs can be planted: ``python -m tests.verify.planted NAME ...``
prints what ``dt.verify`` says about ``program`` or ``program.bug``, a line of JSON for each name.

A program without a bug computes on its ranks what one process computes. Each bug has the words that
name its place, and the words that name its kind.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import disttensor as dt

PROGRAMS = {}  # name: function of a bug, ranks, (place, kind) of each bug
STEPS = 3


def program(world=2, **bugs):
    def register(fn):
        PROGRAMS[fn.__name__] = fn, world, bugs
        return fn

    return register


def names():
    """All runs: of programs without a bug, and of each bug."""
    return [
        n for name, (_, _, bugs) in PROGRAMS.items() for n in (name, *(f"{name}.{b}" for b in bugs))
    ]


def start():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def batches(rows=8, width=6, steps=STEPS):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(rows, width, generator=g), torch.randint(3, (rows,), generator=g)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def rows_of(rank, world, rows=8):
    """Uneven: 5 and 3 rows of 8 on two ranks."""
    first = -(-rows // world) + (world > 1)
    bounds = [0, *range(first, rows, max((rows - first) // max(world - 1, 1), 1)), rows]
    return slice(bounds[rank], bounds[rank + 1] if rank < world - 1 else rows)


# Plain torch.distributed: replicas ----------------------------------------------------------------


@program(
    world=4,
    factor=("step 1, gradient: the gradient of 0.weight", "4 times that of one process"),
    left_out=("step 1, gradient: the gradient of 3.bias", "the mean over the ranks is that of one"),
    stops=("step 2, gradient: the gradient of 0.weight", "the mean over the ranks is that of one"),
    own_start=("step 1, weights: the initial value of 0.weight", "replicas have drifted apart"),
    own_rate=("step 1, update: 0.weight after the step", "replicas have drifted apart"),
    no_step=("step 2, update: 0.weight after the step", "it is the value of the step before"),
    frozen=("step 1, gradient: the gradient of 2.weight", "rank 3 has none"),
    same_rows=("step 1, input: (Sequential) input 0", "the batches differ"),
    group_left_out=("step 1, update: 2.weight after the step", "the value of the step before"),
)  # fmt: skip
def replicas(bug):
    """Each rank has its rows, and the mean of all gradients is taken by hand."""
    rank, world = start()
    if bug == "own_start":
        torch.manual_seed(rank)
    net = mlp()
    params = [*net.parameters()]
    if bug == "group_left_out" and world > 1:  # the norm
        params = [*net[0].parameters(), *net[3].parameters()]
    lr = 0.1 * (1 + (bug == "own_rate" and rank == 1))
    optimizer = torch.optim.AdamW(params, lr=lr)
    net[2].weight.requires_grad_(not (bug == "frozen" and rank == 3))
    for step, (x, y) in enumerate(batches()):
        mine = (
            slice(0, 2)
            if bug == "same_rows" and rank == 1
            else slice(rank * 8 // world, (rank + 1) * 8 // world)
        )
        F.cross_entropy(net(x[mine]), y[mine]).backward()
        for p in net.parameters():
            if (bug == "left_out" and p is net[3].bias) or (bug == "stops" and step):
                continue
            if bug == "frozen" and p is net[2].weight:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad)
                grad /= world
                continue
            dist.all_reduce(p.grad)
            p.grad /= 1 if bug == "factor" else world
        optimizer.param_groups[0]["lr"] = 0.0 if bug == "no_step" and step and rank == 2 else lr
        optimizer.step()
        optimizer.zero_grad()


@program(
    own_mean=("step 1, loss: the loss", "the sum over the ranks is"),
    shares=("step 1, loss: the loss", "the sum over the ranks is"),
)
def uneven(bug):
    """A rank has 5 rows, the other has 3. Losses are sums over the rows of a rank, divided by the
    number of all rows."""
    rank, world = start()
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        mine = rows_of(rank, world)
        loss = F.cross_entropy(net(x[mine]), y[mine], reduction="sum") / len(x)
        if bug == "own_mean":
            loss = F.cross_entropy(net(x[mine]), y[mine]) / world
        if bug == "shares":
            loss = loss / world
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


class Sum(torch.autograd.Function):
    """The sum over the ranks, of the value or of the gradient."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_sum = backward
        x = x.clone()
        if forward:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if ctx.backward_sum:
            dist.all_reduce(g)
        return g, None, None


class Tied(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.body(self.embed(tokens)).tanh()
        if self.bug:  # the gradient of the head alone is reduced
            return F.linear(hidden, Sum.apply(self.head.weight, False, True))
        return self.head(hidden)


@program(tied_once=("step 1, gradient: the gradient of embed.weight", "rank 0 has"))
def tied(bug):
    """A weight is the embedding and the head."""
    rank, world = start()
    net = Tied(bug)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(11, (8, 5), generator=g)
        mine = tokens.chunk(world)[rank]
        F.cross_entropy(net(mine).flatten(0, 1), mine.flatten()).backward()
        for p in net.parameters():
            if not (bug == "tied_once" and p is net.embed.weight):
                dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        optimizer.zero_grad()


@program(
    world=4,
    not_sent=("step 1, update: 3.bias after the step", "it is the value of the step before"),
    old=("step 2, update: 0.weight after the step", "it is the value of the step before"),
)  # fmt: skip
def owners(bug):
    """Each rank steps some parameters, and sends them (ZeRO 1)."""
    rank, world = start()
    net = mlp()
    params = [*net.parameters()]
    own = params[rank::world]
    optimizer = torch.optim.AdamW(own, lr=0.1)
    for step, (x, y) in enumerate(batches()):
        F.cross_entropy(net(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
        for i, p in enumerate(params):
            dist.reduce(p.grad, i % world)
            p.grad /= world
        optimizer.step()
        net.zero_grad()
        for i, p in enumerate(params):
            if not (bug == "not_sent" and i == 5) and not (bug == "old" and i == 0 and step == 1):
                dist.broadcast(p.data, i % world)


# Plain torch.distributed: parts of layers and sequences ------------------------------------------


class ByColumns(nn.Module):
    """A part of the columns of a layer; its input is replicated."""

    def __init__(self, n, m, bug):
        super().__init__()
        whole = nn.Linear(n, m)
        self.weight = nn.Parameter(
            whole.weight.chunk(dist.get_world_size())[dist.get_rank()].clone()
        )
        self.bias = nn.Parameter(whole.bias.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.reduces = bug != "backward"

    def forward(self, x):
        return F.linear(Sum.apply(x, False, self.reduces), self.weight, self.bias)


class ByRows(nn.Module):
    """A part of the rows of a layer; its output is replicated."""

    def __init__(self, n, m, bug):
        super().__init__()
        whole = nn.Linear(n, m)
        part = whole.weight.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        self.weight, self.bias = (
            nn.Parameter(part.clone()),
            nn.Parameter(whole.bias.detach().clone()),
        )
        self.bug = bug

    def forward(self, x):
        if self.bug == "bias_of_each":
            return Sum.apply(F.linear(x, self.weight, self.bias), True, False)
        return Sum.apply(F.linear(x, self.weight), self.bug != "forward", False) + self.bias


class Block(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = ByColumns(6, 8, bug), ByRows(8, 6, bug)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


@program(
    forward=("step 1, forward: the output of 0.down (ByRows)", "rank 0 has"),
    bias_of_each=("step 1, forward: the output of 0.down (ByRows)", "rank 0 has"),
    backward=("step 1, backward: the gradient of the output of 1.norm (LayerNorm)", "a part of"),
    dropout=("step 1, forward: the output of 0.drop (Dropout)", "rank 1 has"),
    local_norm=("step 1, norm: the norm of the gradients", "rank 0 has"),
    scaled=("step 2, backward: the gradient of the output of 0.norm (LayerNorm)", "3 times that"),
)  # fmt: skip
def layers(bug):
    """Megatron's split of two layers."""
    rank, _ = start()
    net = nn.Sequential(Block(bug), Block(bug), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    split = [p for b in net[:2] for p in (b.up.weight, b.up.bias, b.down.weight)]
    torch.manual_seed(5 + (rank if bug == "dropout" else 0))
    for step, (x, y) in enumerate(batches()):
        F.cross_entropy(net(x), y).backward() if not (bug == "scaled" and step) else scaled(
            net, x, y
        )
        if bug == "local_norm":
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        else:
            whole = [p for p in net.parameters() if all(p is not q for q in split)]
            squares = sum(p.grad.square().sum() for p in split)
            dist.all_reduce(squares)
            norm = (squares + sum(p.grad.square().sum() for p in whole)).sqrt()
            nn.utils.clip_grads_with_norm_(net.parameters(), 0.5, norm)
        optimizer.step()
        optimizer.zero_grad()


def scaled(net, x, y):
    if dist.get_world_size() > 1:
        net[0].up.register_forward_hook(lambda m, i, o: o.register_hook(lambda g: 3 * g) and None)
    F.cross_entropy(net(x), y).backward()


class Gather(torch.autograd.Function):
    """Joins parts of the sequence; the gradient of a part is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.bug, self.old = bug, None

    def forward(self, x):
        rank, world = dist.get_rank(), dist.get_world_size()
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = Gather.apply(k), Gather.apply(v)
        if self.bug == "stale" and world > 1:
            v, self.old = v if self.old is None else self.old, v.detach()
        if self.bug == "other_rank" and world > 1:
            v = v.roll(x.shape[1], 1)
        at = torch.arange(q.shape[1]) + (0 if self.bug == "mask" else rank * q.shape[1])
        mask = at[:, None] >= torch.arange(k.shape[1])
        return self.out(F.scaled_dot_product_attention(q, k, v, mask))


class Decoder(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.attention, self.norm, self.head = Attention(bug), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.attention(x)))


@program(
    mask=("step 1, forward: the output of attention.out (Linear)", "rank 1 has"),
    other_rank=("step 1, forward: the output of attention.out (Linear)", "rank 0 has"),
    stale=("step 2, forward: the output of attention.out (Linear)", "rank 0 has"),
)
def sequence(bug):
    """Causal attention over a sequence that is split; keys and values are gathered."""
    rank, world = start()
    net = Decoder(bug)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(2, 8, 6, generator=g), torch.randint(3, (2, 8), generator=g)
        x, y = x.chunk(world, 1)[rank], y.chunk(world, 1)[rank]
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        optimizer.zero_grad()


# DDP, FSDP2, DTensor ------------------------------------------------------------------------------


@program(
    never_synced=("step 1, gradient: the gradient of 0.weight", "and was not taken"),
    batch_norm=("step 1, forward: the output of 2 (BatchNorm1d)", "rank 0 has"),
    divided=("step 1, backward, call 2: the gradient of the output of 3 (Linear)", "0.5 times"),
)  # fmt: skip
def ddp(bug):
    """A sampler gives the rows of a rank; two micro-batches."""
    _, world = start()
    net = mlp()
    if bug == "batch_norm":
        net[2] = nn.BatchNorm1d(8)
    net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=g), torch.randint(3, (24,), generator=g))
    loader = DataLoader(data, 4 // world, sampler=DistributedSampler(data, shuffle=True))
    for i, (x, y) in enumerate(loader):
        if i % 2 == 0 or bug == "never_synced":
            with net.no_sync():
                F.cross_entropy(net(x), y).backward()
        else:
            loss = F.cross_entropy(net(x), y)
            (loss / world if bug == "divided" else loss).backward()
        if i % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@program(
    divide_factor=("step 1, gradient: the gradient of 0.weight", "2 times that of one process"),
    ignored=("step 1, gradient: the gradient of 2.weight", "the mean over the ranks is that of"),
    one_shard=("step 2, update: 3.weight after the step", "rank 1 has"),
)  # fmt: skip
def fsdp(bug):
    rank, world = start()
    net = mlp()
    ignored = {net[2].weight, net[2].bias} if bug == "ignored" else set()
    fully_shard(net[0])
    fully_shard(net, ignored_params=ignored)
    if bug == "divide_factor":
        for m in (net[0], net):
            m.set_gradient_divide_factor(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches()):
        F.cross_entropy(net(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0) if not bug else None
        optimizer.step()
        if bug == "one_shard" and step == 1 and rank == 1:
            net[3].weight.to_local().detach().zero_()
        optimizer.zero_grad()


class Mlp(nn.Module):
    def __init__(self, bug=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.bug = bug

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@program(
    world=4,
    not_reduced=("step 1, gradient: the gradient of 0.norm.weight", "2 times that of one"),
)  # fmt: skip
def fsdp_and_tp(bug):
    """FSDP2 of layers that tensor parallelism has split."""
    rank, world = start()
    tp = min(world, 2)
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(Mlp(), Mlp())
    for m in net:
        parallelize_module(m, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(m, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for x, _ in batches():
        net(x.chunk(world // tp)[rank // tp]).square().mean().backward()
        if bug == "not_reduced":
            net[0].norm.weight.grad.to_local().mul_(1 + mesh["dp"].get_local_rank())
        optimizer.step()
        optimizer.zero_grad()


class Scores(nn.Module):
    """A layer on DTensors, and a loop over local tensors, as experts have it."""

    def __init__(self, mesh, bug):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.router.weight = nn.Parameter(
            distribute_tensor(self.router.weight.data, mesh, [Replicate()])
        )
        self.router.bias = nn.Parameter(
            distribute_tensor(self.router.bias.data, mesh, [Replicate()])
        )
        self.experts = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]))
        self.mesh, self.bug = mesh, bug

    def forward(self, x):
        x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        scores = self.router(x).sigmoid()
        placed = None if self.bug == "to_local" else [dt_partial()]
        local, experts = scores.to_local(grad_placements=placed), self.experts.to_local()
        mine = local.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]
        out = DTensor.from_local(mine @ experts, self.mesh, [dt_partial()], run_check=False)
        if self.bug == "from_local":
            out = DTensor.from_local(mine @ experts, self.mesh, [Replicate()], run_check=False)
        return out.redistribute(placements=[Replicate()]).to_local()


def dt_partial():
    return torch.distributed.tensor.Partial()


@program(
    to_local=("step 1, backward: the gradient of the output of router (Linear)", "a part of"),
    from_local=("step 1, forward: the output of (Scores)", "a part of the sum"),
)
def dtensor(bug):
    _, world = start()
    net = Scores(init_device_mesh("cpu", (world,)), bug)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, _ in batches():
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# Ours ---------------------------------------------------------------------------------------------


@program(
    world=4,
    one_replica=("step 2, update: 0.up.bias after the step", "rank 3 has"),
    piece=("step 1, gradient: the gradient of 1.down.weight", "2 times that of one process"),
)  # fmt: skip
def ours(bug):
    """Tensor parallelism and sharded state; an uneven batch."""
    rank, world = start()
    tp = min(world, 2)
    strategy = dt.Strategy(tp=tp, dp=world // tp)
    net = nn.Sequential(Mlp(), Mlp())
    net, optimizer = strategy.apply(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    for step, (x, _) in enumerate(batches(rows=7)):
        x = dt.shard_tensor(x, strategy.stages()[0], strategy.batch(sequence=None))
        net(x).square().mean().backward()
        if bug == "piece":
            dt.sync_gradients(net.parameters())
            net[1].down.weight.grad.to_local().mul_(1 + (rank == 1))
        nn.utils.clip_grad_norm_(net.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        if bug == "one_replica" and step == 1 and rank == 3:
            with torch.no_grad():
                net[0].up.bias.to_local().add_(0.5)


@program()
def ours_sharded(bug):
    start()
    mesh = dt.init_mesh((dist.get_world_size(),), ("dp",))
    net = dt.shard_data_parallel(mlp(), mesh, "dp", stage=3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for x, y in batches(rows=7):
        x, y = (dt.shard_tensor(t, mesh, [dt.Shard(0)]) for t in (x, y))
        F.cross_entropy(net(x), y).backward()
        dt.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    for name in sys.argv[1:] or names():
        program, _, bug = name.partition(".")
        fn, world, _ = PROGRAMS[program]
        try:
            said = dt.verify(partial(fn, bug), world, steps=STEPS)
        except (dt.errors.VerifyError, dt.errors.RankError, TimeoutError) as error:
            said = str(error)
        print(json.dumps({name: said}), flush=True)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main()
