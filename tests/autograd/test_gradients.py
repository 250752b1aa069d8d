"""Gradients of DistTensors on real ranks: pending sums, optimizers, accumulation, double backward,
checkpointing, hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import DistTensor, Partial, Replicate, Shard
from tests.support.oracle import (
    check_program,
    compare_replicas,
    fallbacks,
    grid,
    line,
    place,
    randint,
    randn,
)
from tests.support.part import part
from tests.support.pool import on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
X = randn(6, 5, seed=1)


class Block(nn.Module):
    """Attention and an MLP, as anybody writes them."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, width, bias=i != 1) for i in range(4)
        )  # a bias of k has no gradient
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    """Tied embedding, two blocks, cross-entropy: everything that training needs, small."""

    def __init__(
        self, vocab: int = 11, width: int = 8, tied: bool = True, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Parameter(torch.zeros(5, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.emb(tokens) + self.pos[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), target.flatten())


PLAN = {
    "*.q": [R, S0], "*.k": [R, S0], "*.v": [R, S0], "*.o.weight": [R, S1], "*.up": [R, S0],
    "*.down.weight": [R, S1], "emb": [R, S0],
}  # fmt: skip


def models(**options: Any) -> tuple[Model, Model]:
    """The same model for one process, and on 2x2: batch over dp, Megatron over tp."""
    torch.manual_seed(0)
    plain = Model(**options).double()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.05)
    ours = dt.shard_module(copy.deepcopy(plain), grid(), PLAN)
    return plain, ours


def batch(n: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    return randint(0, 11, (n, 5), seed=seed), randint(0, 11, (n, 5), seed=seed + 100)


def split(*data: Tensor) -> list[DistTensor]:
    return [dt.shard_tensor(d, grid(), [S0, R]) for d in data]


def assert_same_grads(plain: nn.Module, ours: nn.Module, **tolerance: Any) -> None:
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(
                q.grad.full_tensor(), p.grad, msg=lambda m: f"{name}: {m}", **tolerance
            )


def assert_same_params(plain: nn.Module, ours: nn.Module, **tolerance: Any) -> None:
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(
            q.detach().full_tensor(), p.detach(), msg=lambda m: f"{name}: {m}", **tolerance
        )


def kinds(log: Any, phase: str | None = None) -> list[str]:
    return [r.kind for r in log if phase in (None, r.phase)]


# What .grad is ------------------------------------------------------------------------------------


@on_ranks(2)
def test_grad_is_a_dist_tensor_with_its_pending_reduction():
    w, x = place(randn(5, 4), line(), [R]).requires_grad_(), place(X, line(), [S0])
    with dt.debugging.record_comms() as log:
        (x @ w).sum().backward()
    assert len(log) == 0
    assert isinstance(w.grad, DistTensor) and w.grad.placements == (P,)
    assert w.grad is w.grad
    torch.testing.assert_close(w.grad.full_tensor(), X.sum(0)[:, None].expand(5, 4))


@on_ranks(2)
def test_grad_of_every_placement_has_its_type():
    for layout, expected in ([S0], [S0]), ([S1], [S1]), ([P], [R]), ([R], [R]):
        x = place(X, line(), layout).requires_grad_()
        (x * 2).sum().backward()
        assert x.grad.placements == tuple(expected), (layout, x.grad)
        torch.testing.assert_close(x.grad.full_tensor(), torch.full_like(X, 2))


@on_ranks(4)
def test_a_parameter_read_by_varying_and_by_replicated_uses():
    def program(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        h = (x @ w).tanh()
        return (
            h.sum()
            + (w * w).sum()
            + (w.t() @ w).tanh().sum()
            + (h @ v).mean()
            + w[1:, :2].sum() * v.norm()
            + (x @ w.exp()).mean()
        )

    for x in ([S0, R], [R, S0], [S0, S0], [R, R], [S0, S1], [P, S0], [S1, R]):
        for w in ([R, R], [S0, R], [R, S1], [S0, S1], [S1, S1]):
            for steps in (1, 2):
                check_program(
                    program, [(randn(5, 4), w), (randn(4, 3), [R, R])], X, layouts=[x], steps=steps
                )


@on_ranks(4)
def test_intermediate_values_read_in_both_ways():
    def program(w: Tensor, x: Tensor) -> Tensor:
        z = (w * 2).sin()  # replicated, no leaf
        y = x @ z
        u = z + 1
        return (
            y.sum() * z.mean()
            + (u * z).sum()
            + (y @ u.t()).tanh().mean()
            + (x[:, :1] * u[:1, :1]).sum()
            + torch.stack([z, u]).amax(0).sum()
            + z.clone().pow_(2).sum()
        )

    for x in ([S0, R], [R, S0], [R, R], [S0, S1], [P, R]):
        for w in ([R, R], [R, S0], [S1, R], [P, R], [P, P]):
            check_program(program, [(randn(5, 4), w)], X, layouts=[x])


@on_ranks(4)
def test_views_of_a_parameter_keep_its_reduction_deferred():
    w, x = place(randn(4, 5), grid(), [R, R]).requires_grad_(), place(X, grid(), [S0, R])
    views: list[Callable[[Any], Any]] = [
        lambda w: w.t(), lambda w: w.view(2, 2, 5).flatten(0, 1).t(),
        lambda w: w.transpose(0, 1).contiguous().view(5, 4), lambda w: w.unsqueeze(0).squeeze(0).mT,
        lambda w: w[:].T, lambda w: w.reshape(20).view(4, 5).t(), lambda w: w.permute(1, 0),
        lambda w: w.expand(4, 5).T,
    ]  # fmt: skip
    for i, view in enumerate(views):
        w.grad = None
        with dt.debugging.record_comms() as log:
            h = x @ view(w)
            h.sum().backward()
        assert not len(log), (i, str(log))
        assert w.grad.placements == (P, R), (i, w.grad)
        torch.testing.assert_close(w.grad.full_tensor(), X.sum(0).expand(4, 5))


@on_ranks(4)
def test_a_replicated_intermediate_shared_by_three_uses_is_reduced_once():
    """Megatron's f in front of q, k and v."""
    mesh = grid()
    x = place(X, mesh, [R, R]).requires_grad_()
    ws = [place(randn(5, 4, seed=i), mesh, [R, S1]).requires_grad_() for i in range(3)]
    h = x * 2
    with dt.debugging.record_comms() as log:
        torch.stack([(h @ w).tanh().sum() for w in ws]).sum().backward()
    assert kinds(log) == ["all_reduce"], str(log)


@on_ranks(4)
def test_tied_parameters():
    def program(e: Tensor, t: Tensor) -> Tensor:
        x = F.embedding(t, e)
        return F.cross_entropy((x @ e.t()).flatten(0, 1), t.flatten()) + e.pow(2).mean()

    t = randint(0, 7, (5, 3))
    for e in ([R, R], [R, S0], [S0, R], [S1, S0], [R, S1], [S0, S0]):
        for layout in ([S0, R], [R, R], [S0, S1]):
            check_program(program, [(randn(7, 4), e)], t, layouts=[layout], steps=2)


@on_ranks(4)
def test_a_parameter_that_only_one_rank_reads_is_no_hang():
    """Row-parallel bias, rows of an embedding that only one rank looks up, a slice that one rank
    holds."""

    def program(w: Tensor, b: Tensor, e: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return (
            F.linear(x, w, b).tanh().sum()
            + F.embedding(t, e).sum()
            + w[0].sum()
            + w[:, :1].pow(2).sum()
        )

    for w in ([R, S1], [R, S0], [S0, S1], [S1, R]):
        check_program(
            program,
            [(randn(3, 5), w), (randn(3), [R, R]), (randn(7, 2), [R, S0])],
            X,
            torch.zeros(6, dtype=torch.long),
            layouts=[[S0, S1], [S0, R]],
        )


# The whole model ----------------------------------------------------------------------------------


@pytest.mark.feature("Gradients")
@on_ranks(4)
def test_model_equals_one_process():
    for options in ({"tied": True}, {"tied": False}):
        plain, ours = models(**options)
        tokens, target = batch()
        loss = plain(tokens, target)
        loss.backward()
        with fallbacks() as fell:
            d_loss = ours(*split(tokens, target))
            d_loss.backward()
        assert not fell, fell
        torch.testing.assert_close(d_loss.full_tensor().detach(), loss.detach())
        assert_same_grads(plain, ours)


@on_ranks(4)
def test_megatron_block_does_two_all_reduces_forward_and_two_backward():
    torch.manual_seed(0)
    plain = Block().double()
    ours = dt.shard_module(
        copy.deepcopy(plain),
        grid(),
        {k.removeprefix("*."): v for k, v in PLAN.items() if k != "emb"},
    )
    x = randn(4, 5, 8)
    leaf = place(x, grid(), [S0, R]).requires_grad_()
    h = leaf * 1.0
    with dt.debugging.record_comms() as log, fallbacks() as fell:
        y = ours(h)
        y.sum().backward()
    assert not fell
    tp = [(r.kind, r.axis, r.phase) for r in log]
    forward, backward = [t for t in tp if t[2] == "forward"], [t for t in tp if t[2] == "backward"]
    assert [t[:2] for t in backward] == [("all_reduce", "tp")] * 2, str(log)
    assert [t[:2] for t in forward] == [("all_reduce", "tp")] * 2, str(log)
    reference = x.clone().requires_grad_()
    plain(reference).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), reference.grad)
    assert_same_grads(plain, ours)


@on_ranks(4)
def test_optimizer_step_reduces_once_with_flat_buckets():
    plain, ours = models()
    tokens, target = batch()
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    ours(*split(tokens, target)).backward()
    pending = {
        tuple(sorted(p.grad.partial_status)) for p in ours.parameters() if p.grad.partial_status
    }
    with dt.debugging.record_comms() as log:
        optimizer.step()
    assert kinds(log) == ["all_reduce"] * len(pending) and pending, (str(log), pending)
    assert all(not p.grad.partial_status for p in ours.parameters())
    with dt.debugging.record_comms() as log:
        optimizer.step()  # the same gradients again: nothing is pending
    assert not len(log)
    one = torch.optim.SGD(plain.parameters(), 0.1)
    plain(tokens, target).backward()
    one.step()
    one.step()
    assert_same_params(plain, ours)


@on_ranks(4)
def test_accumulation_communicates_what_tensor_parallelism_needs_and_no_more():
    plain, ours = models()
    ours(*split(*batch())).backward()
    ours.zero_grad()
    logs = []
    for i in range(3):
        tokens, target = batch(seed=i)
        plain(tokens, target).backward()
        with dt.debugging.record_comms() as log:
            ours(*split(tokens, target)).backward()
        logs.append([(r.kind, r.axis) for r in log])
    assert logs[0] == logs[1] == logs[2]
    assert all(r.axis == "tp" or r.bytes <= 8 for r in log), str(
        log
    )  # over the batch: how many targets count
    assert_same_grads(plain, ours)


@on_ranks(4)
def test_reading_gradients_between_micro_batches_changes_nothing():
    plain, ours = models()
    for i in range(3):
        tokens, target = batch(seed=i)
        plain(tokens, target).backward()
        ours(*split(tokens, target)).backward()
        if i == 0:
            [p.grad.norm().item() for p in ours.parameters()]
        if i == 1:
            dt.sync_gradients(ours)
    assert_same_grads(plain, ours)


# Optimizers ---------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}), "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}), "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}), "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}), "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Muon": (getattr(torch.optim, "Muon", None), {"lr": 0.01}),
}  # fmt: skip
FUSED = ("SGD", "SGD momentum", "Adam", "Adam amsgrad", "AdamW", "Adagrad")
FORMS = [
    *((name, "for-loop") for name, (make, _) in OPTIMIZERS.items() if make is not None),
    *((name, "foreach") for name in OPTIMIZERS if name != "Muon"),
    *((name, "fused") for name in FUSED),
]


@pytest.mark.feature("Optimizers")
@on_ranks(4)
@pytest.mark.parametrize(("name", "form"), part(FORMS, 18, "optimizers"))
def test_optimizers_equal_one_process(name, form):
    make, options = OPTIMIZERS[name]
    options = dict(options)
    if name not in ("Muon",):
        options["foreach"] = form == "foreach"
    if form == "fused":
        options["foreach"] = False if name == "Adagrad" else None
        options["fused"] = True
    plain, ours = models()
    chosen = [p.ndim == 2 if name == "Muon" else True for p in plain.parameters()]
    one = make([p for p, c in zip(plain.parameters(), chosen, strict=True) if c], **options)
    many = make([p for p, c in zip(ours.parameters(), chosen, strict=True) if c], **options)
    with fallbacks():
        for step in range(3):
            tokens, target = batch(seed=step)
            for model, optimizer, data in (
                (plain, one, (tokens, target)),
                (ours, many, split(tokens, target)),
            ):
                optimizer.zero_grad(set_to_none=step != 1)
                model(*data).backward()
                optimizer.step()
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if name == "Muon" else {"rtol": 1e-6, "atol": 1e-8}
        assert_same_params(plain, ours, **tolerance)


@on_ranks(4)
def test_optimizer_with_a_closure():
    plain, ours = models()
    tokens, target = batch()
    for make, options in (
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
    ):
        ends = []
        for model, data in ((plain, (tokens, target)), (ours, split(tokens, target))):
            optimizer = make(model.parameters(), **options)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(*data)
                loss.backward()
                return loss

            with fallbacks():
                for _ in range(2):
                    ends.append(float(optimizer.step(closure).detach()))
        torch.testing.assert_close(ends[2:], ends[:2])
        assert_same_params(plain, ours, rtol=1e-6, atol=1e-8)


@on_ranks(4)
def test_clip_grad_norm():
    for foreach in (None, False, True):
        for norm_type in (2.0, 1.0, float("inf")):
            plain, ours = models()
            tokens, target = batch()
            plain(tokens, target).backward()
            ours(*split(tokens, target)).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type, foreach=foreach)
            with fallbacks() as fell:
                d_norm = nn.utils.clip_grad_norm_(
                    ours.parameters(), 0.1, norm_type, foreach=foreach
                )
            assert not fell, fell
            torch.testing.assert_close(float(d_norm), float(norm))
            assert_same_grads(plain, ours)
    nn.utils.clip_grad_value_(plain.parameters(), 0.001)
    nn.utils.clip_grad_value_(ours.parameters(), 0.001)
    assert_same_grads(plain, ours)


