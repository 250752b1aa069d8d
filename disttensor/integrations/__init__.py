"""Other training libraries on DistTensors: they find one process, and one rank writes."""

from disttensor.integrations.accelerator import shard_accelerator
from disttensor.integrations.lightning_strategy import lightning_strategy
from disttensor.integrations.one_process import one_process
from disttensor.integrations.trainer import shard_trainer

__all__ = ["lightning_strategy", "one_process", "shard_accelerator", "shard_trainer"]
