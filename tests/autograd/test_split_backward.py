"""The two parts of a backward on plain graphs: the gradients of one, and nothing kept between them
but what weights need."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from disttensor.autograd import token
from disttensor.autograd.joined_backward import one_backward, run_after_backward, this_backward
from disttensor.autograd.split_backward import SplitBackward, compute_weight_now, mark_hooked
from disttensor.torch_private import TorchDispatchMode, next_node, storage_id
from ops.linalg.overlapped_linear import overlapped

ROWS, WIDTH = 5, 8


class Arrived(torch.autograd.Function):
    """What came from another stage; keeps its gradient."""

    @staticmethod
    def forward(ctx, anchor, value, grads):
        ctx.grads = grads
        return value[0].clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.grads.append(grad)
        return None, None, None


def arrived(grads):
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Arrived.apply(token.anchor(x.device), [x], grads)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q[None], k[None], v[None])[0])


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.GroupNorm(1, 2)

    def forward(self, x):
        return F.gelu(self.norm(self.conv(x[:, None]))).mean(1)


class Made(nn.Module):
    """A weight that is made of others, one that is used twice, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(1))
        self.twice, self.never = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.tanh(F.linear(x * self.twice, self.g * self.v / self.v.norm())) + self.twice


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g * w, (2 * g * x).sum(0)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Doubled.apply(x, self.w)


class Beside(nn.Linear):
    """Two gradients in two nodes, the first of which hands on what came."""

    def forward(self, x):
        return overlapped(F.linear, x, self.weight, self.bias, True, [next_node()])


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "attention": Attention,
    "conv": Conv,
    "made": Made,
    "own function": Own,
    "beside": lambda: Beside(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}


def split_of(loss, grads=None, whole=lambda node: ""):
    return SplitBackward(
        [loss], [torch.ones_like(loss)], keep_whole=whole,
        engine=torch.autograd.backward if grads is None else grads,
    )  # fmt: skip


def built(kinds):
    torch.manual_seed(0)
    return nn.Sequential(*[KINDS[k]() for k in kinds], nn.Linear(WIDTH, WIDTH)).double()


@pytest.mark.parametrize("first", [False, True], ids=["arrived", "first stage"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_of_one_backward(kind, first):
    results = []
    for split in (False, True):
        model, came = built([kind, "attention", kind]), []
        x = arrived(came)
        loss = model(x.detach() if first else x).square().mean()
        if split:
            parts = split_of(loss)
            assert not parts.is_whole
            del loss
            parts.inputs()
            assert len(came) == (not first)
            late = [n for n, p in model.named_parameters() if p.grad is None]
            assert "3.weight" in late and "1.norm.weight" in late
            parts.weights()
        else:
            loss.backward()
        results.append([*came, *[p.grad for p in model.parameters()]])
    for a, b in zip(*results, strict=True):
        assert (a is None) is (b is None) and (a is None or torch.equal(a, b))


class Live(TorchDispatchMode):
    """The shapes of what was computed inside and is still there."""

    def __init__(self, params):
        super().__init__()
        self.storages = {}
        self.params = {storage_id(p.untyped_storage()) for p in params}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                s = x.untyped_storage()
                known = self.storages.get(storage_id(s))
                if s.nbytes() and not (known and known[0]()):
                    self.storages[storage_id(s)] = weakref.ref(s), tuple(x.shape)
        return out

    def shapes(self):
        found = self.storages.items()
        return sorted(shape for i, (ref, shape) in found if ref() and i not in self.params)


def test_what_is_kept_between_the_parts():
    """Of linear -> gelu -> linear -> softmax -> norm -> linear: the inputs of layers with weights,
    the statistics of the norm, and one gradient for each such layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, 10), nn.Softmax(-1), nn.LayerNorm(10),
        nn.Linear(10, 3),
    ).double()  # fmt: skip
    came = []
    with Live(model.parameters()) as live:
        x = arrived(came)
        loss = model(x).square().mean()
        parts = split_of(loss)
        del loss, x
        parts.inputs()
        came.clear()
        kept = live.shapes()
        parts.weights()
        assert not [shape for shape in live.shapes() if ROWS in shape]
    inputs = [(ROWS, WIDTH), (ROWS, 12), (ROWS, 10), (ROWS, 10)]  # of three layers and the norm
    statistics = [(ROWS, 1), (ROWS, 1)]
    grads = [(ROWS, 12), (ROWS, 10), (ROWS, 10), (ROWS, 3)]
    assert kept == sorted([*inputs, *statistics, *grads])


def test_what_cannot_be_put_off():
    def parts_of(change, kinds=("linear",)):
        model, came = built(kinds), []
        out = change(model, arrived(came))
        parts = split_of(out.square().mean())
        parts.inputs()
        late = {n for n, p in model.named_parameters() if p.grad is None}
        parts.weights()
        assert all(p.grad is not None for p in model.parameters())
        return late

    def plain(model, x):
        return model(x)

    def marked(model, x):
        compute_weight_now(model[0].weight)
        return model(x)

    def hooked(model, x):
        h = model[0](x)
        mark_hooked(h.grad_fn)
        return model[1](h)

    both = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert parts_of(plain) == both
    assert parts_of(marked) == parts_of(hooked) == {"1.weight", "1.bias"}
    assert parts_of(plain, ["own function"]) == {"1.weight", "1.bias"}
    assert parts_of(plain, ["beside"]) == both
    assert parts_of(hooked, ["beside"]) == {"1.weight", "1.bias"}


def test_a_fork_that_hands_on_what_came_runs_once():
    model, ran = built(["beside"]), []
    out = model[0](arrived([]))
    out.grad_fn.register_hook(lambda *_: ran.append(1))
    parts = split_of(model[1](out).square().mean())
    parts.inputs()
    parts.weights()
    assert ran == [1]


def test_a_part_that_the_caller_calls_whole_is_done_at_once():
    model, came = built(["linear"]), []
    parts = split_of(model(arrived(came)).square().mean(), whole=lambda node: "so")
    assert parts.is_whole and [why for _, why in parts.unsplit] == ["so", "so"]
    parts.inputs()
    assert all(p.grad is not None for p in model.parameters()) and came
    parts.weights()


def test_the_graph_is_gone_for_a_second_first_part():
    """What the first part freed is an error, not a wrong number."""
    model, came = built(["attention"]), []
    loss = model(arrived(came)).square().mean()
    parts = split_of(loss)
    parts.inputs()
    with pytest.raises(RuntimeError, match="differentiated already"):
        loss.backward()


def test_calls_that_are_one_backward():
    log = []

    def hook(x):
        log.append(this_backward())
        run_after_backward(lambda: log.append("over"))

    w = torch.ones(2, requires_grad=True)
    w.register_post_accumulate_grad_hook(hook)
    with one_backward():
        assert this_backward() == -1
        w.sum().backward()
        w.sum().backward()
        assert len(log) == 2 and log[0] == log[1] < -1
    assert log[2:] == ["over", "over"]
    w.sum().backward()
    assert log[4] >= 0 and log[5] == "over" and this_backward() == -1
