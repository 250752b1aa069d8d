"""one_process: other libraries find one process, and disttensor communicates as before."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

import disttensor as dt
from disttensor.comm.rendezvous import create_groups
from disttensor.integrations import one_process
from disttensor.integrations.one_process import _see_own_device
from tests.support.pool import on_ranks

R, S0 = dt.Replicate(), dt.Shard(0)


@contextlib.contextmanager
def launched():
    """The variables of torchrun and Slurm, which workers of tests do not have."""
    rank = str(dist.get_rank())
    added = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "SLURM_NTASKS": "2"}
    added["MASTER_ADDR"] = added["MASTER_PORT"] = "0"
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield added
        assert added.items() <= os.environ.items()
    finally:
        os.environ.clear()
        os.environ.update(before)


@on_ranks(2)
@pytest.mark.feature("Other libraries")
def test_torch_and_the_environment_have_one_process_until_the_block_ends():
    with launched() as added:
        for error in (None, KeyError("in the block")):
            with contextlib.suppress(KeyError), one_process() as process:
                assert not dist.is_initialized() and not dist.group.WORLD
                assert dist.is_available() and not dist.is_torchelastic_launched()
                assert added.keys() & os.environ.keys() == {"MASTER_ADDR", "MASTER_PORT"}
                for fn in (dist.get_rank, dist.get_world_size, dist.barrier):
                    with pytest.raises(ValueError, match="has not been initialized"):
                        fn()
                with pytest.raises(ValueError, match="has not been initialized"):
                    DistributedSampler(range(4))
                with one_process() as inner:
                    assert inner.is_first == process.is_first
                assert not dist.is_initialized()
                if error:
                    raise error
            assert dist.is_initialized() and process.is_first == (dist.get_rank() == 0)


@on_ranks(2)
def test_disttensor_communicates_in_the_block():
    before = dt.init_mesh((2,), ("dp",))
    x = dt.shard_tensor(torch.arange(5.0), before, [S0], requires_grad=True)

    @one_process()
    def program():
        assert dt.init_mesh((2,), ("dp",)) is before  # the runtime is the same
        create_groups([((0, 1), ("dp",), "lane of one_process")])
        mesh = dt.init_mesh((2,), ("made_inside",))
        with dt.debugging.record_comms() as log:
            assert dt.shard_tensor(torch.ones(3), mesh, [S0]).sum().item() == 3
        assert [record.kind for record in log] == ["all_reduce"]
        stages = dt.init_mesh((2, 1), ("pp", "dp"))
        y = dt.reshard(dt.shard_tensor(torch.ones(3), stages[0], [R]), stages[1], [R])
        assert dt.broadcast_value(y * 2).tolist() == [2, 2, 2]
        with dt.debugging.compare_ranks():
            (x * x).sum().backward()

    program()
    assert x.grad.full_tensor().tolist() == [0, 2, 4, 6, 8]
    assert dist.get_world_size() == 2


@on_ranks(2)
def test_a_checkpoint_is_saved_and_loaded_in_the_block(tmp_path: Path):
    mesh = dt.init_mesh((2,), ("dp",))
    saved, loaded = (dt.shard_module(nn.Linear(5, 3), mesh, {"weight": [S0]}) for _ in range(2))
    with one_process():
        dt.Checkpointer(tmp_path / "run").save(1, model=saved)
        assert dt.Checkpointer(tmp_path / "run").load(model=loaded) == 1
        assert torch.equal(saved.weight.full_tensor(), loaded.weight.full_tensor())
        dt.pretrained.save(saved, tmp_path / "weights")
        dt.pretrained.load(loaded, tmp_path / "weights")


@on_ranks(2)
def test_the_ranks_but_the_first_are_quiet_and_write_to_a_temporary_folder(tmp_path: Path):
    tqdm = pytest.importorskip("tqdm").tqdm
    log, made = logging.getLogger("tests.one_process"), vars(tqdm)["__init__"]
    text, handler = io.StringIO(), logging.StreamHandler(shown := io.StringIO())
    log.addHandler(handler)
    with one_process() as process:
        first = process.is_first
        assert [*tqdm(range(3), file=text)] == [0, 1, 2]
        log.warning("twice")
        log.error("an error")
        folder = process.folder(tmp_path)
        assert folder.is_dir() and (folder == tmp_path) == first
        assert os.environ.get("WANDB_MODE") == (None if first else "disabled")
    log.removeHandler(handler)
    assert bool(text.getvalue()) == first and "an error" in shown.getvalue()
    assert ("twice" in shown.getvalue()) == first
    assert (
        folder.exists() == first
        and vars(tqdm)["__init__"] is made
        and not logging.root.manager.disable
    )
    assert "WANDB_MODE" not in os.environ


@on_ranks(2)
def test_batch_norm_that_syncs_counts_the_batch_once():
    mesh = dt.init_mesh((2,), ("dp",))
    x, plain = torch.randn(5, 3, 2), nn.BatchNorm1d(3)
    model = dt.shard_module(nn.SyncBatchNorm(3), mesh)
    with one_process():
        y = model(dt.shard_tensor(x, mesh, [S0]))
    torch.testing.assert_close(y.full_tensor(), plain(x))
    torch.testing.assert_close(model.running_var.full_tensor(), plain.running_var)


@on_ranks(2)
def test_accelerate_looks_again_inside_and_after_the_block():
    state = pytest.importorskip("accelerate.state")
    state.PartialState._reset_state()
    with launched():
        outside = state.PartialState(cpu=True)
        assert outside.num_processes == 2
        with one_process():
            assert state.PartialState(cpu=True).num_processes == 1
        assert state.PartialState().num_processes == 2
        state.PartialState._reset_state()


def test_a_process_group_that_starts_in_the_block_is_an_error():
    with pytest.raises(RuntimeError, match="a default process group was started"), one_process():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="device_type"), one_process("gpu"):
        pass
    with one_process() as process, pytest.raises(TypeError, match="folder: path"):
        process.folder(3)  # type: ignore[arg-type]
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("seen", "rank", "wanted"),
    [
        ("", "1", "1"),
        ("4,6", "1", "6"),
        ("6", "0", "6"),
        ("6", "1", "6"),
        ("GPU-a,GPU-b", "0", "GPU-a"),
    ],
)
def test_a_rank_sees_its_own_device_only(
    monkeypatch: pytest.MonkeyPatch, seen: str, rank: str, wanted: str
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setenv("LOCAL_RANK", rank)
    _see_own_device()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted
    assert os.environ["LOCAL_RANK"] == ("1" if (seen, rank) == ("6", "1") else "0")
