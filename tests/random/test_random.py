"""Random numbers: the same bits on one process and on 2x2, replicas that never differ,
recomputation that repeats."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from disttensor.api.create import from_fn
from disttensor.comm import collectives
from disttensor.comm.process_group import world
from disttensor.core.placement import Placement
from disttensor.random.counter import get_state
from ops.random.sampling import quantile
from tests.support.layouts import everywhere, grid
from tests.support.pool import on_ranks, run_on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Placements = tuple[Placement, ...]
LAYOUTS: list[Placements] = [(R, R), (S0, R), (R, S1), (S0, S1), (S1, S0), (S0, S0)]

COMPUTED = (
    "gumbel_softmax",
    "attention",
    "causal attention",
)  # sums of numbers: equal but for rounding


def everything(x: dt.DistTensor) -> Tensor:
    return x.detach().full_tensor().clone()


def replicas_agree(x: Tensor) -> bool:
    """Is this plain tensor the same bits on every rank of the world?"""
    mesh = grid()
    if mesh.size == 1:
        return True
    everyone = collectives.all_gather(x, mesh.group((0, 1)))
    return torch.equal(everyone, everyone[:1].expand_as(everyone))


def drawn(
    names: list[str], cases: dict[str, Callable[..., Any]], placements: Placements, seed: int = 3
) -> dict[str, Tensor]:
    """By name what the case gives for a 5 x 6 tensor of 0.3 in this layout, whole; checks torch's
    own generator."""
    mesh = grid()
    dt.manual_seed(seed)
    out = {}
    for name in names:
        torch.rand(world()[0])  # ranks differ here, and it must not matter
        torch.get_rng_state()
        before = torch.default_generator.get_state()
        x = from_fn(torch.full, mesh, placements, (5, 6), 0.3)
        result = cases[name](x)
        assert torch.equal(before, torch.default_generator.get_state()), (
            f"{name} disturbs torch's generator"
        )
        out[name] = everything(result)
        assert replicas_agree(out[name]), name
    return out


def as_on_one_process(cases: dict[str, Callable[..., Any]], placements: Placements) -> None:
    names = list(cases)
    alone = run_on_ranks(1, drawn, names, cases, placements)[0]
    together = run_on_ranks(4, drawn, names, cases, placements)
    for name in names:
        for result in together:
            if name in COMPUTED:
                torch.testing.assert_close(result[name], alone[name])
            else:
                assert torch.equal(result[name], alone[name]), f"{name} of {placements}"


FILLS: dict[str, Callable[..., Any]] = {
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "exponential_": lambda x: x.exponential_(2.0),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.2),
    "random_": lambda x: x.random_(3, 70),
    "random_ of the dtype": lambda x: x.random_(),
    "bernoulli_": lambda x: x.bernoulli_(0.4),
    "bernoulli_ of a tensor": lambda x: x.clone().bernoulli_(x),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 5, 50),
    "bernoulli": torch.bernoulli,
    "x.bernoulli": lambda x: x.bernoulli(),
    "normal": lambda x: torch.normal(x, x),
    "normal of a mean": lambda x: torch.normal(x, 0.5),
    "poisson": lambda x: torch.poisson(x * 40),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial with replacement": lambda x: x.multinomial(9, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(8)),
    "init.uniform_": lambda x: nn.init.uniform_(x, -1, 1),
    "init.normal_": lambda x: nn.init.normal_(x, 2, 3),
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x, 0.0, 1.0, -0.5, 2.0),
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "init.orthogonal_": nn.init.orthogonal_,
    "init.sparse_": lambda x: nn.init.sparse_(x, 0.4),
    "init.eye_": nn.init.eye_,
    "init.constant_": lambda x: nn.init.constant_(x, 2.0),
    "factory": lambda x: dt.randn(5, 6, mesh=x.process_mesh, placements=x.placements),
    "randint": lambda x: from_fn(torch.randint, x.process_mesh, x.placements, (5, 6), 10),
    "randperm": lambda x: dt.randperm(11, mesh=x.process_mesh, placements=[R, S0]),
    "complex": lambda x: dt.rand(5, 6, mesh=x.process_mesh, placements=x.placements,
        dtype=torch.complex64),
}  # fmt: skip

DROPOUTS: dict[str, Callable[..., Any]] = {
    "F.dropout": lambda x: F.dropout(x, 0.4),
    "F.dropout inplace": lambda x: F.dropout(x, 0.4, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "nn.Dropout": lambda x: nn.Dropout(0.4)(x),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1).expand(-1, -1, 3), 0.4),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(0).unsqueeze(0), 0.4),
    "dropout3d": lambda x: F.dropout3d(x.view(5, 6, 1, 1, 1), 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha_dropout inplace": lambda x: F.alpha_dropout(x, 0.4, training=True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.unsqueeze(-1).expand(-1, -1, 3),
        0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu_": lambda x: torch.rrelu_(-x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x.view(5, 2, 3, 1), x.view(5, 2, 3, 1),
        x.view(5, 2, 3, 1), dropout_p=0.4),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x.view(5, 2, 3, 1), x.view(5, 2, 3, 1), x.view(5, 2, 3, 1), dropout_p=0.4, is_causal=True
    ),
}  # fmt: skip


def invariantly(case: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any) -> Any:
        with dt.random.rng("invariant"):
            return case(x)

    return run


def fast(case: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any) -> Any:
        with dt.random.rng("fast"):
            return case(x)

    return run


@pytest.mark.feature("Random numbers")
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_fills_draw_the_bits_of_one_process(placements: Placements) -> None:
    as_on_one_process(FILLS, placements)


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_dropout_masks_under_invariant_are_those_of_one_process(placements: Placements) -> None:
    as_on_one_process({name: invariantly(case) for name, case in DROPOUTS.items()}, placements)


@pytest.mark.parametrize("placements", [(S0, S1), (R, S0)], ids=str)
def test_fast_draws_leave_torch_alone_and_replicas_alike(placements: Placements) -> None:
    cases = {name: fast(case) for name, case in {**FILLS, **DROPOUTS}.items()}
    run_on_ranks(4, drawn, list(cases), cases, placements)


def test_poisson_counts_have_the_mean_and_variance_of_their_rates() -> None:
    rates = torch.tensor([0.0, 0.1, 1.0, 5.0, 30.0, 1e3, 1e6], dtype=torch.float64)
    levels = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    counts = quantile(levels, rates[:, None].expand(-1, 20000))
    torch.testing.assert_close(counts.mean(1), rates, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(counts.var(1), rates, rtol=1e-2, atol=1e-2)
    cumulated = torch.special.gammaincc(torch.arange(9.0, dtype=torch.float64) + 1, rates[3])
    for edge, count in zip(cumulated.tolist(), range(9), strict=True):
        around = torch.tensor([edge - 1e-12, edge + 1e-12], dtype=torch.float64)
        assert quantile(around, rates[3].expand(2)).tolist() == [count, count + 1]


@everywhere
def test_fallback_is_seeded_alike() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dt.errors.FallbackWarning)
        cases = {"binomial": lambda x: torch.binomial(x * 0 + 9, x)}
        first = drawn(list(cases), cases, (S0, R))
        again = drawn(list(cases), cases, (R, S1))
    assert all(torch.equal(first[name], again[name]) for name in cases)


@everywhere
def test_a_fallback_that_draws_nothing_is_no_random_call() -> None:
    mesh = grid()
    dt.manual_seed(1)
    want = everything(dt.rand(4, mesh=mesh))
    dt.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dt.errors.FallbackWarning)
        torch.linalg.qr(from_fn(torch.ones, mesh, None, (2, 2)))
    assert torch.equal(everything(dt.rand(4, mesh=mesh)), want)


@everywhere
def test_every_call_draws_fresh_numbers_and_a_seed_repeats_them() -> None:
    mesh = grid()
    x = from_fn(torch.ones, mesh, (S0, S1), (8, 8))
    for policy in ("fast", "invariant"):
        with dt.random.rng(policy):
            dt.manual_seed(5)
            one, two = everything(F.dropout(x)), everything(F.dropout(x))
            dt.manual_seed(5)
            again = everything(F.dropout(x))
        assert not torch.equal(one, two) and torch.equal(one, again)


@on_ranks(4)
def test_fast_shards_differ_and_replicas_do_not() -> None:
    mesh = grid()
    x = from_fn(torch.ones, mesh, (S0, R), (8, 32))
    pieces = collectives.all_gather(
        F.dropout(x).to_local(), mesh.group((0, 1))
    )  # (0,0) (0,1) (1,0) (1,1)
    assert torch.equal(pieces[0], pieces[1]) and torch.equal(pieces[2], pieces[3])
    assert not torch.equal(pieces[0], pieces[2])


@everywhere
def test_dropout_of_a_pending_sum_stays_pending() -> None:
    mesh = grid()
    ones = torch.ones(6, 4) / mesh.shape[1]
    for policy in ("fast", "invariant"):
        leaf = ones[: 6 // mesh.shape[0]].clone().requires_grad_()
        x = dt.from_local(leaf, mesh, (S0, Partial()))
        with dt.random.rng(policy), dt.debugging.strict():
            y = F.dropout(x, 0.5)
        assert y.placements == (S0, Partial())
        assert set(everything(y).unique().tolist()) <= {0.0, 2.0}
        y.sum().backward()
        assert torch.equal(
            leaf.grad, y.full_tensor().chunk(mesh.shape[0])[(mesh.coordinate or (0,))[0]]
        )


@everywhere
def test_filling_a_pending_sum_fills_the_sum() -> None:
    mesh = grid()
    dt.manual_seed(0)
    want = everything(dt.randn(4, 4, mesh=mesh))
    for op in ("sum", "avg", "max", "prod"):
        dt.manual_seed(0)
        x = dt.from_local(torch.empty(4, 4), mesh, (Partial(op), R))
        assert torch.equal(everything(x.normal_()), want), op


@everywhere
def test_statistics() -> None:
    mesh = grid()
    x = from_fn(torch.ones, mesh, (S0, S1), (200, 201))
    for policy in ("fast", "invariant"):
        with dt.random.rng(policy):
            kept = everything(F.dropout(x, 0.3))
            assert abs((kept > 0).double().mean() - 0.7) < 0.01 and torch.allclose(
                kept.max(), torch.tensor(1 / 0.7)
            )
            normal = everything(torch.randn_like(x)).double()
            assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.03
            alpha = everything(
                F.alpha_dropout(dt.randn(200, 201, mesh=mesh, placements=(S0, S1)), 0.3, True)
            ).double()
            assert abs(alpha.mean()) < 0.03 and abs(alpha.std() - 1) < 0.03
            weights = dt.shard_tensor(
                torch.tensor([0.0, 1.0, 3.0]).expand(4000, 3).contiguous(), mesh, (S0, R)
            )
            for sample in (
                torch.multinomial(weights, 1),
                torch.multinomial(weights, 5, replacement=True),
            ):
                share = everything(sample).double().sub(1).mean()
                assert abs(share - 0.75) < 0.03 and everything(sample).min() == 1
            channels = everything(
                F.dropout2d(from_fn(torch.ones, mesh, (S0, Shard(2)), (60, 50, 4, 3)), 0.3)
            )
            flat = channels.flatten(2)
            assert (
                torch.equal(flat.amin(2), flat.amax(2))
                and abs((flat > 0).double().mean() - 0.7) < 0.04
            )


@everywhere
def test_eval_draws_nothing_and_keeps_gradients() -> None:
    mesh = grid()
    w = dt.shard_tensor(torch.ones(4, 4), mesh, (R, R), requires_grad=True)
    x = from_fn(torch.ones, mesh, (S0, R), (4, 4))
    for p, training in ((0.5, False), (0.0, True)):
        w.grad = None
        (x @ F.dropout(w, p, training)).sum().backward()
        assert torch.equal(everything(w.grad), torch.full((4, 4), 4.0))


@on_ranks(2)
def test_native_dropout_of_an_empty_piece_has_a_gradient() -> None:
    x = dt.ones(1, 6, mesh=dt.init_mesh((2,)), placements=[S0], requires_grad=True)
    out, _ = torch.native_dropout(x, 0.5, True)
    out.sum().backward()
    assert x.grad is not None and torch.equal(everything(x.grad), everything(out))


@everywhere
def test_gradients_of_masks() -> None:
    """d(out)/d(in) of every dropout is what the forward multiplied by."""
    mesh = grid()
    for policy in ("fast", "invariant"):
        for f in (
            F.dropout,
            F.dropout1d,
            lambda v, p: F.rrelu(v, training=True),
            lambda v, p: torch.native_dropout(v, p, True)[0],
        ):
            x = from_fn(torch.full, mesh, (S0, S1), (4, 6, 2), -2.0, requires_grad=True)
            with dt.random.rng(policy):
                y = f(x, 0.4)
            y.sum().backward()
            assert torch.allclose(everything(x.grad), everything(y) / -2.0)


# Modules ------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.conv = nn.Conv1d(8, 6, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.drop(self.down(F.dropout(F.relu(self.up(x)), 0.1, self.training)))
        y, _ = self.attention(x, x, x, need_weights=False)
        return x + y


PLAN = {
    "up.weight": (R, S0),
    "up.bias": (R, S0),
    "down.weight": (R, S1),
    "embed.weight": (S0, R),
    "conv.weight": (S0, S1),
}


def zoo() -> nn.Module:
    """Modules that initialize in ways of their own."""
    return nn.ModuleList(
        [
            Small(),
            nn.Embedding(13, 8, padding_idx=3),
            nn.EmbeddingBag(9, 4, padding_idx=2),
            nn.Conv2d(4, 6, 3),
            nn.ConvTranspose2d(4, 6, 3),
            nn.BatchNorm2d(6),
            nn.GroupNorm(2, 6),
            nn.RMSNorm(7),
            nn.Bilinear(3, 4, 5),
            nn.LSTM(4, 6, 2),
            nn.GRUCell(4, 6),
            nn.TransformerEncoderLayer(8, 2, 16),
        ]
    )


def by_rows(module: nn.Module) -> dict[str, Placements]:
    """Split every parameter somewhere."""
    params = dict(module.named_parameters())
    return {
        n: (S0, S1) if p.ndim > 1 and i % 2 else (R, S0) for i, (n, p) in enumerate(params.items())
    }


def born_on_meta(split: bool) -> dict[str, Tensor]:
    torch.manual_seed(world()[0])
    dt.manual_seed(11)
    with torch.device("meta"):
        model = zoo()
    dt.shard_module(model, grid(), by_rows(model) if split else None)
    out = {name: everything(p) for name, p in model.named_parameters()}
    assert all(map(replicas_agree, out.values()))
    return out


def test_modules_on_meta_start_with_the_weights_of_one_process() -> None:
    alone = run_on_ranks(1, born_on_meta, False)[0]
    together = run_on_ranks(4, born_on_meta, True)
    assert not alone["1.weight"][3].any() and alone["1.weight"][4].all()
    for result in together:
        for name, value in alone.items():
            assert torch.equal(result[name], value), name


def trained(steps: int, policy: str | None) -> list[float]:
    """Train with dropout on the mesh of this world; checks after each step that replicas are the
    same bits."""
    mesh = grid()
    dt.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        model = Small()
    torch.set_default_dtype(torch.float32)
    dt.shard_module(model, mesh, PLAN)
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "conv" not in n], lr=0.1)
    tokens = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(0))
    batch = dt.shard_tensor(tokens, mesh, (S0, R))
    losses = []
    for _ in range(steps):
        with dt.random.rng(policy or "fast"):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, p in model.named_parameters():
        local = p.to_local().detach()
        for axis, placement in enumerate(p.placements):
            if placement == R and mesh.shape[axis] > 1:
                pieces = collectives.all_gather(local, mesh.group((axis,)))
                assert torch.equal(pieces[0], pieces[1]), (
                    f"replicas of {name} differ over axis {axis}"
                )
    return losses


@pytest.mark.parametrize("policy", ["fast", "invariant"])
def test_fifty_steps_with_dropout_and_no_replica_drifts(policy: str) -> None:
    losses = run_on_ranks(4, trained, 50 if policy == "fast" else 12, policy)
    assert losses[0] == losses[1] == losses[2] == losses[3]
    assert len(set(losses[0])) == len(losses[0])
    if policy == "invariant":
        alone = run_on_ranks(1, trained, 12, policy)[0]
        torch.testing.assert_close(
            torch.tensor(losses[0]), torch.tensor(alone), rtol=1e-9, atol=1e-12
        )


# Recomputation ------------------------------------------------------------------------------------


def region(x: Tensor, w: Tensor) -> Tensor:
    h = F.dropout(torch.sin(x @ w), 0.5)
    with dt.random.rng("invariant"):
        h = F.dropout(h.cos(), 0.3)
    return (h * torch.rand_like(h)).exp()


def plainly(x: Tensor, w: Tensor) -> Tensor:
    return region(region(x, w), w)


def by_region(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(region, checkpoint(region, x, w, use_reentrant=False), w, use_reentrant=False)


def nested(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(by_region, x, w, use_reentrant=False)


def beside_others(x: Tensor, w: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return plainly(x, w)

    return checkpoint(inner, x, use_reentrant=False)


@everywhere
def test_checkpoint_draws_in_the_recomputation_what_it_drew() -> None:
    mesh = grid()
    found = []
    for run in (plainly, by_region, nested, beside_others):
        dt.manual_seed(4)
        x = dt.randn(6, 4, mesh=mesh, placements=(S0, R), dtype=torch.float64)
        w = dt.randn(4, 4, mesh=mesh, dtype=torch.float64, requires_grad=True)
        loss = run(x, w).sum()
        loss.backward(retain_graph=True)
        first = everything(w.grad)
        loss.backward()  # a second recomputation of the same region
        assert torch.equal(everything(w.grad), 2 * first)
        found.append((loss.item(), first, everything(dt.rand(3, mesh=mesh))))
    for loss, grad, after in found[1:]:
        assert loss == found[0][0] and torch.equal(grad, found[0][1])
        assert torch.equal(after, found[0][2]), "the recomputation moved the counter"


@everywhere
def test_checkpoint_repeats_a_seed_and_a_generator_inside() -> None:
    mesh = grid()
    grads = []
    for keep in (True, False):
        g = torch.Generator().manual_seed(6)
        w = from_fn(torch.ones, mesh, (S0, R), (6, 4), requires_grad=True)

        def body(w: Any, g: Any = g) -> Any:
            dt.manual_seed(9)
            noise = torch.empty_like(w).normal_(generator=g)
            return torch.sin(F.dropout(w * w, 0.5) * noise)

        out = body(w) if keep else checkpoint(body, w, use_reentrant=False)
        g.manual_seed(0)
        out.sum().backward()
        grads.append(everything(w.grad))
    assert torch.equal(*grads)


@everywhere
def test_numbers_in_a_backward_without_a_region_are_refused() -> None:
    mesh = grid()
    w = from_fn(torch.ones, mesh, (S0, R), (6, 4), requires_grad=True)
    y = w * 2
    y.register_hook(lambda g: g + torch.randn_like(g))
    with pytest.raises(RuntimeError, match=r"inside a backward.*generator="):
        y.sum().backward()
    z = w * 2
    z.register_hook(
        lambda g: g + torch.empty_like(g).normal_(generator=torch.Generator().manual_seed(1))
    )
    z.sum().backward()
    assert w.grad is not None


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: dt.random.rng("quick"), "the policies are 'invariant' and 'fast'"),
        (lambda x: dt.manual_seed(1.5), "a whole number"),
        (lambda x: F.dropout(x, 1.5), "between 0 and 1"),
        (lambda x: torch.dropout(x, -0.5, True), "between 0 and 1"),
        (lambda x: torch.multinomial(x, 7), "samples without replacement"),
        (lambda x: torch.multinomial(x * 0, 1), "sum of probabilities <= 0"),
        (lambda x: torch.multinomial(-x, 1), "element < 0"),
        (lambda x: torch.normal(x, -1.0), "std >= 0"),
        (lambda x: x.uniform_(2, 1), "expects to return"),
        (lambda x: dt.rand(3, mesh=x.process_mesh, pin_memory=True),
            "unknown argument 'pin_memory'"),
    ],
)  # fmt: skip
def test_bad_input(call: Callable[..., Any], error: str) -> None:
    run_on_ranks(1, raises, call, error)


def raises(call: Callable[..., Any], error: str) -> None:
    x = from_fn(torch.ones, grid(), (S0, R), (5, 6))
    with pytest.raises((ValueError, TypeError, RuntimeError), match=error):
        call(x)
    assert torch.equal(everything(x), torch.ones(5, 6))


REFUSED: list[Callable[..., Any]] = [
    lambda x: x.uniform_(2.0, 1.0), lambda x: x.normal_(0.0, -1.0), lambda x: x.bernoulli_(2.0),
    lambda x: x.exponential_(-1.0), lambda x: x.cauchy_(0.0, -1.0), lambda x: x.random_(5, 5),
    lambda x: x.half().random_(0, 100000), lambda x: x.to(torch.uint8).random_(0, 300),
    lambda x: x.to(torch.int8).random_(-1000, 3), lambda x: x.bool().random_(5),
    lambda x: torch.randint_like(x, 300, dtype=torch.uint8), lambda x: torch.randint_like(x, 5, 2),
    lambda x: torch.rand_like(x, dtype=torch.int64), lambda x: torch.bernoulli(x, 2.0),
    lambda x: dt.randint(0, 300, (8,), mesh=x.process_mesh, dtype=torch.uint8),
    lambda x: F.dropout(x, 2.0), lambda x: F.rrelu(x, 0.5, 0.1, True),
    lambda x: F.dropout(x, -1.0, False), lambda x: F.alpha_dropout(x, 1.5, True),
    lambda x: torch.alpha_dropout(x, 1.5, True), lambda x: torch.dropout(x, 1.5, False),
    lambda x: x.uniform_(2.0, 1.0, generator=torch.Generator()),
    lambda x: nn.init.trunc_normal_(x, a=3, b=1), lambda x: nn.init.trunc_normal_(x, std=0.0),
]  # fmt: skip


@on_ranks(2)
def test_all_ranks_raise_the_errors_of_torch_and_count_no_call() -> None:
    for mesh in (dt.init_mesh((2,), ("x",)), dt.ProcessMesh([0], dim_names=["x"])):
        x = dt.zeros(5, mesh=mesh).uniform_(0.0, 1.0)
        x.to(torch.uint8).random_(0, 3)  # calls of the same kind with a plan
        for training in (True, False):
            F.dropout(x, 0.5, training), F.alpha_dropout(x, 0.5, training)
            F.dropout1d(dt.ones(5, 2, 3, mesh=mesh), 0.5, training)
        before, default = get_state(), torch.default_generator.get_state()
        for i, call in enumerate(REFUSED):
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                call(x)
                pytest.fail(f"no error: {i}")
        x.normal_(generator=(own := torch.Generator().manual_seed(3)))
        once = torch.Generator().manual_seed(3)
        torch.empty((), dtype=torch.int64).random_(generator=once)
        assert torch.equal(own.get_state(), once.get_state())
        assert get_state() == before
        assert torch.equal(torch.default_generator.get_state(), default)


def test_a_policy_holds_for_its_own_thread():
    seen = []
    with dt.random.rng("fast"):
        thread = threading.Thread(target=lambda: seen.append(dt.random.rng.current()))
        thread.start()
        thread.join()
        seen.append(dt.random.rng.current())
    assert seen == [None, "fast"] and dt.random.rng.current() is None
