"""Look-ups of values: isin, bucketize, searchsorted. The dims of the values pass through."""

from __future__ import annotations

from typing import Any

import torch

from ops.dims import letters_of, tensors_in
from ops.factors import Arg, Dims, Factors, NoRule
from ops.registry import rule


@rule(torch.isin, exact=True)
def isin(elements: Any, test_elements: Any, **words: Any) -> Factors:
    """each element separately, among all of the others"""
    if not isinstance(elements, Arg):
        raise NoRule("a number among elements")
    dims = letters_of(elements)
    ins = [dims, *((None,) * t.ndim for t in tensors_in(test_elements))]
    return Factors(tuple(ins), (dims,))


@rule(torch.bucketize, exact=True)
def bucketize(input: Any, boundaries: Arg, **words: Any) -> Factors:
    """each element separately; the boundaries are whole"""
    if not isinstance(input, Arg):
        raise NoRule("the bucket of a number")
    dims = letters_of(input)
    return Factors((dims, (None,)), (dims,))


@rule(torch.searchsorted, exact=True)
def searchsorted(sorted_sequence: Arg, input: Any, **words: Any) -> Factors:
    """each value separately, in a whole sequence; rows of values in rows of sequences"""
    if not isinstance(input, Arg) or tensors_in(*words.values()):
        raise NoRule("the place of a number, or places by a sorter")
    if sorted_sequence.ndim == 1:
        dims: Dims = letters_of(input)
        return Factors(((None,), dims), (dims,))
    n = sorted_sequence.ndim - 1
    rows = letters_of(sorted_sequence)[:-1]
    if input.ndim != n + 1 or input.shape[:-1] != sorted_sequence.shape[:-1]:
        raise NoRule("rows that do not fit")
    return Factors(((*rows, None), (*rows, "v")), ((*rows, "v"),))
