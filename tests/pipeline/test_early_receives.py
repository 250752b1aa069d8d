"""Messages of the next micro-batch are asked for ahead where it is one of the same kind, and come
where it does something else all the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import pipeline, runtime
from disttensor.comm import p2p
from disttensor.pipeline import early_receives
from disttensor.pipeline.early_receives import kind_of
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes


def layers(visits):
    return [randn(9, 9, seed=stage) for stage in range(visits)]


def program(weights, meshes, cut, back):
    """Of a micro-batch, whose rows may be cut by their values. ``back``: a skip connection to the
    last visit, so that it receives from two."""

    def step(batch):
        x = batch[: int(batch[0, 0])] if cut else batch
        x = first = dt.shard_tensor(x, meshes[0]) if meshes else x
        for i, w in enumerate(weights):
            if meshes:
                x = dt.reshard(x, meshes[i])
            x = torch.tanh(x @ w)
            first = x if i == 0 else first
        if back:
            x = x + (dt.reshard(first, meshes[-1]) if meshes else first)
        return (x**2).mean()

    return step


def check(batches, schedule="1f1b", visits=2, cut=False, back=False):
    """Losses and gradients as in one process, bit for bit. Gives how many transfers were asked for
    ahead on this rank."""
    meshes = stage_meshes()
    order = meshes * (visits // 2)
    plain = [w.requires_grad_() for w in layers(visits)]
    want = [program(plain, None, cut, back)(batch) for batch in batches]
    for loss in want:
        loss.backward()
    weights = [
        dt.shard_tensor(w, mesh, requires_grad=True)
        for w, mesh in zip(layers(visits), order, strict=True)
    ]
    post = early_receives.post_early_receives
    with mock.patch.object(early_receives, "post_early_receives", wraps=post) as asked:
        losses = pipeline.run(
            program(weights, order, cut, back), batches, schedule,
            stages=order if visits > 2 else None,
        )  # fmt: skip
    for loss, other in zip(losses, want, strict=True):
        assert dt.broadcast_value(loss).item() == other.item()
    for w, other in zip(weights, plain, strict=True):
        if w.is_initialized:
            assert torch.equal(w.grad.to_local(), other.grad)
    return asked.call_count


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"])
@pytest.mark.parametrize("back", [False, True])
@on_ranks(2)
def test_the_next_micro_batch_is_asked_for_ahead(schedule, back):
    early = len(runtime.current_runtime().early)
    visits = 4 if schedule == "interleaved_1f1b" else 2
    count = check([randn(64, 9, seed=i) for i in range(5)], schedule, visits, back=back)
    each = 1 + (back and visits == 2)  # the skip of several visits comes in a later one
    assert count == (4 * each if dist.get_rank() == 1 else 0)
    assert len(runtime.current_runtime().early) == early


@on_ranks(2)
def test_a_micro_batch_of_another_shape_is_not():
    rows = [64, 64, 50, 1, 1, 64]
    count = check([randn(n, 9, seed=i) for i, n in enumerate(rows)])
    assert count == (2 if dist.get_rank() == 1 else 0)
    assert runtime.current_runtime().posts_early_receives


@on_ranks(2)
def test_a_program_that_goes_by_values_is_right_and_nothing_is_asked_for_from_then_on():
    def batch(rows, seed):
        made = randn(64, 9, seed=seed)
        made[0, 0] = rows
        return made

    batches = [batch(rows, i) for i, rows in enumerate([60, 60, 41, 33, 60, 60])]
    now = runtime.current_runtime()
    assert now.posts_early_receives
    try:
        count = check(batches, cut=True)
        assert count == (2 if dist.get_rank() == 1 else 0)
        assert now.posts_early_receives == (dist.get_rank() == 0)
        assert check(batches, cut=True) == 0
    finally:
        now.posts_early_receives = True


@pytest.mark.parametrize("rows", [[1, 1, 62, 62, 1], [54, 56, 54, 55]])
@on_ranks(2)
def test_a_message_of_another_size_is_not_taken_for_the_early_one(rows):
    """62 rows have as many bytes as 1 row, modulo 61; 54 to 56 rows are in one class."""
    batches = [randn(64, 9, seed=i) for i in range(len(rows))]
    for batch, n in zip(batches, rows, strict=True):
        batch[0, 0] = n
    try:
        check(batches, cut=True)
        check(batches[::-1], cut=True)
    finally:
        runtime.current_runtime().posts_early_receives = True


@on_ranks(2)
def test_micro_batches_that_share_a_channel_are_not():
    """Their messages are counted together, so nobody knows the tags ahead."""
    first = (
        1 + runtime.current_runtime().retired
    )  # other tests have left messages in the channels before
    shared = [first + i % 3 for i in range(5)]
    with mock.patch.object(p2p, "channels", lambda count: shared[:count]):
        assert check([randn(64, 9, seed=i) for i in range(5)]) == 0
        count = check([randn(64, 9, seed=i) for i in range(3)])
    text = "4 micro-batches: this schedule has more than 1 in"
    one = mock.patch.object(p2p, "channels", lambda count: [first] * count)
    with one, pytest.raises(ValueError, match=text):
        check([randn(64, 9, seed=i) for i in range(4)], "interleaved_1f1b", visits=4)
    assert count == (2 if dist.get_rank() == 1 else 0)
    assert runtime.current_runtime().posts_early_receives


def test_kinds():
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    assert kind_of((a, {"x": [b, 3, 0.5]})) == kind_of((b, {"x": [a, 3, 0.25]}))
    for same in (3, True, "mean", None):
        assert kind_of([a, same]) == kind_of([b, same])
    for one, other in [
        (a, a.double()), (a, a[:1]), ([a], (a,)), ([a, 3], [a, 4]), ({"x": a}, {"y": a}),
        (["a"], ["b"]), ([a], [a, b]), ([None], [a]),
    ]:  # fmt: skip
        assert kind_of(one) != kind_of(other)
    thing = object()
    assert kind_of(thing) != kind_of(thing)  # nobody knows what is in it