# torch.autograd -----------------------------------------------------------------------------------


@on_ranks(4)
def test_autograd_grad():
    def both(w: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        h = (x @ w + b).tanh()
        return torch.autograd.grad(h.sum() + (w * w).sum(), [w, b, h, x])

    full = [randn(5, 4).requires_grad_(), randn(4).requires_grad_(), X.clone().requires_grad_()]
    expected = both(*full)
    for w in ([R, R], [R, S1], [S0, R]):
        for x in ([S0, R], [R, R], [S0, S1]):
            ours = [
                place(t, grid(), p).requires_grad_()
                for t, p in zip(full, (w, [R, R], x), strict=True)
            ]
            for got, want in zip(both(*ours), expected, strict=True):
                assert isinstance(got, DistTensor)
                torch.testing.assert_close(got.full_tensor(), want)
            assert all(t.grad is None for t in ours)
    w = place(full[0].detach(), grid(), [R, R]).requires_grad_()
    assert torch.autograd.grad((w * 1).sum(), [w, ours[1]], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match=r"not.*used|unused"):
        torch.autograd.grad((w * 1).sum(), [ours[1]])
    seeds = randn(6, 4)
    (got,) = torch.autograd.grad(ours[2] @ w, w, grad_outputs=seeds)
    torch.testing.assert_close(got.full_tensor(), X.t() @ seeds)
    (got,) = torch.autograd.grad(ours[2] @ w, w, grad_outputs=place(seeds, grid(), [S1, S0]))
    torch.testing.assert_close(got.full_tensor(), X.t() @ seeds)


@on_ranks(2)
def test_fewer_gradients_than_outputs_are_an_error_as_in_torch():
    plain = torch.ones(3, requires_grad=True)
    g = torch.ones(3)
    for x in (plain, *(place(plain, line(), [at]).requires_grad_() for at in (R, S0))):
        for given in (g, [g]):
            for run in (
                torch.autograd.backward,
                lambda outs, g, x=x: torch.autograd.grad(outs, x, g),
            ):
                with pytest.raises(RuntimeError, match="got 2 tensors and 1 gradients"):
                    run([x * 2, x * 3], given)
        (got,) = torch.autograd.grad([x * 2], x, [g, g])
        assert (got.full_tensor() if isinstance(got, DistTensor) else got).tolist() == [2, 2, 2]


@on_ranks(4)
def test_backward_with_a_gradient_and_with_inputs():
    seeds, w0 = randn(6, 4), randn(5, 4)
    for seed in (seeds, place(seeds, grid(), [S0, S1]), place(seeds, grid(), [P, R])):
        for wl in ([R, R], [R, S1]):
            w, x = (
                place(w0, grid(), wl).requires_grad_(),
                place(X, grid(), [S0, R]).requires_grad_(),
            )
            (x @ w).backward(seed, inputs=[w])
            assert x.grad is None
            torch.testing.assert_close(w.grad.full_tensor(), X.t() @ seeds)
    torch.autograd.backward([(x @ w).sum(), (w * 2).sum()])
    torch.testing.assert_close(w.grad.full_tensor(), X.t() @ seeds + X.sum(0)[:, None] + 2)


@on_ranks(4)
def test_gradient_penalty():
    """A second backward through matmuls, norms and reshards."""

    def penalty(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = torch.tanh(x @ w) @ v
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return ((g.norm(dim=1) - 1) ** 2).mean() + y.mean()

    for wl, vl in (
        ([R, R], [R, R]),
        ([R, S1], [R, S0]),
        ([R, S0], [R, R]),
        ([S0, R], [R, S1]),
        ([S0, S1], [S1, S0]),
    ):
        for xl in ([S0, R], [R, R], [S0, S1], [S0, S0]):
            check_program(penalty, [(randn(5, 4), wl), (randn(4, 2, seed=2), vl)], X, layouts=[xl])


@on_ranks(4)
def test_double_backward_of_a_parameter():
    def hessian_vector(w: Tensor, x: Tensor) -> Tensor:
        loss = ((x @ w).sin() * x.sum(1, keepdim=True)).mean() + w.pow(3).sum()
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        return (g * g).sum() + loss

    for w in ([R, R], [R, S1], [S0, R], [S0, S1], [P, R]):
        for x in ([S0, R], [R, R], [S0, S1], [R, S0], [P, R]):
            check_program(hessian_vector, [(randn(5, 4), w)], X, layouts=[x])


@on_ranks(4)
def test_double_backward_through_every_reshard():
    layouts = [[R, R], [S0, R], [S1, S0], [S0, S0], [P, R], [S0, P], [P, P], [R, S1]]
    for src in layouts:
        for dst in layouts:

            def program(w: Tensor) -> Tensor:
                y = dt.reshard(w.sin(), grid(), dst) if isinstance(w, DistTensor) else w.sin()
                (g,) = torch.autograd.grad((y * y * y).sum(), w, create_graph=True)
                z = dt.reshard(g, grid(), src) if isinstance(g, DistTensor) else g
                return (z * y).sum()

            check_program(program, [(randn(5, 3), src)])


@on_ranks(4)
def test_create_graph_in_backward():
    w, x = place(randn(5, 4), grid(), [R, R]).requires_grad_(), place(X, grid(), [S0, R])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (x @ w).pow(2).sum().backward(create_graph=True)
    assert w.grad.requires_grad
    g = w.grad
    w.grad = None
    g.pow(2).sum().backward()
    plain = randn(5, 4).requires_grad_()
    (h,) = torch.autograd.grad((X @ plain).pow(2).sum(), plain, create_graph=True)
    h.pow(2).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad)
    w.grad = None


@on_ranks(2)
def test_a_second_backward_needs_retain_graph():
    w, x = place(randn(5, 4), line(), [R]).requires_grad_(), place(X, line(), [S0])
    loss = (x @ w).tanh().sum()
    loss.backward(retain_graph=True)
    once = w.grad.full_tensor().clone()
    loss.backward()
    torch.testing.assert_close(w.grad.full_tensor(), 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# Checkpointing, functional_call, autocast ---------------------------------------------------------


@on_ranks(4)
def test_checkpoint():
    plain, ours = models(checkpointed=True)
    tokens, target = batch()
    plain(tokens, target).backward()
    ours(*split(tokens, target)).backward()
    assert_same_grads(plain, ours)
    ours(*split(tokens, target)).backward()
    plain(tokens, target).backward()
    assert_same_grads(plain, ours)


@on_ranks(2)
def test_checkpoint_of_plain_functions_and_no_grad_regions():
    w = place(randn(5, 5), line(), [S1]).requires_grad_()
    x = place(X, line(), [R]).requires_grad_()

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return (x @ w / scale).tanh() @ w.t()

    y = checkpoint(region, x * 1.0, use_reentrant=False)
    checkpoint(region, y, use_reentrant=False).sum().backward()
    fw, fx = randn(5, 5).requires_grad_(), X.clone().requires_grad_()

    def plain(x: Tensor) -> Tensor:
        return (x @ fw / x.detach().abs().amax()).tanh() @ fw.t()

    plain(plain(fx * 1.0)).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), fw.grad)
    torch.testing.assert_close(x.grad.full_tensor(), fx.grad)


