"""Attention over a split sequence: how it communicates, and a placement that balances causal work.

>>> with dt.attention.policy("ring"):
...     pass
"""

from disttensor.core.placement import Balanced
from ops.nn.attention_policy import policy

__all__ = ["Balanced", "policy"]
