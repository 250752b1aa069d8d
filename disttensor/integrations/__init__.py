"""Other training libraries on DistTensors: they find one process, and one rank writes."""

from disttensor.integrations.one_process import one_process

__all__ = ["one_process"]
