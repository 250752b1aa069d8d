"""Rules. Products, decompositions and transforms of matrices."""

from ops.linalg import decompositions, einsum, fft, matmul

__all__ = ["decompositions", "einsum", "fft", "matmul"]