@on_ranks(2)
def test_reentrant_checkpoint_says_what_to_do():
    w, x = place(randn(5, 4), line(), [R]).requires_grad_(), place(X, line(), [S0]).requires_grad_()
    with pytest.raises(dt.errors.CustomFunctionError, match="use_reentrant=False"):
        checkpoint(lambda x: x @ w, x, use_reentrant=True)


@on_ranks(4)
def test_functional_call():
    plain, ours = models()
    tokens, target = batch()
    new = {name: (p.detach() * 1.5).requires_grad_() for name, p in plain.named_parameters()}
    d_new = {name: (p.detach() * 1.5).requires_grad_() for name, p in ours.named_parameters()}
    functional_call(plain, new, (tokens, target)).backward()
    functional_call(ours, d_new, tuple(split(tokens, target))).backward()
    for name, p in new.items():
        torch.testing.assert_close(d_new[name].grad.full_tensor(), p.grad)
    assert all(p.grad is None for p in ours.parameters())


@on_ranks(4)
def test_autocast():
    plain, ours = models()
    plain, ours = plain.float(), ours.float()
    tokens, target = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = plain(tokens, target)
        h = plain.blocks[0](plain.emb(tokens))
        dh = ours.blocks[0](ours.emb(split(tokens)[0]))
        d_loss = ours(*split(tokens, target))
        assert F.linear(dh, ours.blocks[0].q.weight).dtype == torch.bfloat16
    assert d_loss.dtype == loss.dtype and dh.dtype == h.dtype, (
        d_loss.dtype,
        loss.dtype,
        dh.dtype,
        h.dtype,
    )
    assert (
        F.linear(dh.float(), ours.blocks[0].q.weight).dtype == torch.float32
    )  # the plan of autocast is not kept
    loss.backward()
    d_loss.backward()
    torch.testing.assert_close(d_loss.full_tensor(), loss, rtol=2e-2, atol=2e-2)
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())
    assert_same_grads(plain, ours, rtol=0.1, atol=2e-2)


