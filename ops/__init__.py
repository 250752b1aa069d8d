"""Rules: how shardings pass through torch functions. Pure: no mesh, no communication, no tensor
class.

``rule`` registers one, ``infer`` asks one; see ``ops.factors`` for the notation. One file per
family of functions.
"""

import disttensor  # noqa: F401, I001  (the three packages load in one order, whichever is imported first)
from ops.factors import Arg, Factors, letters, pointwise_factors
from ops.infer import Inferred, NoRule, infer
from ops.registry import RULES, Rule, register, replace_rule, rule

from ops import (  # noqa: F401  (each fills its part of the table)
    batching,
    foreach,
    indexing,
    lead,
    linalg,
    nn,
    pointwise,
    random,
    reduction,
    shape,
)

__all__ = [
    "RULES", "Arg", "Factors", "Inferred", "NoRule", "Rule", "infer", "letters",
    "pointwise_factors", "register",
    "replace_rule", "rule",
]  # fmt: skip
