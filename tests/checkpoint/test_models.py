"""Models and optimizers through torch.distributed.checkpoint's own functions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import disttensor as dt
from disttensor import DistTensor, ProcessMesh, Shard, Strategy
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import EACH, mlp, squares

STRATEGIES = {
    "dp": Strategy(dp=4),
    "sharding 1": Strategy(sharding=4, zero_stage=1),
    "sharding 3": Strategy(sharding=2, tp=2, segments=["blocks.*"]),
    "pp": Strategy(pp=2, tp=2),
}
PLAN = {"blocks.*.weight": {"tp": Shard(0)}, "embed.weight": {"tp": Shard(1)}}


class Block(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        return x + self.scale * torch.tanh(super().forward(x))


class Tied(nn.Module):
    """Sizes that nothing divides, a tied and a frozen weight, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class App(Stateful):
    """A model and its optimizer after ``steps`` steps."""

    def __init__(self, name: str | None, steps: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = Tied().double()
        self.optimizer: Any = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1 * (1 + seed)
        )
        self.mesh = None
        if name is not None:
            strategy = STRATEGIES[name]
            layers = ["embed", "blocks.*", "head"] if strategy.pp else None
            strategy.apply(self.model, self.optimizer, PLAN, layers=layers)
            self.mesh, self.places = strategy.stages()[0], strategy.batch(None)
        for i in range(steps):
            self.step(i)

    def step(self, i: int) -> float:
        x = (randn(8, seed=i) * 100).long() % 7
        if self.mesh is not None:
            x = dt.shard_tensor(x, self.mesh, self.places)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return dt.broadcast_value(loss.detach()).item()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: Any) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """name -> value of each leaf, DistTensors whole on every rank."""
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flat(value[key], f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, x in enumerate(value) for k, v in flat(x, f"{name}.{i}").items()}
    value = dt.broadcast_value(value)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value}


def same_state(got: Any, want: Any) -> None:
    got = flat(got)
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in want.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else type(value).__eq__
        assert equal(got[name], value), name


def alone(state: dict[str, Any], folder: Any) -> None:
    """Load in this process only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is alone
        dcp.load(state, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(4)
def test_a_run_goes_on_under_another_strategy(name, tmp_path):
    saved = App(name, steps=2)
    metadata = dcp.save({"app": saved}, checkpoint_id=tmp_path)
    want = flat(saved.state_dict())
    others = list(STRATEGIES)
    others = others[others.index(name) :] + others[: others.index(name)]
    losses = [saved.step(i) for i in (2, 3)]
    plain = App(None, steps=0, seed=1)
    alone({"app": plain}, tmp_path)
    same_state(plain.state_dict(), want)
    names = {f"app{name}" for name in want if "param_groups" not in name}
    assert names == {n for n in metadata.state_dict_metadata if "param_groups" not in n}
    torch.testing.assert_close([plain.step(i) for i in (2, 3)], losses, rtol=1e-9, atol=1e-9)
    for other in others[:2]:
        app = App(other, steps=1, seed=1)
        dcp.load({"app": app}, checkpoint_id=tmp_path)
        same_state(app.state_dict(), want)
        torch.testing.assert_close([app.step(i) for i in (2, 3)], losses, rtol=1e-9, atol=1e-9)


def whole(**options: Any) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, **options)


@pytest.mark.parametrize("name", ["sharding 3", "pp"])
@on_ranks(4)
def test_every_option_of_a_state_dict(name, tmp_path):
    app = App(name, steps=2)
    want = flat(app.state_dict())
    model, optimizer = app.model, app.optimizer

    of_model, of_optimizer = get_state_dict(model, optimizer, options=whole())
    gathered = {"model": of_model, "optimizer": of_optimizer}
    assert not any(isinstance(x, DistTensor) for x in _leaves(gathered))
    same_state(gathered, want)
    offloaded = get_model_state_dict(model, options=whole(cpu_offload=True))
    if dist.get_rank() == 0:
        same_state({"model": offloaded}, {k: v for k, v in want.items() if k[:7] == ".model."})
    else:
        assert offloaded == {}
    pieces = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert isinstance(pieces["embed.weight"], DistTensor)
    trained = get_model_state_dict(model, options=whole(ignore_frozen_params=True))
    assert gathered["model"].keys() - trained.keys() == {"blocks.1.bias"}

    for options in (whole(), whole(broadcast_from_rank0=True)):
        given = gathered if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}
        other = App(name, steps=1, seed=1)
        model_state, state = dict(given.get("model", {})), given.get("optimizer", {})
        set_model_state_dict(other.model, model_state, options=options)
        set_optimizer_state_dict(other.model, other.optimizer, state, options=options)
        same_state(other.state_dict(), want)

    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"o": get_state_dict(model, optimizer, options=flattened)[1]}
    dcp.save(state, checkpoint_id=tmp_path)
    other = App(name, steps=1, seed=1)
    _, state = get_state_dict(other.model, other.optimizer, options=flattened)
    dcp.load({"o": state}, checkpoint_id=tmp_path)
    set_model_state_dict(other.model, model.state_dict())
    set_optimizer_state_dict(other.model, other.optimizer, state, options=flattened)
    same_state(other.state_dict(), want)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in _leaves(v)]
    return [x for v in value for x in _leaves(v)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("name", ["sharding 3", "pp"])
@on_ranks(4)
def test_async_save_writes_what_was_there_when_it_was_called(name, tmp_path):
    app = App(name, steps=2)
    want = flat(app.state_dict())
    group = dist.new_group(backend="gloo")
    writer = dcp.FileSystemWriter(tmp_path / "second")
    first = dcp.async_save({"app": app}, checkpoint_id=tmp_path / "first", process_group=group)
    app.step(2)
    first.result()
    same = App(name, steps=2)
    second = dcp.async_save({"app": same}, storage_writer=writer, process_group=group)
    same.step(2)
    second.result()
    for folder in ("first", "second"):
        plain = App(None, steps=0, seed=1)
        alone({"app": plain}, tmp_path / folder)
        same_state(plain.state_dict(), want)


def fsdp2(steps: int) -> App:
    """torch's own shards: DTensors."""
    app = App.__new__(App)
    torch.manual_seed(steps)
    app.model = mlp()
    mesh = init_device_mesh("cpu", (4,))
    for i in (0, 2):
        fully_shard(app.model[i], mesh=mesh)
    fully_shard(app.model, mesh=mesh)
    app.optimizer = torch.optim.AdamW(app.model.parameters(), lr=0.01)
    for i in range(steps):
        squares(app.model, randn(4, 6, seed=i))
        app.optimizer.step()
    return app


