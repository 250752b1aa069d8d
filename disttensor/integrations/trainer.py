"""shard_trainer: the Trainer of transformers, or a subclass, under a Strategy."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from disttensor.checkpoint.same_files import check_same_files
from disttensor.checks import argument_error, check_type
from disttensor.comm.groups import world_group
from disttensor.comm.objects import gather_objects
from disttensor.integrations.accelerator import shard_accelerator
from disttensor.integrations.model import gathered_pickles, is_first, place, save_full
from disttensor.parallel.strategy import Strategy
from disttensor.tensor.values import broadcast_value, values_everywhere


def shard_trainer(
    trainer: Any,
    strategy: Strategy,
    plan: Any = None,
    *,
    layers: Iterable[nn.Module | str] | None = None,
) -> Any:
    """Gives a Trainer of transformers, or of a library that extends it, a strategy. Returns it.

    The trainer is made and used inside ``dt.integrations.one_process()``, on all ranks, with
    batches of the global size. Its model is sharded in place. Each batch is split over ``dp``
    and ``sharding``; losses, metrics and predictions are global. The first rank logs and writes;
    checkpoints have the format of transformers, with full values, and
    ``resume_from_checkpoint`` reads them under any strategy.

    Args:
        trainer: a transformers.Trainer that has not trained yet.
        strategy: how the processes are divided. The TrainingArguments set ``accumulate_steps``.
        plan: as for ``Strategy.apply``. None: with ``tp``, the model's own plan, else
            ``dt.plans.megatron``.
        layers: as for ``Strategy.apply``. None: with ``pp``, the model's pipeline plan.

    Returns:
        The trainer.

    Raises:
        TypeError: it is no Trainer of transformers.
        RuntimeError: its TrainingArguments found several processes.

    >>> with dt.integrations.one_process():  # doctest: +SKIP
    ...     trainer = Trainer(model, TrainingArguments("out"), train_dataset=samples)
    ...     dt.integrations.shard_trainer(trainer, dt.Strategy(sharding=4, tp=2))
    ...     trainer.train(resume_from_checkpoint=True)
    """
    check_type("shard_trainer: strategy", strategy, Strategy, "a dt.Strategy")
    if not any(kind.__module__ == "transformers.trainer" for kind in type(trainer).__mro__):
        raise argument_error("shard_trainer: trainer", trainer, "a Trainer of transformers")
    shard_accelerator(trainer.accelerator, strategy)
    place(trainer.model, strategy, plan, layers)
    trainer.args._n_gpu = min(trainer.args._n_gpu, 1)  # several: nn.DataParallel
    trainer.strategy = strategy
    trainer.__class__ = type(type(trainer).__name__, (_Sharded, type(trainer)), {})
    if not is_first():
        kind = type(trainer.args)
        quiet = {"should_save": False, "should_log": False}
        trainer.args.__class__ = type(kind.__name__, (kind,), quiet)
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = False
    return trainer


class _Sharded:
    """The methods of a Trainer that differ; the others are inherited from its class."""

    strategy: Strategy

    def is_world_process_zero(self) -> bool:
        return is_first()

    is_local_process_zero = is_world_process_zero

    def compute_loss_context_manager(self: Any) -> Any:
        around = super().compute_loss_context_manager()  # type: ignore[misc]
        around.enter_context(self.strategy.autocast())
        return around

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return broadcast_value(super().training_step(*args, **kwargs))  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with values_everywhere():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with values_everywhere():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    # Writing ----------------------------------------------------------------------------------

    def _save(self: Any, output_dir: Any = None, state_dict: Any = None) -> None:
        save = partial(super()._save, output_dir)  # type: ignore[misc]
        save_full("Trainer.save_model", self.model, lambda state: save(state_dict=state))

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if is_first():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        else:
            with gathered_pickles():
                self.optimizer.state_dict()  # sends its pieces

    def _save_rng_state(self, output_dir: str) -> None:
        if is_first():
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        best = gather_objects(self.state.best_model_checkpoint, world_group())  # it is complete
        self.state.best_model_checkpoint = best[0]

    # Reading ----------------------------------------------------------------------------------

    def _load_from_checkpoint(self, checkpoint: str, *args: Any, **kwargs: Any) -> None:
        check_same_files("Trainer: resume_from_checkpoint", checkpoint)
        super()._load_from_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self: Any) -> None:
        check_same_files("Trainer: load_best_model_at_end", self.state.best_model_checkpoint)
        super()._load_best_model()  # type: ignore[misc]
