"""What a checkpoint holds beside models: dicts and lists, and the state that an optimizer has for
itself. Leftover folders."""

from __future__ import annotations

import itertools
import math
import shutil
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.errors import MismatchError
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def big(value: float) -> torch.Tensor:
    return torch.full((100,), value)


def numbers(value: Any) -> Any:
    """Returns a tree with numbers in place of tensors."""
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers(v) for v in value]
    return float(value.float().mean()) if isinstance(value, torch.Tensor) else value


def test_two_paths_with_one_name_keep_both_tensors(tmp_path: Path) -> None:
    def tree(first: float) -> dict[Any, Any]:
        values = (big(first + i) for i in range(8))
        return {
            "a.b": next(values), "a": {"b": next(values), "b~2": next(values)}, 0: next(values),
            "0": next(values), "a.b~2": next(values), "l": [next(values)], "l.0": next(values),
        }  # fmt: skip

    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, notes=tree(1))
    for start in (tree(50), {}):
        filled: dict[Any, Any] = start
        checkpoints.load(notes=filled)
        assert numbers(filled) == numbers(tree(1))
    with pytest.raises(ValueError, match=r"two entries .* have the name a.b.c"):
        checkpoints.save(2, **{"a": {"b.c": big(1)}, "a.b": {"c": big(2)}})


@on_ranks(2)
def test_dicts_and_lists_are_filled_where_they_are(tmp_path):
    mesh = dt.ProcessMesh(range(dist.get_world_size()), ("dp",))

    def state(value: float) -> dict[str, Any]:
        full = torch.arange(14.0).view(7, 2) * value
        return {
            "ema": {"w": dt.shard_tensor(full, mesh, [S0]), "b": torch.full((3,), value)},
            "list": [dt.shard_tensor(full, mesh, [R]), {"big": big(value)}],
            "pending": dt.from_local(full, mesh, [dt.Partial()]),
            "value": value,
        }

    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, state=state(2.0), items=[dt.shard_tensor(big(2), mesh, [S0])])
    now, items = state(3.0), [dt.shard_tensor(big(3), mesh, [S0])]
    parts = [now["ema"], now["ema"]["w"], now["ema"]["b"], now["list"], *now["list"], items[0]]
    local = now["ema"]["w"].to_local()
    checkpoints.load(state=now, items=items)
    again = [now["ema"], now["ema"]["w"], now["ema"]["b"], now["list"], *now["list"], items[0]]
    assert all(a is b for a, b in zip(parts, again, strict=True))
    assert now["ema"]["w"].placements == (S0,) and now["list"][0].placements == (R,)
    assert numbers(now) == numbers(state(2.0)) and numbers(items) == [2.0]
    assert local.equal(now["ema"]["w"].to_local())
    other = {"ema": {"w": dt.shard_tensor(torch.zeros(7, 2), mesh, [S1])}, "more": 1}
    checkpoints.load(state=other)
    assert other["ema"]["w"].placements == (S1,) and "more" not in other
    assert numbers(other) == numbers(state(2.0))


