"""Checkpoints in object stores, through fsspec: its memory and its local file system."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import Shard
from disttensor.checkpoint import checkpointer, object_folder
from tests.support.pool import on_ranks


def memory() -> Any:
    fs = fsspec.filesystem("memory")
    fs.rm("/", recursive=True) if fs.ls("/") else None
    return fs


def values(step: int) -> dict[str, Any]:
    return {"x": torch.full((99,), float(step)), "notes": {"lr": 0.1 * step}}


def loaded(checkpoints: dt.Checkpointer) -> tuple[int | None, float]:
    x = torch.zeros(99)
    return checkpoints.load(x=x), x.sum().item() / 99


def test_an_object_store_keeps_the_newest_checkpoints() -> None:
    fs = memory()
    checkpoints = dt.Checkpointer("memory://bucket/run", keep=2)
    assert loaded(checkpoints) == (None, 0.0)
    for step in (1, 2, 3):
        checkpoints.save(step, background=step == 3, **values(step))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3] and loaded(checkpoints) == (3, 3.0)
    assert sorted(fs.ls("/bucket/run", detail=False)) == [
        "/bucket/run/000002-step-2", "/bucket/run/000003-step-3",
    ]  # fmt: skip
    x = torch.zeros(99)
    assert checkpoints.load(2, x=x) == 2 and x.sum() == 198
    data = fs.cat_file("/bucket/run/000003-step-3/__0_0.distcp")
    fs.pipe_file("/bucket/run/000003-step-3/__0_0.distcp", data[:700] + b"?" + data[701:])
    with pytest.raises(ValueError, match=r"__0_0\.distcp was changed since it was saved, at x"):
        loaded(checkpoints)


@on_ranks(2)
def test_ranks_share_a_store(tmp_path: Path) -> None:
    mesh = dt.ProcessMesh([0, 1], ("dp",))
    x = dt.shard_tensor(torch.arange(7.0), mesh, [Shard(0)])
    checkpoints = dt.Checkpointer(f"local://{tmp_path}/run", keep=1)
    for step in (1, 2):
        checkpoints.save(step, x=x)
    y = dt.zeros(7, mesh=mesh, placements=[dt.Replicate()])
    assert checkpoints.load(x=y) == 2 and y.tolist() == list(range(7))
    dist.barrier()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["000002-step-2"]


class Failing:
    """Lets calls of a file system fail, ``count`` times each, or from call ``first`` on."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, first: int = 0) -> None:
        self.calls, self.own = 0, threading.local()
        kind = type(fsspec.filesystem("memory"))
        for name in ("put_file", "pipe_file", "cat_file", "mv", "rm"):
            patch.setattr(kind, name, self.of(getattr(kind, name), count, first))

    def of(self, call: Any, count: int, first: int) -> Any:
        failed, own = [0], self.own

        def attempt(*args: Any, **kwargs: Any) -> Any:
            if getattr(own, "inside", False):
                return call(*args, **kwargs)
            self.calls += 1
            if failed[0] < count and self.calls > first:
                failed[0] += 1
                raise TimeoutError("the store is away")
            own.inside = True
            try:
                return call(*args, **kwargs)
            finally:
                own.inside = False

        return attempt


def test_an_operation_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    memory()
    monkeypatch.setattr(object_folder, "WAITS", (0.0, 0.0))
    checkpoints = dt.Checkpointer("memory://bucket/run", keep=1)
    Failing(monkeypatch, count=2)
    for step in (1, 2):
        checkpoints.save(step, **values(step))
    assert loaded(checkpoints) == (2, 2.0)


def test_a_save_that_fails_at_any_operation_leaves_the_newest_checkpoint() -> None:
    results = []
    for first in range(20):
        fs = memory()
        checkpoints = dt.Checkpointer("memory://bucket/run", keep=1)
        checkpoints.save(1, **values(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_folder, "WAITS", ())
            failing = Failing(patch, count=1_000, first=first)
            patch.setattr(object_folder.warnings, "warn", lambda *_, **__: None)
            try:
                checkpoints.save(2, **values(2))
            except OSError as error:
                assert "the store is away, in 1 attempts" in str(error)
        results.append(loaded(checkpoints)[0])
        assert loaded(checkpoints) in ((1, 1.0), (2, 2.0))
        checkpoints.save(3, **values(3))
        assert loaded(checkpoints) == (3, 3.0) and len(fs.ls("/bucket/run")) == 1
        if failing.calls <= first:
            break
    assert results[0] == 1 and results[-1] == 2 and results == sorted(results)


@pytest.mark.parametrize("what", ["load", "save"])
def test_an_error_in_a_look_hides_no_checkpoint(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ``exists`` of most file systems is False after any error."""
    monkeypatch.setattr(object_folder, "WAITS", (0.0,))
    checkpoints = dt.Checkpointer(f"local://{tmp_path}/run")
    for step in (1, 2):
        checkpoints.save(step, **values(step))
    failures = iter(["step-2/complete.json"])
    kind = type(fsspec.filesystem("local"))
    usual = kind.info

    def info(self: Any, path: Any, **kwargs: Any) -> Any:
        if str(path).endswith("step-2/complete.json") and next(failures, None):
            raise TimeoutError("the store is away")
        return usual(self, path, **kwargs)

    monkeypatch.setattr(kind, "info", info)
    if what == "load":
        assert loaded(checkpoints) == (2, 2.0)
    else:
        checkpoints.save(3, **values(3))
        assert checkpoints.steps() == [1, 2, 3]


@on_ranks(2)
def test_a_rank_that_ends_after_the_last_file_removes_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = dt.Checkpointer(f"local://{tmp_path}/run", keep=1)
    checkpoints.save(1, **values(1))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            usual = checkpointer._run_on_all_ranks
            patch.setattr(
                checkpointer, "_run_on_all_ranks", lambda what, group, _: usual(what, group, ends)
            )
        with pytest.raises(OSError, match="ended"):
            checkpoints.save(2, **values(2))
    dist.barrier()
    assert loaded(checkpoints) == (2, 2.0)


def ends() -> None:
    raise OSError("ended")
