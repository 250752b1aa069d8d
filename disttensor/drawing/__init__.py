"""Pictures as SVG files, and traces that a browser opens.

Not here: the contents of a picture (``pipeline``, ``simulate``, ``pieces``).
"""
