"""Runs a torch function on DistTensors, from ``__torch_function__`` to the local function and back.

Not here: the rules that say which placements a function keeps (``ops``).
"""
