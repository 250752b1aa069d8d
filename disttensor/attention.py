"""How attention over a split sequence communicates.

>>> with dt.attention.policy("ring"):
...     pass
"""

from ops.nn.attention_policy import attention_policy as policy

__all__ = ["policy"]
