"""Ranks outside the mesh of a call: metadata only, no data and no compute.

Not here: what the ranks of the mesh compute (``disttensor.dispatch``).
"""
