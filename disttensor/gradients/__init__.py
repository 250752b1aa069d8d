"""Gradients of parameters between a backward and the optimizer: how they add up, where they lie in
memory, and how they are reduced in flat collectives.

Not here: which axes a gradient waits on (``autograd.grad_types``), and when a segment is reduced
during a backward (``fsdp.backward``).
"""

from disttensor.gradients.sync import sync_gradients

__all__ = ["sync_gradients"]