# Hooks --------------------------------------------------------------------------------------------


@on_ranks(4)
def test_register_hook_sees_the_whole_gradient():
    full, x = randn(5, 4), place(X, grid(), [S0, R])
    for layout in ([R, R], [S0, R], [R, S1], [S1, S0]):
        for late in (False, True):
            w = place(full, grid(), layout).requires_grad_()
            if late:
                (x @ w).sum().backward()
                w.grad = None
            seen: list[DistTensor] = []
            handle = w.register_hook(lambda g: seen.append(g))
            (x @ w).sum().backward()
            assert len(seen) == 1
            torch.testing.assert_close(seen[0].full_tensor(), X.sum(0)[:, None].expand(5, 4))
            assert not seen[0].partial_status
            handle.remove()
            (x @ w).sum().backward()
            assert len(seen) == 1
            torch.testing.assert_close(w.grad.full_tensor(), 2 * X.sum(0)[:, None].expand(5, 4))


@on_ranks(4)
def test_a_hook_may_change_the_gradient():
    full, x = randn(5, 4), place(X, grid(), [S0, R])
    for layout in ([R, R], [R, S1]):
        w = place(full, grid(), layout).requires_grad_()
        w.register_hook(lambda g: g.clamp(-0.5, 0.5))
        ((x @ w).sum() + (w * 3).sum()).backward()
        torch.testing.assert_close(
            w.grad.full_tensor(), (X.sum(0)[:, None].expand(5, 4) + 3).clamp(-0.5, 0.5)
        )


