"""Gradients of locals: what the gradient of a piece means, differentiable collectives,
recomputation.

Knows layouts and plain tensors; a DistTensor is unknown here (``disttensor.tensor``).
"""
