"""Modules whose parameters are DistTensors: sharding them, plans for them, initialization.

Not here: sharded training state (``disttensor.fsdp``), layers on stages (``disttensor.pipeline``).
"""
