"""Functions of single elements, casts, and tensors made in the likeness of another.

Not here: lists of tensors (ops.foreach), random numbers (ops.random).
"""
