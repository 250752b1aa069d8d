"""What a rank holds of a sharded module: between steps, and while segments are gathered during a
step."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor.comm import buffers
from disttensor.fsdp.all_gather_buffer import AllGatherBuffer
from disttensor.fsdp.segment import Segment
from disttensor.gradients.rows import BucketLayout
from tests.support.micro import BLOCKS, HIDDEN, WIDTH, batch_of, meshes, net, shard
from tests.support.pool import on_ranks

ITEM = 8  # bytes of a float64
BLOCK = [(HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)]
SEGMENTS = [[(WIDTH,), (3, WIDTH)], *[BLOCK] * BLOCKS]
ALL = [shape for segment in SEGMENTS for shape in segment]


def piece(shape: tuple[int, ...], n: int, i: int) -> int:
    """Elements of the piece of rank i of n, as torch.chunk cuts dim 0."""
    step = -(-shape[0] // n)
    return max(0, min(step, shape[0] - i * step)) * math.prod(shape[1:])


def row(shapes: list[tuple[int, ...]], n: int) -> int:
    """Elements of a row of a collective: the largest pieces, so at most 1/n of all, and what pads
    each tensor."""
    return sum(piece(shape, n, 0) for shape in shapes)


def reachable(tensors: Iterable[Any]) -> int:
    """Bytes of the memory behind these tensors, each once."""
    seen = {}
    for t in tensors:
        t = t.to_local() if isinstance(t, dt.DistTensor) else t
        storage = t.untyped_storage()
        seen[storage._cdata] = storage.nbytes()  # a wrapper refuses to tell its address
    return sum(seen.values())


def segments_of(model: Any) -> list[Segment]:
    segments: list[Segment] = model.__dict__["_data_parallel"].segments
    return segments


def alive() -> int:
    """Bytes of all tensors in this process."""
    gc.collect()
    plain = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return reachable(t for t in plain if t.device.type == "cpu" and t.layout is torch.strided)


def check_between_steps(stage: int) -> None:
    """Elements on rank i of n: p parameters, g gradients, s state of Adam (two per element, and a
    number per parameter).

        stage 3:    p = pieces               g = rows of the segments    s = 2 * pieces
        stage 2:    p = pieces + n * rows    g = rows of the segments    s = 2 * pieces
        stage 1:    p = pieces + n * rows    g = whole                   s = 2 * pieces

    A row has one number more per parameter. So stage 3 holds 1/n of each, and what pads. The whole
    gradients of stage 1 lie in memory that stays when they are dropped.
    """
    n, i = dist.get_world_size(), dist.get_rank()
    pieces, whole = (sum(piece(s, m, j) for s in ALL) for m, j in ((n, i), (1, 0)))
    rows = sum(row(shapes, n) for shapes in SEGMENTS)
    before = alive()
    model = shard(net(), meshes()["fsdp"], stage=stage)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        adam.zero_grad()
        model(batch_of(meshes()["fsdp"], 0)).sum().backward()
        adam.step()
    copies = [b.memory for s in segments_of(model) for b in s.buffers]
    state = [v for of in adam.state.values() for v in of.values() if torch.is_tensor(v)]
    held = {
        "p": reachable([*model.parameters(), *copies]),
        "g": reachable(p.grad for p in model.parameters()),
        "s": reachable(v for v in state if v.ndim),
    }
    want = {
        "p": pieces + (n * rows if stage < 3 else 0),
        "g": whole if stage == 1 else rows + len(ALL),
        "s": 2 * pieces,
    }
    assert held == {k: ITEM * v for k, v in want.items()}, (held, want)
    if stage == 3:
        assert rows * n <= whole + sum((n - 1) * math.prod(s[1:]) for s in ALL)
    # Nothing is held elsewhere: what else is alive are numbers of single elements (counters,
    # constants).
    adam.zero_grad()
    stays = ITEM * (2 * whole + len(ALL)) if stage == 1 else 0  # one memory, and pieces of it
    rest = alive() - before - held["p"] - held["s"] - stays
    assert rest <= 4096, rest


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_two_ranks_between_steps(stage: int) -> None:
    check_between_steps(stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(4)
def test_four_ranks_between_steps(stage: int) -> None:
    check_between_steps(stage)


# During a step ------------------------------------------------------------------------------------


class Watch:
    """Looks at the gathered memory of all segments whenever some of it came or went, and at the
    gradients of the unsharded parameters."""

    def __init__(self, model: Any) -> None:
        self.segments = segments_of(model)
        self.most: float = 0  # gathered segments at once, but for that of the root
        self.copied: float = 0  # the same while a collective's result is brought to its place
        self.grads = 0  # segments that hold whole gradients

    @staticmethod
    def holds(x: Any, nbytes: int) -> bool:
        """Has it so many bytes, or none? Memory that is used again may have been of a larger
        segment."""
        held: int = x.untyped_storage().nbytes()
        assert not held or nbytes <= held <= 2 * nbytes
        return held > 0

    def look(self, more: float = 0) -> None:
        gathered = more
        for segment in self.segments[1:]:
            for b in segment.buffers:
                gathered += self.holds(b.memory, b.nbytes)
                gathered += bool(b._arriving) and self.holds(b._arriving[1], b.nbytes)
        self.most = max(self.most, gathered if not more else 0)
        self.copied = max(self.copied, gathered)
        self.grads = max(
            self.grads, sum(any(p.has_grads() for p in s.params) for s in self.segments)
        )


@contextlib.contextmanager
def watched(model: Any) -> Iterator[Watch]:
    watch = Watch(model)
    originals = {name: getattr(AllGatherBuffer, name) for name in ("start", "finish", "free")}
    unpack = BucketLayout.unpack

    def looking(original: Any) -> Any:
        def run(self: Any) -> None:
            original(self)
            watch.look()

        return run

    def unpacking(self: Any, rows: Any, blocks: Any) -> None:
        inner = blocks is not watch.segments[0].buffers[0].blocks
        watch.look(more=float(inner))
        unpack(self, rows, blocks)

    for name, original in originals.items():
        setattr(AllGatherBuffer, name, looking(original))
    BucketLayout.unpack = unpacking  # type: ignore[method-assign]
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda *_: watch.look()))
        hooks.append(module.register_forward_hook(lambda *_: watch.look()))
    for leaf in [leaf for s in watch.segments for p in s.params for _, leaf in p.grad_leaves()]:
        hooks.append(leaf.register_post_accumulate_grad_hook(lambda _: watch.look()))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()
        for name, original in originals.items():
            setattr(AllGatherBuffer, name, original)
        BucketLayout.unpack = unpack  # type: ignore[method-assign]


def recomputing(model: Any, how: str) -> None:
    """Every block, or a part of every block, is computed again in the backward: called so, or so
    inside."""
    model.around = how == "around"
    if model.around:
        return
    for block in model.blocks:
        inner = block if how == "block" else block.up
        inner.forward = lambda x, f=inner.forward: checkpoint(f, x, use_reentrant=False)


@pytest.mark.parametrize("recompute", ["", "block", "inside", "around"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@on_ranks(2)
def test_gathered_segments_at_once(prefetch: int, recompute: str) -> None:
    """At most prefetch + 1, beside the root's, whose forward is around all others. Only while the
    result of a collective is brought to its place, and nothing is gathered ahead, its segment is
    there twice."""
    mesh = meshes()["fsdp"]
    model = net(blocks=5)
    if recompute:
        recomputing(model, recompute)
    model = shard(model, mesh, prefetch=prefetch)
    for step in range(3):
        with watched(model) as forward:
            out = model(batch_of(mesh, step)).sum()
        assert [b.is_gathered for s in segments_of(model) for b in s.buffers] == [True] + [
            False
        ] * 5
        with watched(model) as backward:
            out.backward()
        assert not any(
            b.memory.untyped_storage().nbytes() for s in segments_of(model) for b in s.buffers
        )
        learnt = prefetch if step else 0  # the order of the first forward is not known before
        assert forward.most == learnt + 1 and forward.copied <= max(learnt, 1) + 1, vars(forward)
        assert backward.most == prefetch + 1 and backward.copied <= max(prefetch, 1) + 1
        assert step == 0 or backward.grads <= 2, backward.grads  # the root's come in two halves
        model.zero_grad()


@on_ranks(2)
def test_without_gradients_nothing_stays() -> None:
    mesh = meshes()["fsdp"]
    model = shard(net(), mesh)
    with torch.no_grad(), watched(model) as watch:
        for step in range(2):
            model(batch_of(mesh, step))
    assert watch.most == 2, watch.most
    assert not any(
        b.memory.untyped_storage().nbytes() for s in segments_of(model) for b in s.buffers
    )


class Sometimes(torch.nn.Module):
    """A block of which a part is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.other = (torch.nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.both = True

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.always(x))
        return x + self.other(x) if self.both else x


