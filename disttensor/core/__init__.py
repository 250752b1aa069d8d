"""Frozen values: placements, layouts, meshes and specs."""
