"""process.saving: libraries save full values by their own functions, from all ranks."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor.comm.process_group import world
from disttensor.errors import MismatchError
from tests.support.pool import on_ranks, run_on_ranks

PLAN = {"0.*": {"tp": dt.Shard(0)}, "2.weight": {"tp": dt.Shard(1)}}


def trained(degrees: dict[str, int] | None, folder: Path) -> Any:
    """Returns two losses after a save, and the two after the files are loaded again."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1)
    x: Any = torch.randn(5, 6)
    with contextlib.ExitStack() as around:
        if degrees:
            process = around.enter_context(dt.integrations.one_process())
            around.enter_context(dt.values_everywhere())
            strategy = dt.Strategy(**degrees)
            net, optimizer = strategy.apply(net, optimizer, PLAN, layers=["0", "1", "2"])
            x = dt.shard_tensor(x, strategy.stages()[0], strategy.batch(None))

        def step() -> float:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        step()
        with process.saving(folder) if degrees else contextlib.nullcontext(folder) as place:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, place / "state.pt")
            (place / "pickle").write_bytes(pickle.dumps(net[0].weight))
        losses = [step(), step()]
        held = torch.load(folder / "state.pt")
        moments = [held["optimizer"]["state"][i]["exp_avg"] for i in range(4)]
        values = [*held["model"].values(), *moments]
        values.append(pickle.loads((folder / "pickle").read_bytes()).detach())
        assert all(type(value) is torch.Tensor for value in values)
        listed = [value.tolist() for value in values]
        net.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        losses += [step(), step()]
    return losses, listed


@pytest.mark.parametrize("axis", ["sharding", "tp", "pp"])
def test_files_hold_full_values_and_the_state_of_all_stages(axis: str, tmp_path: Path) -> None:
    [(losses, values)] = run_on_ranks(1, trained, None, tmp_path)
    assert losses[:2] == losses[2:]
    for mine, files in run_on_ranks(2, trained, {axis: 2}, tmp_path / "new" / axis):
        assert mine == pytest.approx(losses, rel=1e-4)
        for p, q in zip(files, values, strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_ranks_that_save_different_tensors_get_an_error(tmp_path: Path) -> None:
    with dt.integrations.one_process() as process:
        mesh = dt.init_mesh((2,), ("dp",))
        values = [dt.ones(n, mesh=mesh, placements=[dt.Shard(0)]) for n in (4, 6)]
        with (
            pytest.raises(MismatchError, match=r"rank 1: the saving of f32\[6@dp\]"),
            process.saving(tmp_path) as folder,
        ):
            torch.save(values[world()[0]], folder / "value.pt")


@on_ranks(2)
def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        dt.integrations.one_process() as process,
        pytest.raises(OSError, match=r"Process.saving \(rank 0\): NotADirectoryError"),
        process.saving(tmp_path / "file" / "folder"),
    ):
        pass
