"""Clipping and loss scaling over all meshes, and hooks before an optimizer's step.

Not here: the rules of the optimizers' own functions (``ops.foreach``).
"""
