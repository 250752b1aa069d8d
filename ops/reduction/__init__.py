"""Rules. Functions that reduce or scan dims: sums, extremes, moments, norms, softmax."""

from ops.reduction import max_min, norm, scan, softmax, sum, var_std

__all__ = ["max_min", "norm", "scan", "softmax", "sum", "var_std"]