@on_ranks(2)
def test_segments_are_freed_though_a_gradient_does_not_come() -> None:
    mesh = meshes()["fsdp"]
    model = net(blocks=5)
    model.blocks = torch.nn.ModuleList(Sometimes() for _ in range(5))
    model = shard(model, mesh)
    for both in (True, False, True):
        for block in model.blocks:
            block.both = both
        out = model(batch_of(mesh, 0)).sum()
        with watched(model) as backward:
            out.backward()
        assert backward.most == 2, (both, backward.most)


# From step to step --------------------------------------------------------------------------------


@on_ranks(2)
def test_steps_of_a_sharded_module_need_no_new_memory() -> None:
    mesh = meshes()["fsdp"]
    model = shard(net(blocks=5), mesh)
    kept = []
    for step in range(5):
        model.zero_grad()
        model(batch_of(mesh, step)).sum().backward()
        kept.append({storage.data_ptr() for storage in buffers.current_buffers().storages})
        assert buffers.current_buffers().lent == 0
    # How many reductions are under way at once is chance, so one may be more than before.
    assert kept[0] and len(kept[-1] & kept[-2]) > len(kept[-1]) / 2
    assert (
        sum(s.nbytes() for s in buffers.current_buffers().storages)
        <= buffers.current_buffers().most * 5 / 4
    )
    del model
    gc.collect()
    assert not buffers.current_buffers().storages


@on_ranks(2)
def test_what_somebody_keeps_of_a_step_does_not_change() -> None:
    mesh = meshes()["fsdp"]
    model = shard(net(blocks=5), mesh)
    held = []
    for step in range(3):
        model(batch_of(mesh, step)).sum().backward()
        weight, grad = model.blocks[0].up.weight, model.blocks[0].up.weight.grad
        full = weight.full_tensor()
        held += [(x, x.clone()) for x in (grad.to_local(), grad.to_local()[:1], full)]
        model.zero_grad()
        assert all(torch.equal(x, copy) for x, copy in held)
