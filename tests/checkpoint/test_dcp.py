"""torch.distributed.checkpoint on DistTensors: what is written, by whom, and what is read."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import disttensor as dt
from disttensor import Partial, ProcessMesh
from tests.support.layouts import LAYOUTS, S0, S1, P, R, counted, grid
from tests.support.pool import on_ranks

SHAPES = [(5, 6), (3, 1), (0, 2), (4, 4)]


def numbered(shape, i: int) -> torch.Tensor:
    return counted(*shape) + 100 * i


def alone(state: dict[str, Any], folder: Any) -> None:
    """Load in this process only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is alone
        dcp.load(state, checkpoint_id=folder, no_dist=True)


@on_ranks(4)
def test_any_layout_is_written_once_and_read_into_any(tmp_path):
    mesh, names = grid(), {}
    for shape in SHAPES:
        names |= {f"{shape} {i}": (shape, i, pair) for i, pair in enumerate(LAYOUTS)}
    saved = {
        name: dt.shard_tensor(numbered(shape, i), mesh, pair)
        for name, (shape, i, pair) in names.items()
    }
    saved["scalar"] = dt.full((), 7.0, mesh=mesh)
    metadata = dcp.save(saved, checkpoint_id=tmp_path)
    for name, x in saved.items():
        entry = metadata.state_dict_metadata[name]
        assert entry.size == x.shape and entry.properties.dtype == x.dtype
        assert sum(c.sizes.numel() for c in entry.chunks) == x.numel(), name
    target = {"scalar": dt.full((), 0.0, mesh=mesh)}
    rest = [pair for pair in LAYOUTS if not any(isinstance(p, Partial) for p in pair)]
    for name, (shape, i, _) in names.items():
        target[name] = dt.zeros(
            *shape, mesh=mesh, placements=rest[i % len(rest)], dtype=torch.float64
        )
    dcp.load(target, checkpoint_id=tmp_path)
    for name, (shape, i, _) in names.items():
        assert torch.equal(target[name].full_tensor(), numbered(shape, i)), name
    assert target["scalar"].item() == 7.0
    plain = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _, _) in names.items()}
    alone(plain, tmp_path)
    for name, (shape, i, _) in names.items():
        assert torch.equal(plain[name], numbered(shape, i)), name
    with pytest.raises(dcp.api.CheckpointException, match="reshard that"):
        dcp.load({"(5, 6) 0": dt.shard_tensor(counted(5, 6), mesh, [P, R])}, checkpoint_id=tmp_path)


@on_ranks(4)
def test_replicas_share_the_writing_and_outsiders_have_no_part(tmp_path):
    """Sixteen equal tensors: four files of four; on two ranks of four: two files of eight."""
    for ranks in (range(4), (2, 0)):
        mesh, folder = ProcessMesh(list(ranks), ("dp",)), tmp_path / f"{len(ranks)}"
        state = {f"{i}": dt.shard_tensor(counted(6) + i, mesh, [R]) for i in range(16)}
        state["cut"] = dt.shard_tensor(counted(5, 3), mesh, [S0])
        metadata = dcp.save(state, checkpoint_id=folder)
        files = Counter(info.relative_path for info in metadata.storage_data.values())
        each = 16 // len(ranks)
        assert {f: n // each * each for f, n in files.items()} == {
            f"__{r}_0.distcp": each for r in sorted(ranks)
        }
        target = {name: torch.zeros_like(x) for name, x in state.items()}
        dcp.load(target, checkpoint_id=folder)
        for name, x in state.items():
            assert torch.equal(target[name].to_local(), x.to_local())
        everyone = ProcessMesh([3, 1, 2, 0], ("dp",))
        other = {"cut": dt.zeros(5, 3, mesh=everyone, placements=[S1], dtype=torch.float64)}
        dcp.load(other, checkpoint_id=folder)
        assert torch.equal(other["cut"].full_tensor(), counted(5, 3))


def peak_while(run: Any) -> int:
    """Bytes by which this process grew at most while ``run`` ran."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@on_ranks(4)
def test_loading_holds_the_pieces_and_one_read_buffer(tmp_path):
    """Tensors of 32 MiB, written in pieces of 8, read in pieces of 16. torch's reader holds a
    piece that was written three times: its file, its bytes, its tensor."""
    mesh, pair = ProcessMesh(range(4), ("x",)), ProcessMesh([1, 3], ("x",))
    rows = 4096
    state = {f"{i}": dt.full((rows, 2048), i, mesh=mesh, placements=[S0]) for i in range(8)}
    state = {name: x.float() for name, x in state.items()}
    dcp.save(state, checkpoint_id=tmp_path)
    del state
    target = {
        f"{i}": dt.zeros(rows, 2048, mesh=pair, placements=[S1], dtype=torch.float32)
        for i in range(8)
    }
    for x in target.values():
        x.fill_(-1)  # memory that is there
    dcp.load({"0": target["0"]}, checkpoint_id=tmp_path)  # and what torch imports for it
    peak = peak_while(lambda: dcp.load(target, checkpoint_id=tmp_path))
    assert peak < 28 * 2**20, f"{peak / 2**20} MiB"
    for i in range(8):
        assert (target[f"{i}"].to_local() == i).all()
