"""Ranks off the mesh of a call: metadata only, no data and no compute.

``disttensor.dispatch`` computes on the ranks of the mesh.
"""