def ours(steps: int) -> App:
    app = App.__new__(App)
    torch.manual_seed(steps)
    mesh = ProcessMesh([[0, 1], [2, 3]], ("dp", "fsdp"))
    app.model = dt.shard_data_parallel(mlp(), mesh, replicate_axis="dp", segments=["0"])
    app.optimizer = torch.optim.AdamW(app.model.parameters(), lr=0.01)
    for i in range(steps):
        squares(app.model, dt.shard_tensor(randn(4, 6, seed=i), mesh, [Shard(0), Shard(0)]))
        app.optimizer.step()
    return app


@on_ranks(4)
def test_checkpoints_of_torch_and_ours_are_one_format(tmp_path):
    for i, (source, target) in enumerate([(fsdp2, ours), (ours, fsdp2), (ours, ours)]):
        saved, app = source(2), target(1)
        dcp.save({"app": saved}, checkpoint_id=tmp_path / str(i))
        dcp.load({"app": app}, checkpoint_id=tmp_path / str(i))
        same_state(app.state_dict(), flat(saved.state_dict()))


@on_ranks(4)
def test_a_read_into_the_shards_themselves_is_seen_by_the_next_forward(tmp_path):
    """Ranks with an empty piece, which read nothing, gather again too."""
    mesh = ProcessMesh(range(4), ("fsdp",))

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return dt.shard_data_parallel(mlp(), mesh, stage=2, segments=EACH)

    saved, x = make(0), dt.shard_tensor(randn(4, 6), mesh, [Shard(0)])
    want = saved(x).full_tensor()
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path / "dcp")
    dt.pretrained.save(saved, tmp_path / "hf")
    for read in (
        lambda model: dcp.load(model.state_dict(), checkpoint_id=tmp_path / "dcp"),
        lambda model: dt.pretrained.load(model, tmp_path / "hf"),
    ):
        model = make(1)
        assert not torch.equal(model(x).full_tensor(), want)  # gathered now, and kept
        read(model)
        assert torch.equal(model(x).full_tensor(), want)


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2)), torch.full((3,), 7.0)

    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "steps": [self.scale * 2, 5]}

    def set_extra_state(self, state: Any) -> None:
        self.scale, self.steps = state["scale"], state["steps"]


@on_ranks(2)
def test_tensors_in_the_extra_state_of_a_module(tmp_path):
    model = dt.shard_module(WithExtraState(), dt.init_mesh((2,), ("x",)))
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, model=model)
    model.scale = torch.zeros(3)
    checkpoints.load(model=model)
    assert model.scale.tolist() == [7.0] * 3
    assert model.steps[0].tolist() == [14.0] * 3 and model.steps[1] == 5


class WithHistory(nn.Module):
    def __init__(self, *history: float) -> None:
        super().__init__()
        self.history = torch.tensor(history)

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


def test_extra_state_takes_the_size_that_was_saved(tmp_path: Any) -> None:
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, model=nn.Sequential(WithHistory(1, 2, 3), WithHistory(4)))
    model = nn.Sequential(WithHistory(0), WithHistory(0))
    checkpoints.load(model=model)
    assert [m.history.tolist() for m in model] == [[1, 2, 3], [4]]  # type: ignore[union-attr]
