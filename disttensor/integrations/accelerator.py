"""shard_accelerator: the Accelerator of accelerate under a Strategy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from disttensor.checkpoint.same_files import check_same_files
from disttensor.checkpoint.state import in_layout_of
from disttensor.checks import argument_error, check_type
from disttensor.comm.groups import world_group
from disttensor.comm.objects import gather_objects
from disttensor.fsdp.contexts import accumulate
from disttensor.integrations.model import (
    full_state,
    full_value,
    gathered_pickles,
    is_first,
    on_first,
    place,
    rebind,
    save_full_state,
)
from disttensor.optim.grad_scaler import shard_scaler
from disttensor.parallel.strategy import Strategy
from disttensor.pytree import substitute
from disttensor.tensor.dist_tensor import DistTensor


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
    ``save_model`` and ``get_state_dict`` use full values, also of registered objects. The first
    rank has and writes these values; all ranks make the calls. Hooks of ``save_state`` run on all
    ranks as on the main process.

    Args:
        accelerator: an accelerate.Accelerator.
        strategy: how the processes are divided. The Accelerator sets ``accumulate_steps``.
        plan: as for ``Strategy.apply``. None: with ``tp``, the model's own plan, else
            ``dt.plans.megatron``. With several models, a function or None.
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

    def save(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        obj = substitute(obj, full_value, DistTensor)
        if is_first():
            super().save(obj, *args, **kwargs)  # type: ignore[misc]

    def check_trigger(self: Any) -> bool:
        own = super().check_trigger()  # type: ignore[misc]
        return any(gather_objects(own, world_group()))

    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """All ranks run the hooks and gather the registered objects, as the main process does. All
        but the first write to a temporary folder."""
        save, naming = super().save_state, self.project_configuration  # type: ignore[misc]
        place, is_named = naming.project_dir, naming.automatic_checkpoint_naming
        with gathered_pickles(), tempfile.TemporaryDirectory(prefix="disttensor-") as other:
            if not is_first():
                naming.project_dir, output_dir = other, None if is_named else other
            try:
                folder = save(output_dir, *args, **kwargs)
            finally:
                naming.project_dir = place
        on_first("Accelerator.save_state", lambda: None)  # it is complete
        return folder

    def load_state(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        folder = input_dir or Path(self.project_dir or "", "checkpoints")
        check_same_files("Accelerator.load_state", folder)
        objects = self._custom_objects
        self._custom_objects = [_Laid(of) for of in objects]
        try:
            super().load_state(input_dir, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._custom_objects = objects


@dataclass(frozen=True)
class _Laid:
    """A registered object. It loads tensors in the layouts of its own."""

    of: Any

    def load_state_dict(self, state: Any) -> None:
        self.of.load_state_dict(in_layout_of(state, self.of.state_dict()))
