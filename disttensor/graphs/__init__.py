"""Recorded programs as graphs of PyTorch: ``torch.compile`` of forwards and backwards, reshards
included.

``capture`` is separate: it makes a CUDA graph of a training step (``capture_check``: its contract,
on any device).
"""
