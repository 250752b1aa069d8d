"""Data parallelism with sharded training state: segments of parameters are gathered before use,
freed after it, and their gradients reduced.

``disttensor.parallel`` combines it with other parallelisms.
"""

from disttensor.fsdp.contexts import unshard
from disttensor.fsdp.fsdp_module import FSDPModule
from disttensor.fsdp.segment_policy import SegmentByAnchors, SegmentBySize

__all__ = ["FSDPModule", "SegmentByAnchors", "SegmentBySize", "unshard"]
