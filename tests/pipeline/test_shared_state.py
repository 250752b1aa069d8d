"""Steps that change what all micro-batches share, under schedules that pause inside the step: an
error on all ranks names the change, and the state is as before. "1f1b" runs them as one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import disttensor as dt
from disttensor import pipeline
from disttensor.torch_private import FLAGS
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes

ORDERS = {"1f1b": [0, 1], "interleaved_1f1b": [0, 1, 0, 1], "zbv": [0, 1, 1, 0]}


class Layer(nn.Module):
    """Multiplies its input in training, adds its number of calls, and assigns this buffer."""

    def __init__(self, seed):
        super().__init__()
        self.w = nn.Parameter(randn(3, 3, seed=seed))
        self.register_buffer("calls", torch.zeros((), dtype=torch.double))
        self.register_buffer("mask", torch.ones(3, dtype=torch.double))

    def forward(self, x):
        self.calls = self.calls + 1
        return torch.tanh((3 * x if self.training else x) * self.mask @ self.w) + self.calls


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in range(4))
        self.register_buffer("scale", torch.ones((), dtype=torch.double))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


def in_eval(net, x, i):
    net.eval()
    loss = net(x)
    net.train()
    return loss


def left_in_eval(net, x, i):
    loss = net(x)
    net.layers[1].eval()
    return loss


def with_other_weights(net, x, i):
    weights = {name: p * (i + 1.0) for name, p in net.named_parameters()}
    return torch.func.functional_call(net, weights, (x,))


def with_a_setting(net, x, i):
    with sdpa_kernel(SDPBackend.MATH):
        return net(x)


def with_a_buffer(net, x, i):
    net.scale = net.scale + i + 1
    return net(x)


def with_a_buffer_of_a_layer(net, x, i):
    net.layers[3].mask = net.layers[3].mask * 2
    return net(x)


CHANGES = {
    in_eval: "`training` of the Net that was split to False (and 5 more)",
    left_in_eval: "`training` of 'layers.1' to False",
    with_other_weights: "the parameter 'w' of 'layers.0' to another tensor (and 3 more)",
    with_a_setting: "torch's setting flash_sdp_enabled to False",
    with_a_buffer: "the buffer 'scale' of the Net that was split to another tensor",
    with_a_buffer_of_a_layer: "the buffer 'mask' of 'layers.3' to another tensor",
}


def runs(step, schedule):
    """Returns the model and a function that runs ``step`` for four micro-batches."""
    net, order = Net(), [stage_meshes()[i] for i in ORDERS[schedule]]
    split = pipeline.split(net.layers, order, of=net)

    def run():
        data = [(i, randn(2, 3, seed=i)) for i in range(4)]
        return pipeline.run(
            lambda batch: step(net, dt.shard_tensor(batch[1], split.stages[0]), batch[0]),
            data, schedule, stages=order,
        )  # fmt: skip

    return net, run


def state(net):
    flags = [get() for get in FLAGS.values()]
    tensors = [*net.parameters(), net.scale, *(layer.mask for layer in net.layers)]
    return flags, [m.training for m in net.modules()], [*map(id, tensors)]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("step", CHANGES, ids=lambda step: step.__name__)
@on_ranks(2)
def test_a_change_is_an_error_that_names_it(step, schedule):
    net, run = runs(step, schedule)
    before = state(net)
    with pytest.raises(RuntimeError, match="the step has changed") as found:
        run()
    assert f"has changed {CHANGES[step]}" in str(found.value)
    where = "its end" if step is left_in_eval else "test_shared_state.py"
    assert where in str(found.value)
    del found
    assert state(net) == before


def plain(step):
    net, losses = Net(), []
    for i in range(4):
        losses.append(step(net, randn(2, 3, seed=i), i))
        losses[-1].backward()
    return net, [loss.detach() for loss in losses]


def compare(step, schedule):
    net, run = runs(step, schedule)
    losses = [dt.broadcast_value(loss) for loss in run()]
    expected, values = plain(step)
    torch.testing.assert_close(losses, values, rtol=1e-9, atol=1e-12)
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", [in_eval, with_a_setting], ids=lambda step: step.__name__)
@on_ranks(2)
def test_without_pauses_such_steps_run(step):
    compare(step, "1f1b")


@pytest.mark.parametrize("schedule", ORDERS)
@on_ranks(2)
def test_a_layer_may_assign_its_buffers(schedule):
    compare(lambda net, x, i: net(x), schedule)
