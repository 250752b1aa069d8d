"""What the dtypes of a call allow: which pending arguments pass through, and whether a split letter
may leave a pending sum.

A rule says in which arguments a function is linear over the numbers. A sum of integers wraps
around, and a float has room for fewer digits than an integer: the sum of the pieces of ``x / 2``
differs from ``sum / 2`` if ``x`` is an integer. Integers therefore pass only into results of their
own dtype, in which both sums wrap around alike. Torch's own promotion gives the dtypes of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ops.check_call import shared_without_data
from ops.dtypes import has_sums, smooth
from ops.factors import Arg, Factors, Letter


def fit_dtypes(
    func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Arg], f: Factors
) -> Factors:
    """Returns the factors, without the flows that change values: a pending argument stays in
    ``linear_terms`` or in a call that ``moves`` only if its dtype passes into all results; a letter
    stays reduced by a sum only if the dtype of the results has sums."""
    adds_up = "sum" in f.reduced.values() and not all(has_sums(t.dtype) for t in tensors)
    if not adds_up and not any(t.layout.partial for t in tensors):
        return f
    found = shared_without_data(func, args, kwargs)
    # torch cannot say it for a function that moves to another device
    results = [t.dtype for t in tensors] if found is None else [*found.dtypes]
    if not f.per_item:
        return _fit(f, tensors, results)
    items = []
    for item, members in f.per_item:
        mine = [tensors[t] for t in members]
        items.append((_fit(item, mine, results[: len(item.outputs)]), members))
        del results[: len(item.outputs)]
    return f.replace(per_item=tuple(items))


def _fit(f: Factors, tensors: Sequence[Arg], results: Sequence[Any]) -> Factors:
    results = results or [tensors[t].dtype for t in f.targets]
    stopped = {
        t
        for t, arg in enumerate(tensors)
        if arg.layout.partial and not all(_passes(arg.dtype, r) for r in results)
    }
    averages = any(
        op == "avg" and not smooth(arg.dtype) for arg in tensors for _, op in arg.layout.partial
    )
    terms = tuple(term - stopped for term in f.linear_terms)
    reduced: dict[Letter, str] = {
        letter: op for letter, op in f.reduced.items() if op != "sum" or all(map(has_sums, results))
    }
    return f.replace(
        linear_terms=terms if all(terms) and not averages else (),
        moves=f.moves and not stopped,
        reduced=reduced,
    )


def _passes(given: Any, result: Any) -> bool:
    """Returns True if a reduction of the dtype ``given`` may be done on the result."""
    return given == result or (smooth(given) and smooth(result))
