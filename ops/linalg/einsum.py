"""einsum: its letters are our letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ops.dims import tensors_in
from ops.empty_pieces import in_dtype_of_whole
from ops.factors import Arg, Factors, Letter, expand_dots
from ops.local import LocalCall
from ops.registry import rule


@rule(torch.einsum)
def einsum(equation: str, *operands: Arg | Sequence[Arg]) -> Factors:
    """as the equation says; letters missing on the right are summed: P(sum)"""
    tensors = tensors_in(*operands)
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors):
        raise RuntimeError(f"einsum {equation!r}: {len(terms)} terms for {len(tensors)} tensors")
    lead = max(
        [t.ndim - len(term) + 3 for term, t in zip(terms, tensors, strict=True) if "..." in term],
        default=0,
    )
    sizes: dict[Letter, int] = {}
    named = []
    for term, tensor in zip(terms, tensors, strict=True):
        dims = expand_dots(_tokens(term), lead, tensor.ndim - len(term) + 3)
        if len(dims) != tensor.ndim:
            raise RuntimeError(
                f"einsum {equation!r}: the term {term!r} does not fit a tensor "
                f"of shape {list(tensor.shape)}"
            )
        for letter, size in zip(dims, tensor.shape, strict=True):
            known = sizes.setdefault(letter, size)
            if known == 1:
                sizes[letter] = size
            elif size not in (1, known):
                raise RuntimeError(
                    f"einsum {equation!r}: {letter!r} is {known} long and {size} long"
                )
        named.append(dims)
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = ("..." if lead else "") + "".join(once)
    out = tuple(expand_dots(_tokens(right), lead, lead))
    inputs = tuple(
        tuple(d if size == sizes[d] else None for d, size in zip(dims, t.shape, strict=True))
        for dims, t in zip(named, tensors, strict=True)
    )
    reduced = {d: "sum" for d in sizes if d not in out}
    terms_of_all = (frozenset(range(len(tensors))),)
    return Factors(inputs, (out,), sizes, reduced=reduced, terms=terms_of_all, local=_local)


def _local(call: LocalCall) -> Any:
    """torch multiplies elementwise in place of a matrix product, which autocast knows, where all
    that is summed has size 1; the order of several products depends on sizes too."""
    cut = [s for p in call.inputs for s, n in zip(p.local_shape, p.shape, strict=True) if s != n]
    alike = all(s > 1 for s in cut) and (len(call.inputs) < 3 or not cut)
    return call.func if alike else in_dtype_of_whole(call)


def _tokens(term: str) -> list[Letter]:
    before, dots, after = term.partition("...")
    return [*before, *([dots] if dots else []), *after]
