"""Frozen values: placements, layouts, meshes and specs. A mesh also keeps the process groups of its
axes, which ``disttensor.comm`` makes at their first use."""