@on_ranks(4)
def test_hooks_and_retain_grad_of_values_that_are_no_leaves():
    w, x = place(randn(5, 4), grid(), [R, R]).requires_grad_(), place(X, grid(), [S0, R])
    h = w * 2
    seen: list[DistTensor] = []
    h.retain_grad()
    h.register_hook(lambda g: seen.append(g))
    ((x @ h).sum() + (h * h).sum()).backward()
    expected = X.sum(0)[:, None].expand(5, 4) + 2 * h.detach().full_tensor()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0].full_tensor(), expected)
    assert isinstance(h.grad, DistTensor)
    torch.testing.assert_close(h.grad.full_tensor(), expected)


@on_ranks(4)
def test_gradients_of_views_and_reshards_of_parameters():
    """Their varying uses read the parameter itself; who asks for their gradient gets the whole of
    it."""
    plain = randn(4, 5).requires_grad_()
    makers = {
        "view": lambda w: w.t(),
        "reshard": lambda w: dt.reshard(w, grid(), [R, R]).t(),
        "row": lambda w: w[:].mT,
    }
    for layout in ([R, R], [R, S1], [S0, S1]):
        for late in (False, True):
            for make in makers.values():
                w, x = (
                    place(plain.detach(), grid(), layout).requires_grad_(),
                    place(X, grid(), [S0, R]),
                )
                h = make(w)
                seen: list[Tensor] = []
                if not late:
                    h.retain_grad()
                    h.register_hook(lambda g: seen.append(g.full_tensor()))
                loss = (x @ h).tanh().sum() + h.sum() * 2
                if late:
                    h.retain_grad()
                loss.backward(retain_graph=True)
                p = plain.detach().requires_grad_()
                q = p.t()
                q.retain_grad()
                ((X @ q).tanh().sum() + q.sum() * 2).backward()
                torch.testing.assert_close(h.grad.full_tensor(), q.grad)
                torch.testing.assert_close(w.grad.full_tensor(), p.grad)
                if not late:
                    assert len(seen) == 1
                    torch.testing.assert_close(seen[0], q.grad)
                h = make(w)
                loss = (x @ h).tanh().sum() + h.sum() * 2
                (g,) = torch.autograd.grad(loss, h, retain_graph=True)
                torch.testing.assert_close(g.full_tensor(), q.grad)
                w.grad = None
                loss.backward(inputs=[w])
                torch.testing.assert_close(w.grad.full_tensor(), p.grad)


