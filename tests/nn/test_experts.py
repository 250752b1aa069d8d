"""Tokens travel to their experts and back: values and gradients are those of one process, and only
what has to travel does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.experts.dispatch_tokens import Stage, _Experts
from disttensor.simulate import simulate
from disttensor.torch_private import fake_mode
from ops import Arg, infer
from ops.nn.experts import run_experts
from ops.nn.routing import narrow, route, spread
from tests.support.oracle import fallbacks, line, place, randint, randn
from tests.support.pool import on_ranks
from tests.support.simulate import check_rule
from tests.support.stages import Stages, check_stages, stage_meshes

S0, R = Shard(0), Replicate()
WIDTH, HIDDEN = 4, 3


def mlp(rows: Any, counts: list[int], up: Any, down: Any) -> Any:
    each = zip(rows.split(counts), up, down, strict=True)
    return torch.cat([torch.tanh(r @ u) @ d for r, u, d in each])


def mixture(x: Any, indices: Any, weights: Any, up: Any, down: Any) -> Any:
    sent = dt.experts.dispatch_tokens(x, indices, up.shape[0]).apply(mlp, up, down)
    return dt.experts.combine_tokens(sent, weights)


def by_hand(x: Any, indices: Any, weights: Any, up: Any, down: Any) -> Any:
    """Every expert on every token."""
    every = torch.stack([torch.tanh(x @ u) @ d for u, d in zip(up, down, strict=True)], -2)
    chosen = torch.nn.functional.one_hot(indices, len(up)).to(x.dtype)
    scale = torch.einsum("...k,...ke->...e", weights, chosen)
    return torch.einsum("...e,...ed->...d", scale, every)


def inputs(indices: torch.Tensor, experts: int = 5) -> list[torch.Tensor]:
    weights = randn(*indices.shape, seed=1)
    up, down = randn(experts, WIDTH, HIDDEN, seed=2), randn(experts, HIDDEN, WIDTH, seed=3)
    return [randn(*indices.shape[:-1], WIDTH), indices, weights, up, down]


CHOICES = {
    "any": randint(0, 5, (7, 2)),
    "an expert has none": randint(0, 5, (7, 2)) // 2 * 2,
    "a rank has none": randint(0, 2, (7, 2)),
    "all to one": torch.full((7, 2), 4),
    "one choice": randint(0, 5, (9, 1)),
    "few tokens": randint(0, 5, (3, 2)),
}
EP = [[S0]] * 5
LAYOUTS = {
    "ep": ((2,), EP),
    "ep of 4": ((4,), EP),
    "whole tokens": ((4,), [[R]] * 3 + [[S0]] * 2),
    "ep x dp": ((2, 2), [[S0, S0]] * 3 + [[R, S0]] * 2),
    "ep x tp": ((2, 2), [[R, S0]] * 3 + [[R, S0]] * 2),
    "folded": ((2, 2), [[S0, S0]] * 5),
    "folded over tp": ((2, 2), [[S0, R]] * 3 + [[S0, S0]] * 2),
    "one of them split": ((2, 2), [[S0, S0]] * 3 + [[R, R], [R, S0]]),
}  # fmt: skip


def constant() -> _Experts:
    return _Experts([Stage(mlp, (1, 2))])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("choice", CHOICES)
def test_values_and_gradients(choice: str, layout: str) -> None:
    mesh, layouts = LAYOUTS[layout]
    args = inputs(CHOICES[choice])
    check_rule(run_experts, constant(), 5, *args, layouts=layouts, mesh_shape=mesh)


def test_any_layout() -> None:
    args = inputs(randint(0, 5, (3, 5, 2)))
    assert check_rule(run_experts, constant(), 5, *args, tries=40)
    torch.testing.assert_close(mixture(*args), by_hand(*args))


def test_placements_of_the_result() -> None:
    x, choice = [Arg((8, WIDTH), [S0, R]), *[Arg((8, 2), [S0, R])] * 2], constant()
    for axes, out in (([S0, R], "S(0), R"), ([R, S0], "S(0), P(sum)"), ([S0, S0], "S(0), P(sum)")):
        weight = Arg((6, WIDTH, WIDTH), axes)
        answer = infer(run_experts, choice, 6, *x, weight, mesh_shape=(2, 2))
        assert answer.inputs[3] == tuple(axes)
        assert ", ".join(map(str, answer.outputs[0])) == out


def test_a_token_goes_once_to_a_rank_and_nowhere_for_an_index_outside() -> None:
    indices = torch.tensor([[0, 1], [0, 2], [3, -1], [4, 7]])
    found = route(narrow(indices, 4).view(1, 4, 2).expand(2, -1, -1), 4, 0, [(0, 2), (2, 4)])
    assert found.send.tolist() == [0, 1, 1, 2] and found.sent == [2, 2]
    assert found.received == [2, 2] and found.counts == [4, 2]
    assert found.rows.tolist() == [0, 1, 2, 3, 0, 2] and found.slots.tolist() == [0, 0, 0, 0, 1, 1]


def test_indices_of_a_dtype_that_does_not_hold_the_number_of_experts() -> None:
    given = (torch.uint8, 256), (torch.uint8, 300), (torch.int8, 128), (torch.int16, 2**15)
    for dtype, experts in given:
        chosen = torch.tensor([[0, 5], [100, torch.iinfo(dtype).max], [1, 0]], dtype=dtype)
        if dtype.is_signed:
            chosen[2, 1] = -7
        assert torch.equal(narrow(chosen, experts), narrow(chosen.long(), experts))
        assert narrow(chosen, experts)[:2].tolist() == chosen[:2].tolist()


def leaves(args: list[Any], mesh: Any = None, layouts: Any = None) -> list[Any]:
    made = args if mesh is None else [place(t, mesh, w) for t, w in zip(args, layouts, strict=True)]
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in made]


def compare(
    args: list[Any], mesh: Any, layouts: Any, run: Any = mixture, in_one: Any = mixture
) -> dt.debugging.CommLog:
    """Value and all gradients are those of one process."""
    plain, mine = leaves(args), leaves(args, mesh, layouts)
    want = in_one(*plain)
    want.square().sum().backward()
    with dt.debugging.record_comms() as log, fallbacks() as gathered:
        got = run(*mine)
        got.square().sum().backward()
    assert not gathered
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-10)
    for a, b in zip(mine, plain, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-10, atol=1e-10)
    return log


@pytest.mark.feature("Experts")
@on_ranks(2)
def test_on_two_ranks():
    for name, layouts in itertools.product(CHOICES, (EP, LAYOUTS["whole tokens"][1])):
        compare(inputs(CHOICES[name]), line(), layouts)


@on_ranks(4)
def test_on_four_ranks():
    for name in ("any", "all to one", "few tokens"):
        for layout, (shape, layouts) in LAYOUTS.items():
            if layout != "ep":
                mesh = dt.init_mesh(shape, ("dp", "tp")[: len(shape)])
                compare(inputs(CHOICES[name]), mesh, layouts)


# What is sent -------------------------------------------------------------------------------------


def travelling(indices: torch.Tensor, ranks: int, experts: int) -> list[int]:
    """How many tokens leave each rank: those with an expert on another one, once for each such."""
    out = []
    for i, mine in enumerate(indices.chunk(ranks)):
        held = (mine // (experts // ranks)).tolist()
        out.append(sum(len({j for j in token if j != i}) for token in held))
    return out


@on_ranks(4)
def test_bytes_are_those_of_the_tokens_that_travel():
    indices = randint(0, 8, (24, 3))
    args = inputs(indices, experts=8)
    log = compare(args, line(), EP)
    me = torch.distributed.get_rank()
    leave = travelling(indices, 4, 8)
    others = [t for i, rows in enumerate(indices.chunk(4)) if i != me for t in rows.tolist()]
    come = sum(any(e // 2 == me for e in token) for token in others)
    choice = 3 * 6 * 3  # to three ranks, of 6 tokens, 3 numbers of one byte
    wide, narrow_ = (WIDTH + 3) * 8, WIDTH * 8  # a token with its weights; what was made of it
    assert [r.bytes for r in log if r.phase == "forward"][:3] == [
        choice, leave[me] * wide, come * narrow_
    ]  # fmt: skip
    back = [r.bytes for r in log if r.kind == "all_to_all" and r.phase == "backward"]
    assert back == [leave[me] * narrow_, come * wide]
    assert log.counts("forward")["all_to_all"] == 2 and log.counts("forward")["all_gather"] == 1


# Together with other things -----------------------------------------------------------------------


@on_ranks(2)
def test_recompute_reuses_the_decision():
    def run(*args: Any) -> Any:
        return checkpoint(mixture, *args, use_reentrant=False)

    log = compare(inputs(CHOICES["any"]), line(), EP, run)
    assert log.counts()["all_gather"] == 1
    assert log.counts("forward")["all_to_all"] == 2 and log.counts("backward")["all_to_all"] == 4


@on_ranks(2)
def test_recompute_draws_what_the_forward_drew_beside_it():
    """The choices are noted among the random calls of a region."""
    dropout = torch.nn.functional.dropout

    def run(*args: Any) -> Any:
        return dropout(mixture(dropout(args[0], 0.5), *args[1:]), 0.5)

    grads = []
    for again in (False, True):
        mine = leaves(inputs(CHOICES["any"]), line(), EP)
        with dt.random.rng("invariant"):
            dt.manual_seed(3)
            out = checkpoint(run, *mine, use_reentrant=False) if again else run(*mine)
            out.square().sum().backward()
        grads.append([t.grad.full_tensor() for t in mine if t.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_second_derivatives():
    def penalty(args: list[Any], number: int, loss: Any) -> Any:
        y = mixture(*args)
        (grad,) = torch.autograd.grad(loss(y).sum(), args[number], create_graph=True)
        grad.square().sum().backward()

    for choice in ("any", "a rank has none"):
        args = inputs(CHOICES[choice])
        for number, loss in itertools.product((0, 2, 3, 4), (torch.square, torch.clone)):
            plain, mine = leaves(args), leaves(args, line(), EP)
            penalty(plain, number, loss)
            penalty(mine, number, loss)
            for a, b in zip(mine, plain, strict=True):
                if b.grad is not None:
                    torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_low_precision_travels_as_it_is():
    x, indices, weights, *params = (t.float() if t.is_floating_point() else t for t in
                                    inputs(CHOICES["any"]))  # fmt: skip
    args = [x.bfloat16(), indices, weights, *(p.bfloat16() for p in params)]
    plain, mine = leaves(args), leaves(args, line(), EP)
    want, got = mixture(*plain), mixture(*mine)
    assert got.dtype == torch.bfloat16
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(got.full_tensor(), want, rtol=2e-2, atol=2e-2)
    for a, b in zip(mine, plain, strict=True):
        if b.grad is not None:
            assert a.grad.dtype == b.grad.dtype
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=2e-2, atol=4e-2)


@on_ranks(4)
def test_stages():
    def program(on: Stages) -> Any:
        x, _, _, up, down = inputs(CHOICES["any"])
        gate = on.leaf(randn(WIDTH, 5, seed=9), 0)
        h = torch.tanh(on.leaf(x, 0) @ on.leaf(randn(WIDTH, WIDTH, seed=8), 0))
        scores = on.to(torch.softmax(h @ gate, -1), 1)
        weights, chosen = scores.topk(2, -1)
        y = mixture(on.to(h, 1), chosen, weights, on.leaf(up, 1), on.leaf(down, 1))
        assert y.shape == (7, WIDTH)
        return on.to(y, 0).square().sum()

    for seed in range(5):
        check_stages(program, stage_meshes(), seed)


def model(width: int = WIDTH, experts: int = 4) -> torch.nn.Module:
    """A router and its experts."""

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(width, experts)
            self.up = torch.nn.Parameter(torch.randn(experts, width, HIDDEN))
            self.down = torch.nn.Parameter(torch.randn(experts, HIDDEN, width))

        def forward(self, x: Any) -> Any:
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            self.sent = dt.experts.dispatch_tokens(x, chosen, len(self.up)).apply(
                mlp, self.up, self.down
            )
            return dt.experts.combine_tokens(self.sent, weights)

    torch.manual_seed(0)
    return Mixture()


@on_ranks(4)
def test_load_is_that_of_all_ranks_and_known_on_all():
    stages = stage_meshes()
    x = randn(9, WIDTH).float()
    plain, mine = model(), model()
    plain(x)
    (want,) = dt.experts.expert_load(plain)
    dt.shard_module(mine, stages[1], {"up": [S0], "down": [S0]})
    assert not dt.experts.expert_load(mine)
    mine(dt.shard_tensor(x, stages[1], [S0]))
    (load,) = dt.experts.expert_load(mine)
    assert load.experts == want.experts and sum(load.experts) == 18
    assert load.parts == (sum(load.experts[:2]), sum(load.experts[2:])) and want.parts == (18,)
    assert load.busiest == max(load.parts) / 9 and want.busiest == 1.0


@on_ranks(2)
def test_load_counts_pending_indices_as_they_are_reduced() -> None:
    module = torch.nn.Module()
    indices = place(torch.tensor([[0], [2], [2], [1], [2]]), line(), [dt.Partial()])
    module.sent = dt.experts.dispatch_tokens(torch.ones(5, 1), indices, 3)
    dt.experts.combine_tokens(module.sent.apply(lambda rows, counts: rows), torch.ones(5, 1))
    assert dt.experts.expert_load(module)[0].experts == (1, 1, 3)


def test_an_even_spread() -> None:
    with fake_mode():
        found = spread(torch.empty(2, 2, 2, dtype=torch.int8), [2, 1], 0, [(0, 1), (1, 2)])
    assert (found.sent, found.received, found.counts) == ([2, 2], [2, 1], [3])
    assert len(found.send) == 4 and len(found.rows) == 3


def test_simulated_tokens_are_spread_evenly() -> None:
    def build() -> Any:
        mesh = dt.init_mesh((8,), ("ep",))
        mixed = dt.shard_module(model(16, 8), mesh, {"up": [S0], "down": [S0]})
        x = dt.shard_tensor(torch.randn(64, 16), mesh, [S0])
        return lambda: mixed(x).sum().backward()

    comms = [(c.kind, c.bytes) for c in simulate(build, 8).kinds[0].comms]
    tokens, weights = 14 * 16 * 4, 14 * 2 * 4  # 14 of 16 rows leave a rank, with their weights
    assert comms == [
        ("all_gather", 7 * 8 * 2),
        ("all_to_all", tokens + weights), ("all_to_all", tokens),
        ("all_to_all", tokens), ("all_to_all", tokens + weights),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda a: dt.experts.dispatch_tokens(a[0], a[1][:3], 5), "the same dims before"),
        (lambda a: dt.experts.dispatch_tokens(a[0].long(), a[1], 5), "not of a floating dtype"),
        (lambda a: dt.experts.dispatch_tokens(a[0], a[1].float(), 5), "not whole numbers"),
        (lambda a: dt.experts.dispatch_tokens(*a[:2], 5).apply(mlp, a[3][:4]), r"\[5, \.\.\.\]"),
        (
            lambda a: dt.experts.combine_tokens(dt.experts.dispatch_tokens(*a[:2], 5), a[2][:, :1]),
            "one for each",
        ),
        (lambda a: twice(a), "were combined already"),
        (lambda a: giving(a, lambda rows, counts: rows[1:]), r"returned \[13, 4\] for 14 rows"),
        (lambda a: giving(a, lambda rows, counts: rows[:, 1:]), "rows of 3 elements"),
        (lambda a: giving(a, lambda rows, counts: None), "returned NoneType"),
    ],
)
def test_what_does_not_fit(wrong: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        wrong(inputs(CHOICES["any"]))


def giving(args: list[Any], fn: Any) -> Any:
    return dt.experts.combine_tokens(dt.experts.dispatch_tokens(*args[:2], 5).apply(fn), args[2])


def twice(args: list[Any]) -> Any:
    sent = dt.experts.dispatch_tokens(*args[:2], 5)
    return dt.experts.combine_tokens(sent, args[2]), dt.experts.combine_tokens(sent, args[2])
