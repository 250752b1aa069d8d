"""lightning_strategy: Lightning's Trainer gives the losses and files of one process."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from functools import partial
from itertools import chain
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
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)


def fitted(
    degrees: dict[str, int] | None,
    folder: Path,
    steps: int = 8,
    start: Path | None = None,
    average: bool = False,
) -> tuple[dict[str, float], list[Any]]:
    """Returns the logged numbers of the last step, and the learned values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning
        from lightning.pytorch.callbacks import EMAWeightAveraging

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

            def forward(self, x):
                return self.down(self.up(x).tanh())

            def training_step(self, batch, number):
                x, y = batch
                loss = nn.functional.cross_entropy(self(x), y)
                self.log("loss", loss)
                return loss

            def validation_step(self, batch, number):
                x, y = batch
                self.log("right", (self(x).argmax(-1) == y).float().mean())

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=0.1)

        torch.manual_seed(1)
        data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
        plan = {"up.*": {"tp": dt.Shard(0)}, "down.weight": {"tp": dt.Shard(1)}}
        with contextlib.ExitStack() as around:
            options: dict[str, Any] = {}
            if degrees:
                around.enter_context(dt.integrations.one_process())
                around.enter_context(dt.values_everywhere())
                options["strategy"] = dt.integrations.lightning_strategy(
                    dt.Strategy(**degrees), plan, layers=["up", "down"]
                )
            trainer = lightning.Trainer(
                accelerator="cpu", devices=1, max_steps=steps, default_root_dir=str(folder),
                logger=False, enable_progress_bar=False, enable_model_summary=False,
                accumulate_grad_batches=2, gradient_clip_val=0.5, num_sanity_val_steps=0,
                callbacks=[EMAWeightAveraging(decay=0.5)] if average else [], **options,
            )  # fmt: skip
            trainer.fit(
                Module(), DataLoader(data, 5), DataLoader(data, 7), ckpt_path=start and str(start)
            )
            trainer.save_checkpoint(folder / str(world()[0]) / "end.ckpt")
            numbers = {name: float(x) for name, x in trainer.callback_metrics.items()}
            values = [dt.broadcast_value(p).tolist() for p in trainer.model.parameters()]
    return numbers, values


@pytest.mark.limit(240)
@pytest.mark.parametrize("axis", ["dp", "tp", "sharding", "pp"])
def test_two_ranks_fit_what_one_process_does(axis: str, tmp_path: Path) -> None:
    numbers, values = run_on_ranks(1, fitted, None, tmp_path / "one", timeout=100)[0]
    run_on_ranks(2, partial(fitted, steps=4), {axis: 2}, tmp_path, timeout=100)
    assert (tmp_path / "0" / "end.ckpt").exists() and not (tmp_path / "1").exists()
    other = {"sharding": 2} if axis != "sharding" else {"tp": 2}
    for run, degrees in (
        (fitted, {axis: 2}), (partial(fitted, start=tmp_path / "0" / "end.ckpt"), other)
    ):  # fmt: skip
        for mine, theirs in run_on_ranks(2, run, degrees, tmp_path / "on", timeout=100):
            assert mine == pytest.approx(numbers, rel=1e-4)
            for p, q in zip(theirs, values, strict=True):
                torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-4)


@pytest.mark.limit(240)
def test_the_average_of_weights_in_a_pipeline_is_that_of_one_process(tmp_path: Path) -> None:
    run = partial(fitted, steps=4, average=True)
    [(numbers, values)] = run_on_ranks(1, run, None, tmp_path / "one", timeout=100)
    for mine, theirs in run_on_ranks(2, run, {"pp": 2}, tmp_path / "pp", timeout=100):
        assert mine == pytest.approx(numbers, rel=1e-4)
        for p, q in zip(theirs, values, strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-4)
    files = (torch.load(tmp_path / name / "0" / "end.ckpt") for name in ("pp", "one"))
    held = [{**x["state_dict"], "current": [*x["current_model_state"].values()]} for x in files]
    torch.testing.assert_close(*held, rtol=1e-4, atol=1e-4)


def averaged(degrees: dict[str, int] | None, folder: Path) -> Any:
    """Returns the learned averages of two runs, the second one resumed, and what is printed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning
        from lightning.pytorch.callbacks import ModelCheckpoint

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Linear(6, 4)

            def prepare_data(self):
                (folder / "data").mkdir()

            def setup(self, stage):
                assert (folder / "data").exists()

            def training_step(self, batch, number):
                loss = self.net(batch[0]).square().mean()
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=0.1)

            def on_save_checkpoint(self, checkpoint):
                checkpoint["twice"] = {"values": [p.detach() * 2 for p in self.parameters()]}

        class Average(lightning.Callback):
            shadow: Any = None

            def on_train_start(self, trainer, module):
                self.shadow = self.shadow or [p.detach().clone() for p in module.parameters()]

            @torch.no_grad()
            def on_train_batch_end(self, trainer, module, *_):
                for mean, p in zip(self.shadow, module.parameters(), strict=True):
                    mean.mul_(0.5).add_(p.detach(), alpha=0.5)

            def state_dict(self):
                return {"shadow": self.shadow}

            def load_state_dict(self, state):
                self.shadow = state["shadow"]

        torch.manual_seed(1)
        loader, out = DataLoader(TensorDataset(torch.randn(8, 6)), 4), []
        around = dt.integrations.one_process() if degrees else contextlib.nullcontext()
        with around, contextlib.redirect_stdout(io.StringIO()) as text:
            for number in range(2):
                options: dict[str, Any] = {}
                if degrees:
                    made = dt.integrations.lightning_strategy(dt.Strategy(**degrees))
                    options["strategy"] = made
                average = Average()
                saving = ModelCheckpoint(
                    str(folder / "kept"),
                    filename="same",
                    save_last=True,
                    monitor="loss",
                    save_top_k=2,
                )
                trainer = lightning.Trainer(
                    accelerator="cpu", devices=1, max_epochs=1 + number, logger=False,
                    enable_progress_bar=False, enable_model_summary=False,
                    callbacks=[average, saving], **options,
                )  # fmt: skip
                start = str(folder / "kept" / "last.ckpt") if number else None
                trainer.fit(Module(), loader, ckpt_path=start)
                trainer.print("written once")
                out.append([dt.broadcast_value(mean).tolist() for mean in average.shadow])
                out.append(sorted(Path(path).name for path in saving.best_k_models))
                if trainer.is_global_zero:
                    (folder / "data").rmdir()
    held = torch.load(folder / "kept" / "last.ckpt", weights_only=False)
    assert all(type(value) is torch.Tensor for value in held["twice"]["values"])
    return out, text.getvalue()


def test_states_of_callbacks_are_saved_whole_and_data_are_prepared_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    [(wanted, printed)] = run_on_ranks(1, averaged, None, tmp_path / "one", timeout=100)
    ranks = run_on_ranks(2, averaged, {"sharding": 2}, tmp_path / "two", timeout=100)
    assert [text for _, text in ranks] == [printed, ""] == ["written once\n" * 2, ""]
    for mine, _ in ranks:
        assert mine[1::2] == wanted[1::2] and len(mine[3]) == 2
        for p, q in zip(chain(*mine[::2]), chain(*wanted[::2]), strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-4)
