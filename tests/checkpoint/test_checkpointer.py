"""dt.Checkpointer: a run goes on under any strategy; what cannot be saved or loaded says so."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import disttensor as dt
from disttensor import ProcessMesh, Shard
from disttensor.checkpoint.synced_file import SyncedFile
from tests.checkpoint import runs
from tests.support.pool import ROOT, on_ranks, run_on_ranks


@pytest.mark.limit(300)
def test_a_run_goes_on_under_any_strategy(tmp_path: Path) -> None:
    """A chain that saves and loads under each; ``make square`` has each pair."""
    first, *rest = runs.STRATEGIES
    for drop, names in ((0.0, rest), (runs.DROP, runs.WITH_DROPOUT)):
        folder = str(tmp_path / f"{drop}")
        wanted = run_on_ranks(1, runs.uninterrupted, len(names) + 3, drop)[0]
        run_on_ranks(1, runs.chain, [first], drop, folder, wanted)
        run_on_ranks(4, runs.chain, names, drop, folder, wanted, timeout=200)
        run_on_ranks(1, runs.chain, [first], drop, folder, wanted)


@pytest.mark.limit(240)
def test_a_process_that_is_killed_leaves_the_newest_checkpoint_whole() -> None:
    """At a few of the moments; ``make square`` has all."""
    command = [sys.executable, "-m", "tests.checkpoint.killed", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "killed" in done.stdout, done.stderr


def mesh_of_all() -> ProcessMesh:
    return ProcessMesh(range(dist.get_world_size()), ("dp",))


def small(tie: bool = False, kind: type[nn.Module] = nn.Linear, split: bool = True) -> Any:
    """A model and its optimizer after a step; 5 does not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5), nn.Linear(3, 5))
    if tie:
        model[3].weight = model[2].weight
    if split:
        dt.shard_module(model, mesh_of_all(), {"2.*": [Shard(0)], "3.*": [Shard(0)]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (model[3](model[1](model[0](torch.randn(4, 5)))).square().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def bits(*objects: Any) -> list[Any]:
    found = []
    for x in objects:
        state = x.state_dict()
        found += [state["param_groups"], *state["state"].values()] if "state" in state else [state]
    return [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in part.items()}
        for some in found
        for part in (some if isinstance(some, list) else [some])
    ]


def fails(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """On every rank alike, and the ranks are still in step."""
    with pytest.raises(kind, match=words):
        call()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, words)
    assert set(seen) == {words}


@pytest.mark.feature("Checkpoints")
@on_ranks(2)
def test_what_is_kept_and_given_back(tmp_path: Path) -> None:
    model, optimizer = small()
    checkpoints = dt.Checkpointer(tmp_path / "run", keep=2)
    assert checkpoints.load(model=model) is None and checkpoints.steps() == []
    table = dt.shard_tensor(torch.arange(7.0), mesh_of_all(), [Shard(0)])
    notes: dict[str, Any] = {"best": 0.5, "table": table, "list": [1, (2, None), torch.ones(2)]}
    dt.manual_seed(5)
    dt.rand(2, mesh=mesh_of_all())
    for step in (1, 2, 3):
        checkpoints.save(step, model=model, optimizer=optimizer, notes=notes, big=torch.ones(99))
    drawn, plain_drawn = dt.rand(2, mesh=mesh_of_all()).tolist(), torch.rand(2).tolist()
    assert checkpoints.steps() == [2, 3]
    other, its = small()
    for p in other.parameters():
        p.data.zero_()
    before = bits(other, its)
    filled: dict[str, Any] = {}
    big = torch.rand(99)  # and the generator is elsewhere
    assert checkpoints.load(model=other, optimizer=its, notes=filled, big=big) == 3
    assert bits(other, its) == bits(model, optimizer) != before
    assert filled["best"] == 0.5 and filled["list"][1] == (2, None)
    assert filled["table"].tolist() == table.tolist() and big.sum() == 99
    assert dt.rand(2, mesh=mesh_of_all()).tolist() == drawn
    assert torch.rand(2).tolist() == plain_drawn
    assert checkpoints.load(2, model=other) == 2  # a part
    plain, its = small(split=False)  # each rank by itself
    assert checkpoints.load(model=plain, optimizer=its) == 3
    assert bits(plain, its) == bits(model, optimizer)
    flat = {"model": {"0.weight": torch.zeros(3, 5), "2.weight": torch.zeros(5, 3)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is alone
        dcp.load(flat, checkpoint_id=tmp_path / "run" / "000003-step-3", no_dist=True)
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in flat["model"].items())
    written = dcp.FileSystemReader(tmp_path / "run" / "000003-step-3").read_metadata()
    assert written.planner_data is None  # names are flat: no path of keys for each of them
    tied, its = small(tie=True)
    checkpoints.save(4, background=True, model=tied, optimizer=its)
    again, other_its = small(tie=True)
    assert checkpoints.load(model=again, optimizer=other_its) == 4
    assert again[3].weight is again[2].weight and bits(again) == bits(tied)
    fails(ValueError, "model.3.weight shares its memory", lambda: checkpoints.load(model=model))
    fails(ValueError, "in this model, and the", lambda: checkpoints.load(3, model=tied))


def test_an_error_in_a_world_of_one_names_no_rank(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"random= is a name that") as caught:
        dt.Checkpointer(tmp_path).save(1, random=1)
    assert "(rank" not in str(caught.value)


@on_ranks(2)
def test_another_model_is_refused_by_name_before_anything_is_changed(tmp_path: Path) -> None:
    model, optimizer = small()
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, model=model, optimizer=optimizer, notes=[1])
    target, its = small()
    with torch.no_grad():
        target[0].weight.add_(1)
    before = bits(target, its)

    renamed = nn.Module()
    renamed.stem, renamed.bias = nn.Linear(5, 3), nn.Parameter(torch.zeros(3))
    wider, _ = small()
    wider[0].weight = nn.Parameter(torch.zeros(3, 6))
    one_less = torch.optim.SGD(list(target.parameters())[:-1], lr=0.1)
    one_group = torch.optim.AdamW(target.parameters(), lr=0.1)
    groups = [{"params": p, "lr": 0.1 * i} for i, p in enumerate(model.parameters())]
    checkpoints.save(2, model=model, optimizer=torch.optim.AdamW(groups), notes=[1])
    for words, state in (
        ("lacks: 4.weight", {"model": nn.Sequential(*target, nn.Linear(1, 1))}),
        ("not here: 3.weight, 3.bias", {"model": target[:3]}),
        ("is bias its 3.bias", {"model": renamed}),
        (r"model.0.weight is torch.float32 of shape \[3, 6\]", {"model": wider}),
        ("model.0.weight is torch.float64", {"model": small()[0].double()}),
        ("model.0.weight is on the meta device", {"model": small(split=False)[0].to("meta")}),
        ("has no extra: it has model, optimizer, notes", {"extra": []}),
        ("model is a AdamW, and the checkpoint has a model", {"model": its}),
        ("notes is a dict, and was saved as a list", {"notes": {}}),
        ("is in none of the models", {"optimizer": its}),
        ("optimizer: another optimizer was saved", {"model": target, "optimizer": one_less}),
        ("are in one group here", {"model": target, "optimizer": one_group}),
    ):
        fails(ValueError, words, lambda: checkpoints.load(**state))
        assert bits(target, its) == before
    fails(ValueError, "of step 7 in .* the steps are", lambda: checkpoints.load(7, model=target))


@on_ranks(2)
def test_a_file_that_was_changed_is_named(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = small()
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, model=model, optimizer=optimizer)
    path = tmp_path / "000001-step-1"
    names = sorted(os.listdir(path))
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json", "values.pt"]
    kept = {name: (path / name).read_bytes() for name in names}
    before = bits(model, optimizer)
    dist.barrier()

    def broken(name: str, data: bytes | None, words: str) -> None:
        if rank == 0:
            (path / name).unlink() if data is None else (path / name).write_bytes(data)
        dist.barrier()
        fails(ValueError, words, lambda: checkpoints.load(model=model, optimizer=optimizer))
        assert bits(model, optimizer) == before
        if rank == 0:
            (path / name).write_bytes(kept[name])
        dist.barrier()

    del kept[".metadata"]  # for torch
    for name, data in kept.items():
        if name == "complete.json":
            broken(name, data[:-9], "complete.json cannot be read")
        else:
            broken(name, data[:-1], rf"{name} has [0-9,]+ bytes, and was saved with")
            for at in (-30, 900 if name.endswith("distcp") else -30):  # the index, and a piece
                changed = bytearray(data)
                changed[at] ^= 1
                broken(name, changed, f"{name} was changed")
            broken(name, None, f"{name} is missing")
    # files whose sums are right, by somebody who means harm
    for name, words in ((".metadata", ""), ("values.pt", "makedirs|[Ww]eights")):
        harm = path / name
        if rank == 0:
            harm.write_bytes(pickle.dumps(Harm()))
            mark = json.loads(kept["complete.json"])
            mark["files"][name] = harm.stat().st_size, zlib.crc32(harm.read_bytes())
            (path / "complete.json").write_text(json.dumps(mark))
        dist.barrier()
        if words:
            fails(Exception, words, lambda: checkpoints.load(model=model))
        else:  # torch reads it, and disttensor does not
            checkpoints.load(model=model)
        assert not (tmp_path / "harm").exists()
        dist.barrier()
        if rank == 0:
            (path / name).write_bytes(kept.get(name, b""))
    dist.barrier()


class Harm:
    def __reduce__(self) -> Any:
        return os.makedirs, ("harm",)


class _Rank:
    def state_dict(self) -> Any:
        return {"rank": dist.get_rank()}

    def load_state_dict(self, state: Any) -> None: ...


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_at_the_next_call(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = small()
    state = {"model": model, "optimizer": optimizer}
    checkpoints = dt.Checkpointer(tmp_path / "run")
    checkpoints.save(1, **state)
    original = SyncedFile.write

    def full(self: Any, data: Any) -> int:
        if rank == victim:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return original(self, data)

    for victim in (0, 1):
        SyncedFile.write = full  # type: ignore[method-assign]
        try:
            words = rf"step 2 \(rank {victim}\): .*No space left on device: .*__{victim}_0"
            fails(OSError, words, lambda: checkpoints.save(2, **state))
            checkpoints.save(2, background=True, **state)
            fails(OSError, words, checkpoints.wait)
            checkpoints.save(3, background=True, **state)
            fails(OSError, "step 3", lambda: checkpoints.save(4, **state))
        finally:
            SyncedFile.write = original  # type: ignore[method-assign]
        assert checkpoints.load(**state) == 1 and checkpoints.steps() == [1]
    checkpoints.save(5, **state)
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "run")) == ["000001-step-1", "000002-step-5"]
    for words, kind, wrong in (
        ("of no|in none of the models", ValueError, {"optimizer": optimizer}),
        ("could not set the value of a int", TypeError, {"epoch": 3}),
        ("of is not the same on ranks 0 and 1", ValueError, {"of": _Rank()}),
        ("table holds a value that could not be loaded", TypeError, {"table": {"a": Harm()}}),
        ("a name that the checkpointer needs", ValueError, {"random": []}),
    ):
        fails(kind, words, lambda: checkpoints.save(6, **wrong))
    if rank == 0:
        (tmp_path / "file").write_text("")
    dist.barrier()
    elsewhere = dt.Checkpointer(tmp_path / "file" / "run")
    fails(OSError, r"rank 0\): .*file", lambda: elsewhere.save(1, **state))
    with pytest.raises(ValueError, match="keep=0: a whole number from 1 up"):
        dt.Checkpointer(tmp_path, keep=0)