class Statistics:
    """Has dicts of several classes; ``words`` gets a list for each new word."""

    def __init__(self, *words: str) -> None:
        self.seen, self.words = Counter(words), defaultdict(list, {w: [big(1)] for w in words})
        self.order = OrderedDict(dict.fromkeys(words, 1))
        self.order.version = 2  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {"all": [self.seen, self.words, self.order]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.words, self.order = state["all"]


def scheduled(steps: int) -> tuple[dict[str, Any], list[float]]:
    """Returns a schedule with a Counter in its state, and the learning rates of the steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    parts: list[Any] = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)]
    parts.append(lr_scheduler.MultiStepLR(optimizer, [1, 3]))
    schedule = lr_scheduler.SequentialLR(optimizer, parts, [3])
    return {"schedule": schedule}, stepped(schedule, steps)


def stepped(schedule: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        schedule.optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


def test_dicts_keep_their_classes(tmp_path: Path) -> None:
    checkpoints = dt.Checkpointer(tmp_path)
    run, _ = scheduled(2)
    counts = OrderedDict(a=Counter("aab"))
    checkpoints.save(1, **run, statistics=Statistics("a", "b", "a"), counts=counts)
    again, _ = scheduled(0)
    other, new = Statistics("c"), OrderedDict(b=1)
    words = other.words
    checkpoints.load(**again, statistics=other, counts=new)
    for rate in again["schedule"].optimizer.param_groups:
        rate["lr"] = run["schedule"].get_last_lr()[0]
    assert stepped(again["schedule"], 6) == scheduled(8)[1][2:]
    assert type(other.seen) is Counter and other.seen == Counter("aab")
    assert type(other.order) is OrderedDict and other.order.version == 2  # type: ignore[attr-defined]
    assert other.words["new"] == [] and numbers(other.words["a"]) == [1]
    assert [*words] == ["c"]  # a load asks it for no other word
    assert new == counts and type(new["a"]) is Counter
    checkpoints.load(counts=(plain := {"a": 1}))  # into a dict of another class
    assert plain == counts


def test_numbers_of_numpy_become_those_of_python(tmp_path: Path) -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD([weight], lr=1.0)
        rate = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step / 10)))
        return {"model": model, "optimizer": optimizer, "rate": rate}

    model = nn.Module()
    model.weight = weight = nn.Parameter(torch.ones(1))
    checkpoints, run = dt.Checkpointer(tmp_path), make()
    stepped(run["rate"], 2)
    assert isinstance(run["optimizer"].param_groups[0]["lr"], np.floating)
    checkpoints.save(1, **run, kinds={"x": [np.int64(3), np.bool_(True), np.str_("a")]})
    kinds: dict[str, Any] = {}
    expected, again = stepped(run["rate"], 2), make()
    checkpoints.load(**again, kinds=kinds)
    assert stepped(again["rate"], 2) == expected
    assert [(type(x), x) for x in kinds["x"]] == [(int, 3), (bool, True), (str, "a")]


class Averaged(torch.optim.SGD):
    """Keeps state for itself: in ``state``, and in what it adds to ``state_dict``."""

    rounds = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.rounds += 1
        ema = self.state.setdefault("ema", [])
        params = [p for group in self.param_groups for p in group["params"]]
        self.state["ema"] = ema or [p.detach() / 2 for p in params]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds, "table": big(self.rounds)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.rounds, table = state_dict["rounds"], state_dict["table"]
        assert table.equal(big(self.rounds))
        super().load_state_dict(state_dict)


def trained(steps: int) -> tuple[Any, Averaged]:
    mesh = dt.ProcessMesh(range(dist.get_world_size()), ("dp",))
    model = dt.shard_module(torch.nn.Linear(3, 4), mesh, {"*": [S0]})
    groups: Any = [{"params": model.parameters()}, {"params": []}]
    optimizer = Averaged(groups, lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(dt.ones(2, 3, mesh=mesh)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@on_ranks(2)
def test_the_state_that_an_optimizer_has_for_itself(tmp_path):
    checkpoints = dt.Checkpointer(tmp_path)
    model, optimizer = trained(2)
    optimizer.param_groups[1]["lr"] = 0.7
    checkpoints.save(1, model=model, optimizer=optimizer)
    for steps in (0, 1):
        other, its = trained(steps)
        checkpoints.load(model=other, optimizer=its)
        assert its.rounds == 2 and its.param_groups[1]["lr"] == 0.7
        ema = [x.full_tensor() if isinstance(x, dt.DistTensor) else x for x in its.state["ema"]]
        for x, want in zip(ema, optimizer.state["ema"], strict=True):
            assert x.equal(want.full_tensor())
        if steps:  # the layout that it has now
            assert all(isinstance(x, dt.DistTensor) for x in its.state["ema"])
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(its.state[p]["momentum_buffer"].to_local(),
                               optimizer.state[q]["momentum_buffer"].to_local())  # fmt: skip


def test_a_leftover_folder_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, elsewhere = dt.Checkpointer(tmp_path / "run", keep=1), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    checkpoints.save(1, x=big(1))
    (tmp_path / "run" / ".writing-000002-step-2").symlink_to(elsewhere)
    checkpoints.save(2, x=big(2))  # the link is removed, and not what it refers to
    assert (elsewhere / "file").read_text() == "kept"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["000002-step-2"]

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(16, "device or resource busy", str(path))

    for name in (".writing-000003-step-3", ".removing-000002-step-2"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / ".nfs0001").write_text("open elsewhere")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    for step in (3, 4):
        with pytest.warns(UserWarning, match="cannot be removed"):
            checkpoints.save(step, x=big(step))
        filled = big(0)
        assert checkpoints.load(x=filled) == step and filled.equal(big(step))
    monkeypatch.undo()
    checkpoints.save(5, x=big(5))
    assert [p.name[-6:] for p in (tmp_path / "run").iterdir()] == ["step-5"]


@on_ranks(2)
def test_conjugates_and_leaves_come_back(tmp_path: Path) -> None:
    """A lazily conjugated tensor has other bytes in memory than values."""
    mesh, z = dt.init_mesh((2,), ("x",)), torch.complex(torch.arange(99.0), torch.ones(99)).conj()
    trees = {"plain": z, "split": dt.shard_tensor(z.resolve_conj().conj(), mesh, [S0]).conj()}
    saved = dt.Checkpointer(tmp_path)
    saved.save(1, trees=trees, leaf=torch.ones(3, requires_grad=True))
    want = {"plain": z.resolve_conj(), "split": trees["split"].full_tensor().resolve_conj()}
    into = {"plain": torch.zeros_like(want["plain"]), "split": torch.zeros_like(trees["split"])}
    leaf = torch.zeros(3, requires_grad=True)
    saved.load(trees=into, leaf=leaf)
    assert torch.equal(into["plain"], want["plain"])
    assert torch.equal(into["split"].full_tensor().resolve_conj(), want["split"])
    assert leaf.tolist() == [1.0, 1.0, 1.0] and leaf.requires_grad and leaf.is_leaf
    values = {**trees, "imag": trees["plain"].imag, "split_imag": trees["split"].imag, "one": z[3]}
    here, back = nn.Module(), nn.Module()
    for name, value in values.items():
        here.register_buffer(name, value)
        back.register_buffer(name, torch.zeros_like(value.conj()).conj())
    dt.pretrained.save(here, tmp_path / "files")
    dt.pretrained.load(back, tmp_path / "files")
    for name, value in values.items():
        assert torch.equal(everything(getattr(back, name)), everything(value)), name


def everything(x: torch.Tensor) -> torch.Tensor:
    x = x.full_tensor() if isinstance(x, dt.DistTensor) else x
    return x.resolve_conj().resolve_neg()


@on_ranks(2)
def test_regular_values_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    rank = dist.get_rank()
    net = nn.Linear(2, 2, bias=False)
    nn.init.constant_(net.weight, rank)
    same = nn.Linear(2, 2, bias=False)
    nn.init.constant_(same.weight, 1)
    sgd = torch.optim.SGD(same.parameters(), momentum=0.9)
    sgd.state[same.weight]["momentum_buffer"] = torch.full((2, 2), float(rank))
    saved = dt.Checkpointer(tmp_path)
    kinds: dict[str, dict[str, Any]] = {
        "notes.a": {"notes": {"a": big(rank)}}, "net.weight": {"net": net},
        "big": {"big": big(rank)},
        "sgd.state.same.weight.momentum_buffer": {"same": same, "sgd": sgd},
    }  # fmt: skip
    for name, state in kinds.items():
        with pytest.raises(ValueError, match=rf"{name} is not the same on ranks 0 and 1"):
            saved.save(1, **state)
    with pytest.raises(MismatchError, match=r"weight differs between the ranks"):
        dt.pretrained.save(net, tmp_path)
    assert not saved.steps() and not list(tmp_path.glob("*.safetensors"))


_DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.bool, torch.int64, torch.uint16, torch.float64,
]  # fmt: skip
_SHAPES = [(5, 3), (3,), (1, 4), (), (0, 3), (7, 1)]


@on_ranks(4)
def test_values_of_all_dtypes_and_shapes_come_back_on_another_mesh(tmp_path: Path) -> None:
    """Elements lie where the processor can read them: complex128 not at an odd byte."""
    meshes = dt.init_mesh((2, 2), ("a", "b")), dt.ProcessMesh([3, 0, 1], ("c",))
    pairs = itertools.product(_DTYPES, _SHAPES)
    wholes = [torch.arange(35)[: math.prod(s)].view(s).to(d) for d, s in pairs]

    def placed(i: int, mesh: dt.ProcessMesh, first: int) -> list[Any]:
        kinds = [Replicate(), *(Shard(dim) for dim in range(wholes[i].ndim))]
        return [kinds[(i + first + axis) % len(kinds)] for axis in range(mesh.ndim)]

    saved = [dt.shard_tensor(x, meshes[0], placed(i, meshes[0], 0)) for i, x in enumerate(wholes)]
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, x=saved)
    for mesh in meshes:
        new = [
            dt.zeros(*x.shape, mesh=mesh, placements=placed(i, mesh, 1), dtype=x.dtype)
            for i, x in enumerate(wholes)
        ]
        checkpoints.load(x=new)
        for x, whole in zip(new, wholes, strict=True):
            full = x.full_tensor()
            if x.is_initialized:
                assert full.tolist() == whole.tolist() and full.dtype == whole.dtype


def test_an_empty_regular_buffer_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("none", torch.empty(0, 4))
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, model=model)
    assert checkpoints.load(model=model) == 1


@on_ranks(2)
def test_sets_are_equal_in_any_order(tmp_path: Path) -> None:
    """The order of a set follows from how it was filled, and from the hash seed of the process."""
    mine = {0, 8} if dist.get_rank() else {8, 0}
    assert repr(mine) == ("{0, 8}" if dist.get_rank() else "{8, 0}")
    dt.Checkpointer(tmp_path).save(1, x={"set": mine})
