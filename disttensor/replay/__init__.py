"""Replay: records the local program of a forward once for each kind of call, then runs it as
straight-line code on local tensors. The entry point is ``replay`` (``replay.py``).
"""
