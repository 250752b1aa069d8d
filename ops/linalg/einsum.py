"""einsum: the letters of its equation are the letters of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ops.dims import tensors_in
from ops.empty_pieces import in_dtype_of_whole
from ops.factors import Arg, Factors, letters
from ops.local import LocalCall
from ops.registry import rule


@rule(torch.einsum)
def einsum(equation: str, *operands: Arg | Sequence[Arg]) -> Factors:
    """as the equation says; letters missing on the right are summed: P(sum)"""
    tensors = tensors_in(*operands)
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        names = left.replace(",", "").replace(".", "")
        right = "..." * ("..." in left) + "".join(c for c in sorted(names) if names.count(c) == 1)
    pattern = f"{', '.join(map(_spaced, left.split(',')))} -> {_spaced(right)}"
    try:
        f = letters(pattern, *tensors, linear_terms=(set(range(len(tensors))),), local=_local)
    except ValueError as error:
        raise RuntimeError(f"einsum {equation!r}: {error}") from None
    f.reduced = {d: "sum" for d in f.sizes if d not in f.outputs[0]}
    return f


def _spaced(term: str) -> str:
    before, dots, after = term.partition("...")
    return " ".join([*before, *([dots] if dots else []), *after])


def _local(call: LocalCall) -> Any:
    """Returns the local function, with the dtype of the whole call if pieces would change it. Torch
    multiplies elementwise, which autocast treats otherwise, if all summed dims have size 1; sizes
    also decide the order of several products."""
    cut = [s for p in call.inputs for s, n in zip(p.local_shape, p.shape, strict=True) if s != n]
    alike = all(s > 1 for s in cut) and (len(call.inputs) < 3 or not cut)
    return call.func if alike else in_dtype_of_whole(call)
