"""Replay: the local program of a forward, recorded once for each kind of call, then run as
straight-line code of plain locals. ``replay`` (``replay.py``) is the door.
"""
