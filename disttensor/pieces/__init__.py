"""Which rank holds what: pictures of tensors, and tables of modules, from specs alone.

``dt.debugging.pieces``, which gathers the data, is in ``disttensor.api.pieces``.
"""
