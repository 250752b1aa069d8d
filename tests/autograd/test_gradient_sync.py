"""Whatever dim of the input is split, gradients end Partial there and are summed once: as one
process computes them.

Data, sequence, context and image parallelism, alone and together, are layouts of the same program
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import disttensor as dt
from disttensor import DistTensor, Partial, ProcessMesh, Replicate, Shard
from tests.support.oracle import (
    compare_replicas,
    fallbacks,
    place,
    randint,
    randn,
)
from tests.support.pool import on_ranks

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
BATCH, TIME, WIDTH, HIDDEN, WORDS, HEADS = 3, 5, 6, 7, 11, 2  # uneven over two ranks, but the heads


def to(x: Any, placements: Sequence[Any] | None) -> Any:
    """x resharded; a plain tensor, or one that may lie as it likes, stays."""
    if placements is None or not isinstance(x, DistTensor):
        return x
    return dt.reshard(x, x.process_mesh, placements)


# A transformer block between an embedding and the head tied to it ---------------------------------

SHAPES = {
    "embed": (WORDS, WIDTH), "position": (TIME, WIDTH), "unused": (WIDTH,),
    "norm1": (WIDTH,), "shift1": (WIDTH,), "q": (WIDTH, WIDTH), "qb": (WIDTH,), "k": (WIDTH, WIDTH),
    "v": (WIDTH, WIDTH),
    "vb": (WIDTH,), "o": (WIDTH, WIDTH), "ob": (WIDTH,), "norm2": (WIDTH,), "shift2": (WIDTH,),
    "up": (HIDDEN, WIDTH), "upb": (HIDDEN,), "down": (WIDTH, HIDDEN), "downb": (WIDTH,),
    "normf": (WIDTH,),
}  # fmt: skip
COLUMN, ROW = ("q", "qb", "k", "v", "vb", "up", "upb"), ("o", "down")


def loss_of(p: dict[str, Any], tokens: Any, targets: Any, cut: Any, whole: Any) -> Any:
    """``cut``: the layout of [batch, time, width] between the blocks; ``whole``: of what goes into
    matmuls."""
    x = to(F.embedding(tokens, p["embed"]) + p["position"], cut)
    h = to(F.layer_norm(x, (WIDTH,), p["norm1"], p["shift1"]), whole)
    q, k, v = (
        F.linear(h, p[n], p.get(n + "b")).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv"
    )
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = x + to(F.linear(h, p["o"]), cut) + p["ob"]
    h = to(F.layer_norm(x, (WIDTH,), p["norm2"], p["shift2"]), whole)
    h = F.gelu(F.linear(h, p["up"], p["upb"]))
    x = x + to(F.linear(h, p["down"]), cut) + p["downb"]
    x = F.layer_norm(x, (WIDTH,), p["normf"] * 2.0)
    logits = F.linear(to(x, whole), p["embed"])
    return F.cross_entropy(logits.transpose(1, 2), targets)


class Way(NamedTuple):
    """One way of parallelism: the mesh, layouts of tokens and activations, and the axis of tensor
    parallelism."""

    mesh: tuple[tuple[int, ...], tuple[str, ...]]
    tokens: Sequence[Any]
    cut: Sequence[Any] | None = None
    whole: Sequence[Any] | None = None
    tp: int | None = None
    embed: Any = R  # its layout on the axis of tp

    def layout(self, name: str) -> list[Any]:
        out: list[Any] = [R] * len(self.tokens)
        if self.tp is not None:
            out[self.tp] = S0 if name in COLUMN else S1 if name in ROW else R
            if name == "embed":
                out[self.tp] = self.embed
        return out


WAYS = {
    "dp": Way(((-1,), ("dp",)), [S0]),
    "cp": Way(((-1,), ("cp",)), [S1]),
    "sp": Way(((-1,), ("tp",)), [R], [S1], [R], 0),
    "sp, vocabulary split": Way(((-1,), ("tp",)), [R], [S1], [R], 0, S0),
    "dp x cp": Way(((2, 2), ("dp", "cp")), [S0, S1]),
    "dp x tp": Way(((2, 2), ("dp", "tp")), [S0, R], None, None, 1, S1),
    "dp x sp x tp": Way(((2, 2), ("dp", "tp")), [S0, R], [S0, S1], [S0, R], 1, S0),
    "cp x sp x tp": Way(((2, 2), ("cp", "tp")), [S1, R], [S1, S1], [S1, R], 1),
    "dp x cp x tp": Way(((1, 2, 2), ("dp", "cp", "tp")), [S0, S1, R], None, None, 2),
    "batch over both": Way(((2, 2), ("a", "b")), [S0, S0]),
    "time over both": Way(((2, 2), ("a", "b")), [S1, S1]),
}


class Ran(NamedTuple):
    """Parameters with their gradients; names of those that waited, by axes; what the last pass and
    the reduction sent."""

    params: dict[str, Any]
    waited: dict[str, list[str]]
    forward_backward: dt.debugging.CommLog
    reduction: dt.debugging.CommLog


def run(way: Way, frozen: Sequence[str] = (), steps: int = 1) -> Ran:
    """``steps`` backward passes and one sync_gradients, compared with one process; a second one
    sends nothing."""
    shape, names = way.mesh
    mesh = ProcessMesh(torch.arange(dist.get_world_size()).reshape(shape), names)
    plain, ours = {}, {}
    for i, (name, size) in enumerate(SHAPES.items()):
        full = randn(*size, seed=i)
        plain[name] = full.clone().requires_grad_(name not in frozen)
        ours[name] = place(full, mesh, way.layout(name)).requires_grad_(name not in frozen)
    for step in range(steps):
        tokens, targets = (randint(0, WORDS, (BATCH, TIME), seed=2 * step + i) for i in (0, 1))
        loss_of(plain, tokens, targets, None, None).backward()
        with dt.debugging.record_comms() as passes, fallbacks() as fell:
            x, y = place(tokens, mesh, way.tokens), place(targets, mesh, way.tokens)
            loss_of(ours, x, y, way.cut, way.whole).backward()
        assert not fell, fell
    waited: dict[str, list[str]] = {}
    for name, p in ours.items():
        if p.grad is not None and p.grad.partial_status:
            axes = "+".join(names[a] for a in p.grad.partial_status if mesh.shape[a] > 1)
            waited.setdefault(axes, []).append(name)
    with dt.debugging.record_comms() as log:
        dt.sync_gradients(ours.values())
    compare_replicas([p.grad for p in ours.values()])
    for name, p in ours.items():
        expected = plain[name].grad
        assert (p.grad is None) == (expected is None), name
        if expected is not None:
            assert not p.grad.partial_status, name
            full = p.grad.full_tensor()
            same = torch.allclose(full, expected, rtol=1e-9, atol=1e-11)
            assert same, f"gradient of {name}: {full} and not {expected}"
    with dt.debugging.record_comms() as again:
        dt.sync_gradients(ours.values())
    assert not again.records
    return Ran(ours, waited, passes, log)


def sent(log: dt.debugging.CommLog) -> list[tuple[str, str]]:
    return [(r.kind, r.axis) for r in log]


def one_each(ran: Ran) -> None:
    """One flat all-reduce for all that wait on the same axes."""
    assert sent(ran.reduction) == [("all_reduce", axes) for axes in ran.waited]
    for record, (axes, names) in zip(ran.reduction, ran.waited.items(), strict=True):
        sizes = [ran.params[n].grad.spec.box_at((0, 0, 0))[1] for n in names]
        assert record.shape == (sum(torch.Size(s).numel() for s in sizes),), axes


SMALL = {"position", "norm1", "shift1", "ob", "norm2", "shift2", "downb"}
SPLIT_IN_TIME = SMALL - {"position"}  # it joins before the sequence is cut


@pytest.mark.parametrize("name", ["dp", "cp"])
@on_ranks(2)
def test_one_axis_is_one_flat_all_reduce(name):
    """Batch or sequence: parameters wait on the axis, and all of them together are one
    collective."""
    ran = run(WAYS[name], steps=2)
    assert list(ran.waited) == [name] and {"embed", *SMALL, *COLUMN} <= set(ran.waited[name])
    one_each(ran)


@pytest.mark.parametrize("name", ["sp", "sp, vocabulary split"])
@on_ranks(2)
def test_sequence_parallel(name):
    """Norms and elementwise on S(time): their weights wait on tp; what tp splits waits on nothing.
    Each half of a block is one all-gather and one reduce-scatter, and the backward mirrors it."""
    ran = run(WAYS[name], steps=2)
    assert list(ran.waited) == ["tp"] and set(ran.waited["tp"]) == SPLIT_IN_TIME
    one_each(ran)
    if name == "sp":  # and one gather before the head; a normf that is a product is reduced at once
        assert ran.forward_backward.counts("forward") == {"all_gather": 3, "reduce_scatter": 2}
        backward = {"all_reduce": 1, "all_gather": 3, "reduce_scatter": 2}
        assert ran.forward_backward.counts("backward") == backward


@pytest.mark.parametrize("name", ["dp", "cp"])
@on_ranks(4)
def test_four_ranks_of_which_some_have_nothing(name):
    """A batch of 3 or a sequence of 5 over 4 ranks."""
    one_each(run(WAYS[name]))


@pytest.mark.parametrize("name", ["dp x cp", "batch over both", "time over both"])
@on_ranks(4)
def test_axes_of_one_parameter_are_reduced_together(name):
    """dp and cp together: one collective over both."""
    ran = run(WAYS[name], steps=2)
    both = "+".join(WAYS[name].mesh[1])
    assert next(iter(ran.waited)) == both and {"embed", *SMALL, *COLUMN} <= set(ran.waited[both])
    one_each(ran)


@pytest.mark.parametrize("name", ["dp x tp", "dp x sp x tp", "cp x sp x tp", "dp x cp x tp"])
@on_ranks(4)
def test_together_with_tensor_parallelism(name):
    """What tp splits waits on the data axis, the rest on that or on both: two collectives."""
    ran = run(WAYS[name], steps=2)
    data = WAYS[name].mesh[1][-2]
    assert set(ran.waited) <= {data, f"{data}+tp"}
    assert set(COLUMN) <= set(ran.waited[data])
    if "sp" in name:
        assert set(ran.waited[f"{data}+tp"]) >= SPLIT_IN_TIME
    one_each(ran)


@on_ranks(4)
def test_frozen_parameters_wait_for_nothing():
    frozen = ["embed", "norm1", "ob", "k"]
    ran = run(WAYS["dp x cp"], frozen=frozen)
    assert all(ran.params[n].grad is None for n in [*frozen, "unused"])
    one_each(ran)
