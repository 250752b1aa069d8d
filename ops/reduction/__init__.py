"""Functions that reduce or scan dims: sums, extremes, moments, norms, softmax.

Not here: losses (ops.nn), reductions of lists of tensors (ops.foreach).
"""
