"""What lies between a backward and an optimizer's step: clipping and loss scaling over all meshes.

Not here: the rules of the optimizers' own functions (``ops.foreach``).
"""
