"""Checkpoints of pretrained models, in Hugging Face's format.

>>> dt.pretrained.load, dt.pretrained.save  # doctest: +ELLIPSIS
(<function load_pretrained at 0x...>, <function save_pretrained at 0x...>)
"""

from disttensor.checkpoint.load_pretrained import load_pretrained as load
from disttensor.checkpoint.save_pretrained import save_pretrained as save

__all__ = ["load", "save"]
