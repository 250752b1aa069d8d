"""Plans of saves and loads follow from layouts: ranks exchange none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.checkpoint import dcp_metadata
from disttensor.checkpoint.folder import LocalFolder, read_mark
from disttensor.checkpoint.saved_layout import SavedLayout, plan_writes
from disttensor.checkpoint.tensor_file import Reader
from disttensor.core.layout import Box, layout_of
from tests.support.pool import on_ranks

MESH = tuple(range(8)), (2, 2, 2)


def layouts(shape: tuple[int, ...]) -> list[SavedLayout]:
    kinds = [Replicate(), Shard(0), Shard(len(shape) - 1)]
    every = [layout_of(p, len(shape), 3) for p in itertools.product(kinds, repeat=3)]
    return [SavedLayout(shape, torch.float32, MESH, each.dims) for each in every]


@pytest.mark.parametrize("shape", [(5, 3), (13,), (1, 7)])
def test_pieces_are_those_that_their_ranks_hold(shape: tuple[int, ...]) -> None:
    for layout in layouts(shape):
        for replica in range(layout.copies()):
            chosen, count = layout._replace(replica=replica), np.zeros(shape, int)
            for rank, box in chosen.pieces(Box((0,) * len(shape), shape)):
                coordinate = tuple(map(int, np.unravel_index(rank, MESH[1])))
                assert chosen.place(coordinate) == (replica, box)
                count[box.slices] += 1
            assert (count == 1).all()
            for start in np.ndindex(shape):
                [(_, box)] = chosen.pieces(Box(start, (1,) * len(shape)))
                assert box.intersect(Box(start, (1,) * len(shape))) is not None


def tensors(*placements: Any) -> dict[str, Any]:
    mesh = dt.ProcessMesh(torch.arange(4).reshape(2, 2), ("dp", "tp"))
    whole = {f"x{i}": torch.arange(35.0).reshape(7, 5) + i for i in range(4)}
    return {name: dt.shard_tensor(x, mesh, list(placements)) for name, x in whole.items()}


@on_ranks(4)
def test_replicas_divide_the_writing_and_each_piece_is_written_once() -> None:
    for placements in ([Replicate(), Shard(1)], [Replicate(), Replicate()], [Shard(0), Shard(0)]):
        x = tensors(*placements)
        plan = plan_writes({**x, "big": torch.ones(40)}, {})
        every: list[Any] = [None] * 4
        dist.all_gather_object(every, (plan.nbytes(), plan.nbytes_of_ranks(), plan.pieces))
        assert sum(n for n, *_ in every) == 4 * (4 * 35 + 40)
        assert all(loads == dict(enumerate(n for n, *_ in every)) for _, loads, _ in every)
        if placements[0] == Replicate():
            assert min(n for n, *_ in every) > 0


@on_ranks(4)
def test_a_rank_opens_only_the_files_of_its_pieces(tmp_path: Path) -> None:
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, x=tensors(Shard(0), Shard(1)))
    opened: list[str] = []

    class Watched(LocalFolder):
        def open(self, path: Path, name: str) -> Any:
            opened.append(name)
            return super().open(path, name)

    checkpoints._files = Watched(tmp_path)
    target = {"x": {name: x * 0 for name, x in tensors(Shard(0), Replicate()).items()}}
    assert checkpoints.load(**target) == 1
    first = dist.get_rank() // 2 * 2  # the piece of this rank's row
    files = {name for name in opened if name.endswith(".distcp")}
    assert files == {f"__{first}_0.distcp", f"__{first + 1}_0.distcp"}
    assert all(x.tolist() == y.tolist() for x, y in zip(
        target["x"].values(), tensors(Shard(0), Shard(1)).values(), strict=True))  # fmt: skip


def trained(**degrees: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    strategy = dt.Strategy(**degrees)
    plan = {"0.*": {"tp": Shard(0)}}
    model, optimizer = strategy.apply(model, torch.optim.AdamW(model.parameters()), plan)
    with torch.no_grad():
        for p in model.parameters():
            optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(p.detach())}
    return {"model": model, "optimizer": optimizer}


@on_ranks(4)
@pytest.mark.parametrize(
    "degrees", [{"dp": 4}, {"sharding": 4, "zero_stage": 3}, {"tp": 4}, {"pp": 2, "tp": 2}]
)
def test_the_ranks_exchange_three_rows_whatever_is_saved(
    degrees: dict[str, int], tmp_path: Path
) -> None:
    state, checkpoints = trained(**degrees), dt.Checkpointer(tmp_path)
    checkpoints.save(1, **state)
    for call in (lambda: checkpoints.save(2, **state), lambda: checkpoints.load(**state)):
        with dt.debugging.record_comms() as log:
            call()
        assert log.counts() == {"all_gather": 3}


@on_ranks(4)
def test_ranks_that_save_other_layouts_are_named(tmp_path: Path) -> None:
    mesh = dt.ProcessMesh(torch.arange(4).reshape(2, 2), ("dp", "tp"))
    places = [Shard(0), Replicate()] if dist.get_rank() == 2 else [Shard(0), Shard(1)]
    local = torch.ones(2, 4) if dist.get_rank() == 2 else torch.ones(2, 2)
    x = dt.from_local(local, mesh, places, shape=(4, 4), run_check=False)
    with pytest.raises(ValueError, match="layout of x is not the same on ranks 0 and 2"):
        dt.Checkpointer(tmp_path).save(1, x=x)


@on_ranks(2)
def test_a_large_checkpoint_gets_the_metadata_of_torch_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_metadata, "MOST", 1)
    x = dt.shard_tensor(torch.arange(5.0), dt.ProcessMesh([0, 1], ("dp",)), [Shard(0)])
    checkpoints = dt.Checkpointer(tmp_path)
    checkpoints.save(1, x=x)
    assert checkpoints.load(x=x) == 1
    path = tmp_path / "000001-step-1"
    assert not (path / ".metadata").exists()
    dist.barrier()
    if dist.get_rank() == 0:
        dcp_metadata.main(path)
        _, files = read_mark(LocalFolder(tmp_path), path)
        flat = {"x": torch.zeros(5)}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(flat, checkpoint_id=path, no_dist=True)
        assert flat["x"].tolist() == list(range(5)) and ".metadata" not in files
    dist.barrier()


def test_a_name_that_is_not_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tensor x of shape \[3\]"):
        Reader(LocalFolder(tmp_path), tmp_path, {}, {}, {"x": torch.ones(3)})
