"""Rules: how shardings pass through torch functions.

``rule`` registers a rule, ``infer`` evaluates a rule; see ``ops.factors`` for the notation. Each
package contains a family of functions. Not here: meshes, communication, DistTensor.
"""

import disttensor  # noqa: F401, I001  (the packages load in one order, whichever is imported first)

import importlib
import pkgutil
import typing

from disttensor import module_names
from disttensor.core.layout import Layout
from disttensor.core.spec import DistSpec
from ops.factors import Arg, Factors, NoRule, letters, pointwise_factors
from ops.infer import Inferred, infer
from ops.registry import RULES, Rule, register, replace_rule, rule

# Each module of a family fills its part of the table.
for _module in pkgutil.walk_packages(__path__, "ops."):
    importlib.import_module(_module.name)

__all__ = [
    "RULES", "Arg", "DistSpec", "Factors", "Inferred", "Layout", "NoRule", "Rule", "infer",
    "letters", "pointwise_factors", "register", "replace_rule", "rule",
]  # fmt: skip


if not typing.TYPE_CHECKING:

    def __getattr__(name):
        module_names.raise_missing(__name__, name)
