"""launching: starts the ranks of a world as processes of this machine: ``dt.launch``,
``dt.local_ranks`` and the ranks of ``python -m disttensor.run``.
"""
