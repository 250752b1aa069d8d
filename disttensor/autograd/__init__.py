"""Gradients of locals: their meaning per placement, differentiable collectives, recomputation.

It uses specs, groups and regular tensors; DistTensors are in ``disttensor.tensor``. Start with
``grad_types``. ``accumulation``, ``joined_backward`` and ``starts`` say which backward runs.
"""
