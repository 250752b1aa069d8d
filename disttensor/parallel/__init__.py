"""All parallelisms as one value: a Strategy makes the meshes and applies pipeline, tensor and data
parallelism.

Not here: how each of them works (``disttensor.pipeline``, ``disttensor.nn``, ``disttensor.fsdp``).
"""
