"""Gradients of locals: their meaning per placement, differentiable collectives, recomputation.

It uses layouts and regular tensors only; DistTensors are in ``disttensor.tensor``.
"""
