"""Other training libraries on DistTensors: they find one process, and one rank writes."""

from disttensor.integrations.accelerator import shard_accelerator
from disttensor.integrations.one_process import one_process
from disttensor.integrations.trainer import shard_trainer

__all__ = ["one_process", "shard_accelerator", "shard_trainer"]
