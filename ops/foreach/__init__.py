"""Functions on lists of tensors: ``torch._foreach_*`` and the fused optimizers.

Not here: the rules of one element (ops.pointwise).
"""
