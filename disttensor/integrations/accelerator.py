"""shard_accelerator: the Accelerator of accelerate under a Strategy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from disttensor.checks import argument_error, check_type
from disttensor.fsdp.contexts import accumulate
from disttensor.integrations.model import (
    full_state,
    is_first,
    on_first,
    place,
    rebind,
    save_full_state,
)
from disttensor.optim.grad_scaler import shard_scaler
from disttensor.parallel.strategy import Strategy


def shard_accelerator(
    accelerator: Any,
    strategy: Strategy,
    plan: Any = None,
    *,
    layers: Iterable[nn.Module | str] | None = None,
) -> Any:
    """Gives an Accelerator a strategy, which ``prepare`` applies to models. Returns it.

    The Accelerator is made and used inside ``dt.integrations.one_process()``, on all ranks, with
    batches of the global size, which a prepared model splits. ``save_state``, ``load_state``,
    ``save_model`` and ``get_state_dict`` use full values. The first rank has and writes these
    values; all ranks make the calls.

    Args:
        accelerator: an accelerate.Accelerator.
        strategy: how the processes are divided. The Accelerator sets ``accumulate_steps``.
        plan: as for ``Strategy.apply``. None: with ``tp``, the model's own plan, else
            ``dt.plans.megatron``.
        layers: as for ``Strategy.apply``. None: with ``pp``, the model's pipeline plan.

    Returns:
        The Accelerator.

    Raises:
        TypeError: it is no Accelerator.
        RuntimeError: it found several processes.

    >>> with dt.integrations.one_process():  # doctest: +SKIP
    ...     accelerator = dt.integrations.shard_accelerator(Accelerator(), dt.Strategy(sharding=4))
    ...     model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    check_type("shard_accelerator: strategy", strategy, Strategy, "a dt.Strategy")
    if not any(kind.__module__ == "accelerate.accelerator" for kind in type(accelerator).__mro__):
        raise argument_error("shard_accelerator: accelerator", accelerator, "an Accelerator")
    if accelerator.num_processes > 1 or dist.is_initialized():
        raise RuntimeError(
            f"shard_accelerator: this library found {accelerator.num_processes} processes, and "
            "would divide the work itself. Make its objects, and train, inside: "
            "with dt.integrations.one_process():"
        )
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (_Sharded, kind), {})
    accelerator.strategy, accelerator.plan, accelerator.layers = strategy, plan, layers
    if accelerator.scaler is not None:
        shard_scaler(accelerator.scaler)
    return accelerator


class _Sharded:
    """The methods of an Accelerator that differ; the others are inherited from its class."""

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        for model in (x for x in args if isinstance(x, nn.Module)):
            place(model, self.strategy, self.plan, self.layers)
        return super().prepare(*args, **kwargs)  # type: ignore[misc]

    def prepare_model(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place(model, self.strategy, self.plan, self.layers)
        return super().prepare_model(model, *args, **kwargs)  # type: ignore[misc]

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            rebind("Accelerator.prepare", optimizer)
            save_full_state(optimizer)
        return super().prepare_optimizer(optimizer, *args, **kwargs)  # type: ignore[misc]

    def no_sync(self, model: nn.Module) -> Any:
        return accumulate(model, last=False)

    def get_state_dict(self: Any, model: nn.Module, unwrap: bool = True) -> Any:
        return full_state(self.unwrap_model(model) if unwrap else model)

    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        save, naming = super().save_state, self.project_configuration  # type: ignore[misc]
        if is_first():
            folder = save(output_dir, *args, **kwargs)
        else:  # it sends its pieces; accelerate writes random states on every rank
            automatic = naming.automatic_checkpoint_naming
            naming.automatic_checkpoint_naming = False
            with tempfile.TemporaryDirectory(prefix="disttensor-") as folder:
                save(folder, *args, **kwargs)
            naming.automatic_checkpoint_naming = automatic
        on_first("Accelerator.save_state", lambda: None)  # it is complete
        return folder
