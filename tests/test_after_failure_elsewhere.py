"""After an exception in a replay, a skipped module, a checkpoint, a scaler, a loader, a local_map
or a simulation, the steps that follow are those of a plain process that fails there too."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from disttensor.checkpoint.synced_file import SyncedFile
from disttensor.simulate import simulate
from tests.support.failing import POINT, Failure, Interrupt, armed, at_rest, changes, leftovers
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes
from tests.support.training import compare, full, mesh_of
from tests.test_after_failure import plain_dp

pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")


class Net(nn.Module):
    """Fails in Python at POINTs, and in a call for an ``at`` that is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        POINT("in the forward")
        h = h[:, at]
        return self.second(h) * self.scale


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


GOOD, BAD = [0, 1, 2, 3, 4, 5, 7, 6], [0, 1, 2, 9, 4, 5, 6, 7]


def tp(net: Any) -> Any:
    mesh = mesh_of((2,), ("tp",))
    dt.shard_module(net, mesh, {"first.*": [Shard(0)], "second.weight": [Shard(1)]})
    return mesh, [Replicate()]


def sharded(net: Any) -> Any:
    mesh = mesh_of((2,), ("fsdp",))
    dt.shard_data_parallel(net, mesh, segments=["first", "second"])
    return mesh, [Shard(0)]


def replicated(net: Any, stage: int) -> Any:
    """Two replicas of two shards."""
    mesh = mesh_of((2, 2), ("dp", "fsdp"))
    segments = ["first", "second"]
    dt.shard_data_parallel(net, mesh, replicate_axis="dp", stage=stage, segments=segments)
    return mesh, [Shard(0), Shard(0)]


HOW = {"dp": plain_dp, "tp": tp, "sharded": sharded}
HOW_4 = {f"replicated {stage}": partial(replicated, stage=stage) for stage in (1, 2)}


class Run:
    """Training steps, plain or on ranks."""

    def __init__(self, on: bool, how: str = "dp") -> None:
        torch.manual_seed(0)
        self.on = on
        self.net: Any = Net().double()
        if on:
            self.mesh, self.split = (HOW | HOW_4)[how](self.net)
        self.opt = sgd(self.net)
        self.out: list[Any] = []

    def given(self, x: Tensor, at: Any = None) -> Any:
        at = torch.tensor(at or GOOD)
        if not self.on:
            return x, at
        return dt.shard_tensor(x, self.mesh, self.split), dt.shard_tensor(at, self.mesh)

    def loss(self, seed: int, at: Any = None) -> Tensor:
        return self.net(*self.given(randn(5, 6, seed=seed), at)).square().sum()

    def step(self, seed: int, at: Any = None) -> None:
        self.opt.zero_grad()
        loss = self.loss(seed, at)
        loss.backward()
        self.out += [full(loss), [full(p.grad) for p in self.net.parameters()]]
        self.opt.step()
        self.out.append([full(p) for p in self.net.parameters()])

    def steps_after(self, before: Any) -> list[Any]:
        self.net.zero_grad()
        assert leftovers() == before, changes(before, leftovers())
        for i in range(3):
            self.step(20 + i)
        if self.on:
            assert leftovers() == before, changes(before, leftovers())
            at_rest(self.net)
        return self.out


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("way", ["in Python", "in a call"])
@on_ranks(2, timeout=120)
def test_steps_after_a_failed_replay(way, debug):
    """In the first call, which is recorded, in one that replays or checks, in later ones."""
    for how, before in part([*itertools.product(("dp", "tp"), (0, 1, 2))], 4):
        results = []
        for on in (False, True):
            run = Run(on, how)
            if on:
                dt.replay(run.net)
            with dt.debugging.compare_ranks() if on and debug else nullcontext():
                for i in range(before):
                    run.step(i)
                then = leftovers()
                if way == "in Python":
                    with armed("in the forward", 1, Failure), pytest.raises(Failure):
                        run.step(7)
                else:
                    with pytest.raises(IndexError):
                        run.step(7, BAD)
                results.append(run.steps_after(then))
        assert not run.net.forward.why() and run.net.forward.replays
        compare(results[1], results[0])


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.fails:
            raise Failure("in a stage")
        return self.second(h) + x


