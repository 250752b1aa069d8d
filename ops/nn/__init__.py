"""Layers and losses of neural networks.

Not here: activations (ops.pointwise), F.linear (ops.linalg), dropout (ops.random).
"""
