"""What a simulation cannot say."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """The program cannot be simulated as it is: the message says which line asks for what."""
