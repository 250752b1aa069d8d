"""shard_accelerator: a plain loop with accelerate has the losses and files of one process."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import disttensor as dt
from disttensor.comm.process_group import world
from tests.support.pool import run_on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)


def looped(
    degrees: dict[str, int] | None, folder: Path, start: Path | None = None
) -> tuple[list[float], list[Any], str]:
    """Returns the losses of four steps of two micro-batches, or of the last two from ``start``, the
    learned values, and what is printed."""
    from accelerate import Accelerator

    folder = folder / str(world()[0])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    plan = {"0.*": {"tp": dt.Shard(0)}, "2.weight": {"tp": dt.Shard(1)}}
    text, losses = io.StringIO(), []
    around = contextlib.ExitStack()
    with around:
        around.enter_context(contextlib.redirect_stdout(text))
        if degrees:
            around.enter_context(dt.integrations.one_process())
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        if degrees:
            strategy = dt.Strategy(**degrees)
            dt.integrations.shard_accelerator(accelerator, strategy, plan)
            around.enter_context(dt.values_everywhere())
        loader = DataLoader(data, batch_size=5)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        skipped = 4 if start else 0
        if start:
            accelerator.load_state(str(start))
            for p, state in optimizer.state.items():  # read into the layout of the parameter
                assert state["exp_avg"].placements == p.placements
        for x, y in list(loader)[skipped:]:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss).item())
            if len(losses) == 4 and not start:
                accelerator.save_state(str(folder / "state"))
        accelerator.print("written once")
        accelerator.save_model(model, str(folder / "model"))
        values = [dt.broadcast_value(p).tolist() for p in model.parameters()]
    return losses, values, text.getvalue()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.limit(240)
@pytest.mark.parametrize("axis", ["dp", "tp", "sharding", "pp"])
def test_a_loop_on_two_ranks_is_that_of_one_process(axis: str, tmp_path: Path) -> None:
    (losses, values, said) = run_on_ranks(1, looped, None, tmp_path / "one")[0]
    ranks = run_on_ranks(2, looped, {axis: 2}, tmp_path, timeout=120)
    for mine, theirs, _ in ranks:
        assert mine == pytest.approx(losses, rel=1e-4)
        for p, q in zip(theirs, values, strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q))
    assert [text for _, _, text in ranks] == [said, ""] == ["written once\n", ""]
    assert files(tmp_path / "0") == files(tmp_path / "one" / "0") and not files(tmp_path / "1")
    other = {"sharding": 2} if axis != "sharding" else {"tp": 2}
    run = partial(looped, start=tmp_path / "0" / "state")
    again = run_on_ranks(2, run, other, tmp_path / "on", timeout=120)[0]
    assert again[0] == pytest.approx(losses[4:], rel=1e-4)


def outside() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    with pytest.raises(RuntimeError, match=r"inside: with dt.integrations.one_process\(\):"):
        dt.integrations.shard_accelerator(Accelerator(cpu=True), dt.Strategy())
    AcceleratorState._reset_state(reset_partial_state=True)


def test_an_accelerator_that_was_made_outside_of_the_block_is_refused() -> None:
    run_on_ranks(2, outside)
