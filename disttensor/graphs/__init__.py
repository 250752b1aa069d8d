"""Recorded programs as graphs of PyTorch: ``torch.compile`` of forwards and backwards, reshards
included."""
