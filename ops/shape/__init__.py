"""Functions that rearrange elements without computing: views, permutations, joins, cuts, padding.

Not here: what an index picks (ops.indexing).
"""