def staged(on: bool, before: int, which: int, way: str) -> Any:
    torch.manual_seed(0)
    parts: Any = nn.ModuleList([Stage(), Stage()]).double()
    meshes: Any = stage_meshes() if on else [None, None]
    for module, mesh in zip(parts, meshes, strict=True):
        if on:
            dt.shard_module(module, mesh)
    opt = sgd(parts)

    def here(what: str) -> Any:  # of the parameters of this rank
        return [full(getattr(p, what)) for p in parts[dist.get_rank()].parameters()]

    def step(seed: int) -> Any:
        opt.zero_grad()
        x: Any = randn(5, 6, seed=seed)
        if on:
            x = dt.shard_tensor(x, meshes[0])
        for i, module in enumerate(parts):
            if i == 1 and on:
                x = dt.reshard(x, meshes[1])
            if way == "shape" and i == which and seed == 7:
                x = x[:, :4]
            x = module(x)
            if way == "between" and i == which and seed == 7:
                raise Failure("between")
        loss = x.square().sum()
        loss.backward()
        value = dt.broadcast_value(loss.detach()) if on else loss.detach()
        grads = here("grad")
        opt.step()
        return value.clone(), grads, here("data")

    out = [step(i) for i in range(before)]
    then = leftovers()
    parts[which].fails = way == "flag"
    with pytest.raises(RuntimeError if way == "shape" else Failure):
        step(7)
    parts[which].fails = False
    assert leftovers() == then, changes(then, leftovers())
    out += [step(20 + i) for i in range(3)]
    assert leftovers() == then, changes(then, leftovers())
    return out


@on_ranks(2, timeout=120)
def test_steps_after_a_failed_module_that_ranks_skip():
    cases = [*itertools.product((0, 1, 2), (0, 1), ("flag", "shape", "between"))]
    for case in part(cases, 6):
        compare(staged(True, *case), staged(False, *case))


@on_ranks(2, timeout=120)
def test_an_error_in_a_call_whose_result_is_sent_is_raised_on_the_other_ranks():
    mesh = ProcessMesh([0], ("x",))
    x = dt.shard_tensor(torch.arange(3.0), mesh)

    def twice(piece: Tensor) -> Tensor:
        POINT("in a local function")
        return piece * 2

    cases = [
        (Failure, lambda: dt.local_map(twice, out_placements=[Replicate()])(x)),
        (Failure, lambda: dt.local_map(twice, out_placements=[Replicate()], out_shapes=[3])(x)),
        (IndexError, lambda: x[dt.shard_tensor(torch.ones(4, dtype=torch.bool), mesh)]),
        (ValueError, lambda: dt.from_local(torch.ones(2), mesh, [Shard(1)])),
    ]
    for error, call in cases:
        before = leftovers()
        for _ in range(2):
            with armed("in a local function", 1, Failure), pytest.raises(error):
                call()
        assert leftovers() == before
    mapped = dt.local_map(twice, out_placements=[Replicate()])
    assert dt.broadcast_value(mapped(x)).tolist() == [0, 2, 4]
    assert dt.broadcast_value(x[x > 0]).tolist() == [1, 2]


def local_maps(on: bool, way: str) -> Any:
    run = Run(on)

    def scaled(x: Tensor) -> Tensor:
        POINT("in a local function")
        y = x * 3
        if y.requires_grad:
            y.register_hook(lambda _: POINT("in its backward"))
        return y

    middle = dt.local_map(scaled, out_placements=[Shard(0)]) if on else scaled
    run.net.first.register_forward_hook(lambda m, args, out: middle(out))
    run.step(1)
    before = leftovers()
    with armed(way, 1, Failure), pytest.raises(Failure):
        run.step(7)
    return run.steps_after(before)


@on_ranks(2, timeout=120)
def test_steps_after_a_failed_local_map():
    for way in ("in a local function", "in its backward"):
        compare(local_maps(True, way), local_maps(False, way))