@on_ranks(4)
def test_data_of_a_hooked_parameter():
    w, x = place(randn(5, 4), grid(), [R, R]).requires_grad_(), place(X, grid(), [S0, R])
    w.register_hook(lambda g: g * 2)
    torch.testing.assert_close((x @ w).full_tensor(), X @ randn(5, 4))
    w.data = place(randn(5, 4, seed=3), grid(), [R, R])
    torch.testing.assert_close((x @ w).full_tensor(), X @ randn(5, 4, seed=3))
    with torch.no_grad():
        w.mul_(2)
    (x @ w).sum().backward()
    torch.testing.assert_close((x @ w).full_tensor(), 2 * X @ randn(5, 4, seed=3))
    torch.testing.assert_close(w.grad.full_tensor(), 2 * X.sum(0)[:, None].expand(5, 4))


@on_ranks(4)
def test_post_accumulate_grad_hook_fires_once_per_backward():
    full, x = randn(5, 4), place(X, grid(), [S0, R])
    for layout in ([R, R], [R, S1], [S0, S1]):
        w = place(full, grid(), layout).requires_grad_()
        seen: list[Tensor] = []

        def hook(p: DistTensor) -> None:
            assert p is w
            seen.append(p.grad.full_tensor().clone())
            p.grad = None

        handle = w.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            ((x @ w).sum() + (w * w).sum()).backward()  # both ways of use
        expected = X.sum(0)[:, None].expand(5, 4) + 2 * full
        assert len(seen) == 2 and w.grad is None
        for g in seen:
            torch.testing.assert_close(g, expected)
        handle.remove()
        (x @ w).sum().backward()
        assert len(seen) == 2


