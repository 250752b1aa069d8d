"""Simulates a training step of thousands of ranks in one process: their memory, communication,
computation and time.

``simulate`` runs the program as a few of the ranks, one after the other, on tensors without
data. A recorder below the engine records each of them; the engine is not changed.
"""

from disttensor.simulate import devices
from disttensor.simulate.measured import measure
from disttensor.simulate.plan_strategy import plan_strategy
from disttensor.simulate.run import simulate

__all__ = ["devices", "measure", "plan_strategy", "simulate"]
