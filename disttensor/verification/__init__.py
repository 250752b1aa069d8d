"""Finds the first tensor of a training program that differs between one process and n ranks.

Hooks of PyTorch write each tensor to a file of the rank, with its place in the whole if a DTensor
or a DistTensor knows it (``recorder.py``, ``records.py``). The files are compared afterwards, in
one process: how the pieces of regular tensors fit together is found from their sizes and values
(``fit.py``), and the first tensor that does not fit is named (``compare.py``).
"""

from disttensor.verification.runs import verify

__all__ = ["verify"]
