"""shard_trainer: transformers' Trainer gives the losses, metrics and files of one process."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.checkpoint.same_files import check_same_files
from disttensor.comm.process_group import world
from tests.support.pool import run_on_ranks

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft"))),
    reason="transformers, accelerate or peft is not installed",
)
TIME = 16


def llama(lora: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TIME,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    return get_peft_model(model, LoraConfig(r=4, **targets))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(96, (count, TIME), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn % 7]


def trained(
    degrees: dict[str, int] | None,
    folder: Path,
    *,
    resume: Path | None = None,
    crash: bool = False,
    lora: bool = False,
    **options: Any,
) -> list[dict[str, float]]:
    """Returns the numbers that six steps log. Each rank has a folder of its own."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Crash(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if crash and state.global_step == 4:
                raise KeyError("a crash")

    def accuracy(prediction):
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": right.mean(), "rows": len(right)}

    with dt.integrations.one_process() if degrees else contextlib.nullcontext():
        arguments = TrainingArguments(
            str(folder / str(world()[0])), max_steps=6,
            per_device_train_batch_size=5, per_device_eval_batch_size=3,
            gradient_accumulation_steps=2, learning_rate=0.02, max_grad_norm=0.5, logging_steps=1,
            save_steps=3, eval_strategy="steps", eval_steps=3, report_to=[], disable_tqdm=True,
            use_cpu=True, **options,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                model=llama(lora), args=arguments, train_dataset=rows(40), eval_dataset=rows(7),
                compute_metrics=accuracy, callbacks=[Crash()],
            )  # fmt: skip
            if degrees:
                dt.integrations.shard_trainer(trainer, dt.Strategy(**degrees))
            with pytest.raises(KeyError, match="a crash") if crash else contextlib.nullcontext():
                trainer.train(resume_from_checkpoint=resume and str(resume))
    if not degrees:  # the options of this run hold for later ones in this process
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    kept = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_rows", "train_loss")
    return [{k: float(v) for k, v in e.items() if k in kept} for e in trainer.state.log_history]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What one process logs, without a strategy, and its folder."""
    folder = tmp_path_factory.mktemp("one")
    return run_on_ranks(1, trained, None, folder)[0], folder / "0"


def same(history: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    assert [e.keys() for e in history] == [e.keys() for e in wanted]
    for mine, theirs in zip(history, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def same_weights(folder: Path, other: Path) -> None:
    from safetensors.torch import load_file

    weights = [load_file(f / "checkpoint-6" / "model.safetensors") for f in (folder, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-3)


@pytest.mark.limit(240)
@pytest.mark.parametrize("axis", ["dp", "tp", "sharding", "pp"])
def test_two_ranks_log_and_write_what_one_process_does(
    axis: str, one: tuple[Any, Path], tmp_path: Path
) -> None:
    wanted, folder = one
    histories = run_on_ranks(2, trained, {axis: 2}, tmp_path, timeout=120)
    for history in histories:  # the state is the same on both, and one prints and writes it
        same(history, wanted)
    assert files(tmp_path / "0") == files(folder) and not files(tmp_path / "1")
    same_weights(tmp_path / "0", folder)


@pytest.mark.limit(240)
def test_a_run_that_crashed_goes_on_under_other_strategies(
    one: tuple[Any, Path], tmp_path: Path
) -> None:
    wanted, folder = one
    run_on_ranks(2, partial(trained, crash=True), {"tp": 2}, tmp_path, timeout=120)
    start = tmp_path / "0" / "checkpoint-3"
    for number, (count, degrees) in enumerate([(2, {"sharding": 2}), (2, {"pp": 2}), (1, None)]):
        other = tmp_path / f"other{number}"
        run = partial(trained, resume=start)
        history = run_on_ranks(count, run, degrees, other, timeout=120)[0]
        same(history[:-1], wanted[:-1])
        same_weights(other / "0", folder)


@pytest.mark.limit(240)
def test_adapters_with_bf16_and_recomputation(tmp_path: Path) -> None:
    more = {"lora": True, "bf16": True, "activation_checkpointing": True}
    wanted = run_on_ranks(1, partial(trained, **more), None, tmp_path / "one")[0]
    run_on_ranks(2, partial(trained, crash=True, **more), {"tp": 2}, tmp_path, timeout=120)
    start = tmp_path / "0" / "checkpoint-3"
    assert files(start) == files(tmp_path / "one" / "0" / "checkpoint-3")
    run = partial(trained, resume=start, **more)
    history = run_on_ranks(2, run, {"sharding": 2}, tmp_path / "on", timeout=120)[0]
    same(history[:-1], wanted[:-1], 2e-2)


def own_folders(folder: Path) -> None:
    """Trains in a folder that the ranks do not share."""
    from transformers import Trainer, TrainingArguments

    rank = world()[0]
    (folder / str(rank)).mkdir()
    refused = partial(pytest.raises, dt.errors.MismatchError)
    with (
        contextlib.chdir(folder / str(rank)),
        dt.integrations.one_process(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            "run", max_steps=2, per_device_train_batch_size=4, save_steps=1, eval_steps=1,
            eval_strategy="steps", load_best_model_at_end=True, report_to=[], disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(llama(), arguments, train_dataset=rows(4), eval_dataset=rows(2))
        dt.integrations.shard_trainer(trainer, dt.Strategy(sharding=2))
        with refused(match="load_best_model_at_end: .* files differs .* none on rank 1"):
            trainer.train()
        for name, content in (("same.bin", "of both"), ("folder/own.bin", f"of rank {rank}")):
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(content * 100_000)
        check_same_files("here", "same.bin")
        with refused(
            match="here: folder, which all ranks share,: files differs .* on rank 0, 1 of"
        ):
            check_same_files("here", "folder")


def test_checkpoints_in_folders_that_ranks_do_not_share_are_refused(tmp_path: Path) -> None:
    run_on_ranks(2, own_folders, tmp_path, timeout=120)
