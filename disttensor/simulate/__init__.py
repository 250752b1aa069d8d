"""A training step as thousands of ranks would do it, in one process: what they hold, send and
compute.

``run.simulate`` has the program run as a few of the ranks, one after the other, on tensors without
data. What they do is recorded below the engine, which is not changed for it.
"""
