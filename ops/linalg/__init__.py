"""Products, decompositions, distances and Fourier transforms.

Not here: norms of vectors (ops.reduction), linear layers of more than a product (ops.nn).
"""