@on_ranks(4)
def test_optimizer_in_a_post_accumulate_hook():
    plain, ours = models()
    tokens, target = batch()
    for model in (plain, ours):
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        model(*((tokens, target) if model is plain else split(tokens, target))).backward()
    assert_same_params(plain, ours)


# What cannot be, and local_map --------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@on_ranks(2)
def test_a_custom_autograd_function_in_local_map_stays_split():
    x = place(X, line(), [S0]).requires_grad_()
    y = dt.local_map(Double.apply, out_placements=[S0])(x)
    assert y.placements == (S0,)
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full_like(X, 2))


@on_ranks(4)
def test_local_map_is_differentiable():
    def mine(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh()

    for xl, wl, out in (
        ([S0, R], [R, R], [S0, R]),
        ([S0, R], [R, S1], [S0, S1]),
        ([R, R], [R, S1], [R, S1]),
        ([R, R], [R, R], [R, R]),
    ):

        def program(w: Tensor, x0: Tensor) -> Tensor:
            x = x0 * w[0, 0]
            f = (
                dt.local_map(mine, in_placements=[xl, wl], out_placements=out)
                if isinstance(x, DistTensor)
                else mine
            )
            return (f(x, w) ** 2).sum() + w.sum()

        for start in ([R, R], [R, S1], [S0, R]):
            check_program(program, [(randn(5, 4), start)], X, layouts=[[S0, R]])


@on_ranks(4)
def test_local_map_with_a_pending_sum():
    def contraction(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    def program(w: Tensor, x: Tensor) -> Tensor:
        f = (
            dt.local_map(contraction, in_placements=[[S0, S1], [R, S0]], out_placements=[S0, P])
            if isinstance(x, DistTensor)
            else contraction
        )
        return f(x, w).tanh().sum()

    check_program(program, [(randn(5, 4), [R, R])], X, layouts=[[S0, R]])
    check_program(program, [(randn(5, 4), [R, S0])], X, layouts=[[R, S1]])


@on_ranks(2)
def test_to_local_with_grad_axes():
    w = place(randn(5, 4), line(), [R]).requires_grad_()
    x = dt.shard_tensor(X, line(), [S0]).to_local()
    local = x @ w.to_local(grad_axes="x")
    dt.from_local(local, line(), [S0]).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), X.sum(0)[:, None].expand(5, 4))


