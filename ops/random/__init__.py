"""Functions that draw random numbers, dropout among them.

Not here: the generators (disttensor.random).
"""