class Fragile(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        POINT("as the optimizer steps")
        super().step()
        POINT("as the optimizer has stepped")


def scaled(on: bool, how: str, way: str, error: Any) -> Any:
    run = Run(on, how)
    opt = Fragile(run.net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    if on:
        dt.optim.shard_scaler(scaler)
    refusals: list[str] = []
    out: list[Any] = []

    def step(seed: int) -> None:
        opt.zero_grad()
        loss = run.loss(seed)
        scaler.scale(loss).backward()
        POINT("before unscale_")
        scaler.unscale_(opt)
        POINT("before the step")
        torch.nn.utils.clip_grad_norm_(run.net.parameters(), 3.0)
        scaler.step(opt)
        scaler.update()

    def state() -> Any:
        return [full(p) for p in run.net.parameters()], scaler.state_dict()

    step(0)
    before = leftovers()
    with armed(way, 1, error), pytest.raises(error):
        step(7)
    for i in range(4):
        try:
            step(20 + i)
        except (RuntimeError, AssertionError) as refused:
            refusals.append(str(refused))
            scaler.update()  # as a program has to
        out.append(state())
    assert leftovers() == before, changes(before, leftovers())
    return refusals, out


def check_scaler(hows: Any) -> None:
    ways = ["in the forward", "before unscale_", "before the step", "as the optimizer steps",
            "as the optimizer has stepped"]  # fmt: skip
    cases = [*itertools.product(hows, ways, (Failure, Interrupt))]
    for how, way, error in part(cases, 6):
        (refusals, want), (again, got) = (scaled(on, how, way, error) for on in (False, True))
        assert again == refusals
        compare(got, want)


@on_ranks(2, timeout=120)
def test_steps_after_a_failed_one_of_a_scaler():
    check_scaler(("dp", "sharded"))


@on_ranks(4, timeout=120)
def test_steps_after_a_failed_one_of_a_scaler_on_four_ranks():
    check_scaler(HOW_4)


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 17

    def __getitem__(self, i: int) -> Any:
        if i == 6:
            POINT("in the data")
        return torch.tensor([float(i)])


def joined(samples: list[Any]) -> Any:
    if any(float(x) == 9 for x in samples):
        POINT("in collate_fn")
    return torch.stack(samples)


class Indices(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Any:
        for i in range(17):
            if i == 10:
                POINT("in the sampler")
            yield i

    def __len__(self) -> int:
        return 17


def epochs(loader: Any, way: str) -> list[Any]:
    out = []
    for nth in (0, 1, 0, 0):
        with armed(way, nth, Failure):
            batches = iter(loader)  # starts the workers
            while True:
                try:
                    out.append(full(next(batches)).flatten().tolist())
                except StopIteration:
                    break
                except (Failure, RuntimeError) as error:
                    assert way in str(error)
                    out.append([])
    return out


def check_loader(mesh: Any, placements: Any) -> None:
    for way, workers in (
        ("in the data", 0), ("in collate_fn", 0), ("in the sampler", 0), ("in the data", 2),
    ):  # fmt: skip
        results = []
        for on in (False, True):
            loader: Any = torch.utils.data.DataLoader(
                Samples(), 4, sampler=Indices(), collate_fn=joined, num_workers=workers
            )
            if on:
                loader = dt.shard_loader(loader, mesh, placements)
            results.append(epochs(loader, way))
        assert results[0] == results[1], way
        assert [] in results[0]


@on_ranks(2, timeout=120)
def test_batches_after_a_failed_one():
    check_loader(mesh_of((2,), ("dp",)), [Shard(0)])


@pytest.mark.parametrize("first", [Shard(0), Replicate()], ids=str)
@on_ranks(4, timeout=120)
def test_batches_after_a_failed_one_on_four_ranks(first):
    check_loader(mesh_of((2, 2), ("dp", "fsdp")), [first, Shard(0)])


def fails_to_write(monkeypatch: Any, who: int) -> None:
    write = SyncedFile.write

    def failing(self: Any, data: Any) -> int:
        if dist.get_rank() == who:
            POINT("as a file is written")
        return write(self, data)

    monkeypatch.setattr(SyncedFile, "write", failing)


def checkpointed(on: bool, how: str, way: str, nth: int, background: bool, path: Path) -> Any:
    run = Run(on, how)
    run.net.register_state_dict_pre_hook(lambda *_: POINT("in state_dict"))
    run.net.register_load_state_dict_post_hook(lambda *_: POINT("as a model is loaded"))
    run.opt.register_state_dict_post_hook(
        lambda *_: POINT("as an optimizer to be loaded gives its state")
    )
    run.opt.register_load_state_dict_post_hook(lambda *_: POINT("as an optimizer is loaded"))
    run.step(0)
    saver = dt.Checkpointer(path)
    state = {"model": run.net, "optimizer": run.opt}
    if on:
        saver.save(1, **state)
        saver.save(2, **state)
    run.step(1)
    before, loads = leftovers(), "loaded" in way
    if on:
        if loads:
            saver.save(3, **state)
        with armed(way, nth, OSError), pytest.raises(OSError, match=way):
            if loads:
                saver.load(2, **state)
            saver.save(3, background=background, **state)
            saver.wait()
        assert saver.steps() == ([1, 2, 3] if loads else [1, 2])
        if loads:
            saver.load(3, **state)
        saver.save(4, background=background, **state)
        saver.wait()
        assert saver.steps()[-2:] == ([3, 4] if loads else [2, 4])
        assert not any(t.name == "checkpoint" for t in threading.enumerate())
    run.steps_after(before)
    if on:
        saver.load(4, **state)
        run.steps_after(before)
    else:
        run.out += run.out[-9:]
    return run.out


WAYS = [
    ("in state_dict", 1), ("as a file is written", 1), ("as a model is loaded", 1),
    ("as an optimizer to be loaded gives its state", 1), ("as an optimizer is loaded", 1),
]  # fmt: skip


def check_checkpoints(hows: Any, tmp_path: Path, monkeypatch: Any) -> None:
    ranks = range(dist.get_world_size())
    cases = [*itertools.product(hows, WAYS, (False, True), ranks)]
    for i, (how, (way, nth), background, who) in enumerate(part(cases, 6)):
        with monkeypatch.context() as m:
            fails_to_write(m, who)
            path = tmp_path / str(i)
            got = checkpointed(True, how, way, nth, background, path)
            compare(got, checkpointed(False, how, way, nth, background, path))


@on_ranks(2, timeout=120)
def test_steps_after_a_failed_save_or_load(tmp_path, monkeypatch):
    check_checkpoints(("dp", "sharded"), tmp_path, monkeypatch)


@on_ranks(4, timeout=120)
def test_steps_after_a_failed_save_or_load_on_four_ranks(tmp_path, monkeypatch):
    check_checkpoints(HOW_4, tmp_path, monkeypatch)


def simulated(way: str, error: Any) -> None:
    def build() -> Any:
        POINT("as it is built")
        mesh = dt.init_mesh((2, 2), ("dp", "tp"))
        torch.set_default_dtype(torch.float64)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        dt.shard_data_parallel(dt.shard_module(model, mesh), mesh, shard_axis="dp")
        opt = sgd(model)

        def step() -> None:
            x = dt.ones(4, 6, mesh=mesh, placements=[Shard(0), Replicate()])
            loss = model(x).square().sum()
            POINT("in the step")
            loss.register_hook(lambda _: POINT("in the backward"))
            with torch.autocast("cpu"), torch.random.fork_rng():
                loss.backward()
            opt.step()

        return step

    with armed(way, 1 + (way == "in the step"), error), pytest.raises(error):
        simulate(build, 4)


@on_ranks(2, timeout=120)
def test_steps_after_a_failed_simulation():
    results = []
    for on in (False, True):
        run = Run(on, "sharded")
        run.step(0)
        before, groups = leftovers(), dist.group.WORLD
        environment, numbers = dict(os.environ), torch.get_rng_state()
        frozen = gc.get_freeze_count()
        for way in ("as it is built", "in the step", "in the backward"):
            for error in (Failure, Interrupt):
                if on:
                    simulated(way, error)
        assert dist.group.WORLD is groups and dict(os.environ) == environment
        assert torch.equal(torch.get_rng_state(), numbers)
        assert gc.isenabled() and gc.get_freeze_count() <= frozen
        results.append(run.steps_after(before))
    compare(results[1], results[0])


class Bad(torch.autograd.Function):
    """The identity, whose gradient may have another shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g[:-1] if POINT.name == "a gradient" else g


def unfit(on: bool, how: str, way: int) -> Any:
    run = Run(on, how)
    run.net.first.register_forward_hook(lambda m, args, out: Bad.apply(out))
    run.step(0)
    before = leftovers()
    x, at = run.given(randn(5, 6, seed=1))
    w = run.net.scale
    calls: list[Any] = [
        lambda: x + torch.ones(7), lambda: x @ x, lambda: torch.cat([x, x[0]]),
        lambda: x.view(7, 5), lambda: run.net(x[:, 1:], at), lambda: (x * w).sum().backward(x),
        lambda: w.data.copy_(torch.ones(7)), lambda: run.step(7, BAD),
    ]  # fmt: skip
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        calls[way]()
    with armed("a gradient", 0, Failure), pytest.raises((RuntimeError, ValueError)):
        run.step(7)
    return run.steps_after(before)


@on_ranks(2, timeout=120)
def test_steps_after_calls_of_unfit_shapes():
    for how, way in part([*itertools.product(HOW, range(8))], 8):
        compare(unfit(True, how, way), unfit(False, how, way))
