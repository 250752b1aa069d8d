"""Registered objects are saved whole, and the methods of accelerate wait for all ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import disttensor as dt
from disttensor.comm.process_group import world
from tests.support.pool import run_on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


class Average:
    def __init__(self, model: nn.Module):
        self.model, self.shadow = model, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        for mean, p in zip(self.shadow, self.model.parameters(), strict=True):
            mean.mul_(0.5).add_(p.detach(), alpha=0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]

    def save(self, path: str) -> None:
        """Saves as the EMAModel of diffusers does."""
        copied = net()
        for p, mean in zip(copied.parameters(), self.shadow, strict=True):
            p.data.copy_(mean)
        torch.save(copied.state_dict(), path)


def averaged(degrees: dict[str, int] | None, folder: Path) -> Any:
    """Returns losses around ``load_state``, the averages, and what the files of ``folder`` hold."""
    import safetensors.torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=draws), torch.randn(8, 4, generator=draws)
    with contextlib.ExitStack() as around:
        if degrees:
            around.enter_context(dt.integrations.one_process())
            around.enter_context(dt.values_everywhere())  # for pp
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        if degrees:
            dt.integrations.shard_accelerator(accelerator, dt.Strategy(**degrees))
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        average = Average(model)
        accelerator.register_for_checkpointing(average)

        def hook(models: list[nn.Module], weights: Any, output: str) -> None:
            if accelerator.is_main_process:
                average.save(os.path.join(output, "average.pt"))
                kept = {"model": models[0].state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(kept, os.path.join(output, "hook.pt"))
                path = os.path.join(output, "hook.safetensors")
                safetensors.torch.save_file(models[0].state_dict(), path)

        accelerator.register_save_state_pre_hook(hook)

        def step() -> float:
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average.step()
            return loss.item()

        step()
        accelerator.save_state()
        losses = [step()]
        accelerator.load_state()
        losses += [step(), step()]
        accelerator.save(model.state_dict(), folder / "saved.safetensors", safe_serialization=True)
        accelerator.wait_for_everyone()
        means = [dt.broadcast_value(mean).tolist() for mean in average.shadow]
    files = {path.name: path for path in folder.rglob("*") if path.suffix in (".pt", ".pkl")}
    states = torch.load(files["average.pt"]), torch.load(files["hook.pt"])
    custom = torch.load(files["custom_checkpoint_0.pkl"])
    held = [*states[0].values(), *states[1]["model"].values(), *custom["shadow"]]
    held += [state["exp_avg"] for state in states[1]["optimizer"]["state"].values()]
    for path in (folder / "saved.safetensors", *folder.rglob("hook.safetensors")):
        held += safetensors.torch.load_file(path).values()
    assert all(type(value) is torch.Tensor for value in held)
    return losses, sorted(files), means, [value.tolist() for value in held]


def surface(folder: Path) -> list[str]:
    """Returns which decorated functions have run on this rank."""
    first, ran = world()[0] == 0, []
    with dt.integrations.one_process():
        from accelerate import Accelerator
        from accelerate.utils import broadcast_object_list

        accelerator = dt.integrations.shard_accelerator(
            Accelerator(cpu=True), dt.Strategy(sharding=2)
        )
        for name in ("on_main_process", "on_local_main_process", "on_last_process"):
            getattr(accelerator, name)(lambda name=name: ran.append(name))()
        for name, number in (("on_process", 0), ("on_local_process", 1)):
            options = {name.removeprefix("on_").replace("process", "process_index"): number}
            getattr(accelerator, name)(lambda name=name: ran.append(name), **options)()
        for name, waits in (("a", accelerator.wait_for_everyone), ("b", None)):
            around = contextlib.nullcontext() if waits else accelerator.main_process_first()
            with around:
                if first:
                    time.sleep(0.3)
                    (folder / name).touch()
                if waits:
                    waits()
                assert (folder / name).exists()
        values = [world()[0]]
        assert broadcast_object_list(values) == values == [0]
        if not first:
            accelerator.set_trigger()
        assert (accelerator.check_trigger(), accelerator.check_trigger()) == (True, False)
        model = accelerator.prepare(net())
        with pytest.raises(RuntimeError, match="would hold only the piece of this rank"):
            pickle.dumps(model[0].weight)
        copied = pickle.loads(pickle.dumps(dt.ones(3, mesh=model[0].weight.process_mesh)))
        assert type(copied) is torch.Tensor
        if importlib.util.find_spec("transformers"):
            from transformers import TrainingArguments

            arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[])
            with arguments.main_process_first():
                if first:
                    time.sleep(0.3)
                    (folder / "c").touch()
                assert (folder / "c").exists()
    return ran


@pytest.mark.parametrize("axis", ["sharding", "pp"])
def test_registered_objects_and_hooks_save_full_values(axis: str, tmp_path: Path) -> None:
    [(losses, files, means, held)] = run_on_ranks(1, averaged, None, tmp_path / "one")
    for mine in run_on_ranks(2, averaged, {axis: 2}, tmp_path / "two"):
        assert (mine[0], mine[1]) == (pytest.approx(losses, rel=1e-4), files)
        for p, q in zip((*mine[2], *mine[3]), (*means, *held), strict=True):
            torch.testing.assert_close(torch.tensor(p), torch.tensor(q), rtol=1e-4, atol=1e-4)


def test_methods_for_the_main_process_run_on_the_first_rank(tmp_path: Path) -> None:
    ran, others = run_on_ranks(2, surface, tmp_path)
    assert len(ran) == 5 and not others
