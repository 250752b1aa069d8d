"""Functions that pick, write or look up elements by index.

Not here: embeddings (ops.nn).
"""