@on_ranks(4)
def test_plain_tensors_that_require_grad():
    """A plain parameter beside DistTensors: its gradient is the whole one on every rank."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(randn(*p.shape, seed=i))
    twin = copy.deepcopy(model)
    twin(X).pow(2).mean().backward()
    for layout in ([S0, R], [S0, S1], [R, R], [P, S0]):
        model.zero_grad()
        with dt.debugging.record_comms() as log:
            model(place(X, grid(), layout)).pow(2).mean().backward()
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            assert type(q.grad) is Tensor
            torch.testing.assert_close(q.grad, p.grad)
        del log


@on_ranks(4)
def test_no_grad_and_inference_mode():
    plain, ours = models()
    tokens, target = batch()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(
                ours(*split(tokens, target)).full_tensor(), plain(tokens, target)
            )
            assert not ours(*split(tokens, target)).requires_grad
    ours(*split(tokens, target)).backward()
    plain(tokens, target).backward()
    assert_same_grads(plain, ours)


@on_ranks(4)
def test_frozen_parameters():
    plain, ours = models()
    tokens, target = batch()
    for model in (plain, ours):
        for name, p in model.named_parameters():
            p.requires_grad_("blocks.1" in name)
    plain(tokens, target).backward()
    with dt.debugging.record_comms() as log:
        ours(*split(tokens, target)).backward()
    assert_same_grads(plain, ours)
    for model in (plain, ours):
        model.requires_grad_(True)
    plain(tokens, target).backward()
    ours(*split(tokens, target)).backward()
    assert_same_grads(plain, ours)
    del log


@on_ranks(4)
def test_in_place_changes_between_uses_are_seen_by_autograd():
    def program(w: Tensor, x: Tensor) -> Tensor:
        h = w * 2
        a = (x @ h).sum()
        h = h.clone().add_(1)
        h.mul_(x.sum())
        b = (x @ h).tanh().sum()
        h[1] = 0.5
        return a + b + (x @ h).sum()

    def in_between(w: Tensor, x: Tensor) -> Tensor:
        h = w * 2
        a = (x @ h).sum() * 3
        h.add_(1)  # what came before does not need h in its backward
        b = (x @ h).sum() + h.sum()
        h.mul_(3)
        return a * 2 + (x @ h.t().t()).sum() + b

    with fallbacks():
        for w in ([R, R], [R, S1], [S0, R]):
            for x in ([S0, R], [R, R]):
                check_program(program, [(randn(5, 4), w)], X, layouts=[x])
                check_program(in_between, [(randn(5, 4), w)], X, layouts=[x])
    w, x = place(randn(5, 4), grid(), [R, R]).requires_grad_(), place(X, grid(), [S0, R])
    h = w * 2
    loss = (x.requires_grad_() @ h).tanh().sum()
    h.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|modified inplace"):
        loss.backward()


@on_ranks(4)
def test_replicas_stay_equal_bit_by_bit_over_steps():
    _, ours = models()
    ours = ours.float()
    optimizer = torch.optim.AdamW(ours.parameters(), 0.01)
    for step in range(5):
        optimizer.zero_grad()
        ours(*split(*batch(seed=step))).backward()
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
    compare_replicas([*ours.parameters()])
