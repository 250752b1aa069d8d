"""Random numbers by position in the program: the counter of calls (counter.py), policies and draws
(state.py), the generator (philox.py), distributions (distributions.py), and factories that draw one
rank's piece.

``ops.random`` lists the torch functions that draw.
"""

from disttensor.random.draws import rng

__all__ = ["rng"]
