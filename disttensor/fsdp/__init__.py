"""Data parallelism with sharded training state: segments of parameters, gathered when used, reduced
when done.

Not here: strategies that combine it with other parallelisms (``disttensor.parallel``).
"""
