"""Checkpoints of pretrained models, in Hugging Face's format.

>>> dt.pretrained.load is dt.load_pretrained, dt.pretrained.save is dt.save_pretrained
(True, True)
"""

from disttensor.checkpoint.load_pretrained import load_pretrained as load
from disttensor.checkpoint.save_pretrained import save_pretrained as save

__all__ = ["load", "save"]
