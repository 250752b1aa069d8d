"""Random numbers by position in the program: the counter of calls (state.py), the generator
(philox.py), what is drawn from it (distributions.py), and factories that draw one rank's piece.

Not here: which torch function draws what (``ops.random``).
"""
