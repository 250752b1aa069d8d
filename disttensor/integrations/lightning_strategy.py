"""lightning_strategy: a Strategy for the Trainer of Lightning."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from disttensor.checkpoint.same_files import check_same_files
from disttensor.checks import check_type
from disttensor.comm import objects
from disttensor.comm.groups import world_group
from disttensor.comm.process_group import world
from disttensor.integrations.model import (
    SplitBatch,
    full_state,
    full_value,
    gathered_pickles,
    is_first,
    on_first,
    place,
    save_full_state,
)
from disttensor.parallel.strategy import Strategy
from disttensor.pytree import substitute
from disttensor.tensor.dist_tensor import DistTensor


def lightning_strategy(
    strategy: Strategy, plan: Any = None, *, layers: Iterable[nn.Module | str] | None = None
) -> Any:
    """Returns a strategy for Lightning: ``Trainer(strategy=..., devices=1)``.

    The Trainer is made and used inside ``dt.integrations.one_process()``, on all ranks, with
    batches of the global size. The LightningModule is sharded when ``fit`` begins; each batch is
    split; the first rank logs and writes checkpoints with full values, which ``ckpt_path=``
    reads under any strategy.

    Args:
        strategy: how the processes are divided. The Trainer sets ``accumulate_steps``.
        plan: as for ``Strategy.apply``. None: with ``tp``, ``dt.plans.megatron``.
        layers: as for ``Strategy.apply``, for ``pp``.

    Returns:
        A strategy of Lightning.

    Raises:
        TypeError: it is no Strategy.

    >>> with dt.integrations.one_process():  # doctest: +SKIP
    ...     strategy = dt.integrations.lightning_strategy(dt.Strategy(sharding=4))
    ...     lightning.Trainer(strategy=strategy, devices=1).fit(module, loader)
    """
    check_type("lightning_strategy: strategy", strategy, Strategy, "a dt.Strategy")
    name = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
    kind = import_module(f"{name}.strategies").SingleDeviceStrategy
    import_module(f"{name}.utilities.rank_zero").rank_zero_only.rank = world()[0]
    made = type("DistTensorStrategy", (_Sharded, kind), {})(device=strategy.stages()[0].device)
    made.of, made.plan, made.layers = strategy, plan, layers
    made.local_rank = int(not is_first())  # the first prepares data, and prints
    return made


class _Sharded:
    """The methods of the strategy that differ; the others are inherited from the strategy of one
    device. ``global_rank`` is 0 on all ranks: it seeds the workers of loaders."""

    @property
    def is_global_zero(self) -> bool:
        return is_first()

    def setup(self: Any, trainer: Any) -> None:
        place(self.lightning_module, self.of, self.plan, self.layers)
        super().setup(trainer)  # type: ignore[misc]
        for optimizer in self.optimizers:
            save_full_state(optimizer)

    def batch_to_device(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super().batch_to_device(batch, *args, **kwargs)  # type: ignore[misc]
        if self.of.degrees().pp > 1:  # the model splits its own inputs
            return batch
        split = SplitBatch(self.of)(self.lightning_module, (batch,), {})
        return batch if split is None else split[0][0]

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        return full_state(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> Any:
        with gathered_pickles():  # a part of a checkpoint, which the first rank writes
            return super().optimizer_state(optimizer)  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        checkpoint = substitute(checkpoint, full_value, DistTensor)
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        check_same_files("Lightning: ckpt_path", checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        found = objects.gather_objects(bool(decision), world_group())
        return min(found) if all else max(found)

    def barrier(self, name: str | None = None) -> None:
        on_first(f"Lightning: {name}", lambda: None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return objects.gather_objects(obj, world_group(), any_class=True)[src]
