"""Says in words how the values of ranks differ from those of one process."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from disttensor.verification.fit import Batch, Fit, Pieces, distance

Tensor = torch.Tensor


def describe(
    fit: Fit, ranks: list[int], bound: float, before: Pieces, batch: Batch, of_model: bool
) -> str:
    """Returns the values where rank ``ranks[0]`` differs most, and what explains them.

    Args:
        fit: the layout with the least difference.
        ranks: the ranks that differ, by more than ``bound``.
        bound: see ``ranks``.
        before: what the ranks should have held a step before.
        batch: how the ranks share the batch.
        of_model: the tensor is a parameter or its gradient, and has no rows.
    """
    mine, right = fit.actual[ranks[0]], fit.expected[ranks[0]]
    place = (
        int((mine - right).abs().nan_to_num(torch.inf).argmax()) if mine.dtype != torch.bool else 0
    )
    at = [int(i) for i in torch.unravel_index(torch.tensor(place), mine.shape)]
    value, wanted = (x.flatten()[place].item() for x in (mine, right))
    words = [
        f"rank {ranks[0]} has {value:.6g}{f' at {at}' if at else ''}, one process {wanted:.6g}"
    ]
    if of_model and (apart := replicas_apart(fit, bound)):
        words.append(f"replicas have drifted apart: {apart}")
    return "; ".join([*words, *_causes(fit, ranks, bound, before, batch, of_model)])


def _causes(
    fit: Fit, ranks: list[int], bound: float, before: Pieces, batch: Batch, of_model: bool
) -> Iterator[str]:
    actual, expected, first = fit.actual, fit.expected, ranks[0]
    mine, right = map(_numbers, (actual[first], expected[first]))

    def are(values: Pieces) -> bool:
        return all(r in values and _is_near(actual[r], values[r], bound) for r in ranks)

    if not any(actual[r].any() for r in ranks):
        yield "all is zero"
        return
    if are(before):
        yield "it is the value of the step before"
    factor = float(mine.dot(right) / right.dot(right)) if right.any() else 0.0
    if are({r: factor * expected[r] for r in ranks}):
        yield f"it is {factor:.6g} times that of one process"
    for other in expected.keys() - ranks[:1]:
        if are(dict.fromkeys(ranks, expected[other])):
            yield f"this is what rank {other} should have"
            break
    one_of_each = [actual[part[0]] for part in batch.parts if part[0] in actual]
    for parts in (one_of_each, [*actual.values()]):
        if len({x.shape for x in parts}) == 1 < len(parts) and (of_model or mine.numel() == 1):
            total = torch.stack(parts).sum(0)
            for what, x in (("sum", total), ("mean", total / len(parts))):
                if _is_near(x, expected[first], bound):
                    yield f"the {what} over the ranks is that of one process, and was not taken"
                    return
            if mine.numel() == 1:
                value = float(total)
                yield f"the sum over the ranks is {value:.6g}, the mean {value / len(parts):.6g}"
                return


def _numbers(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.double()).flatten()


def _is_near(x: Tensor, y: Tensor, bound: float) -> bool:
    return x.shape == y.shape and distance(x, y) <= bound


def replicas_apart(fit: Fit, bound: float = 0.0) -> str:
    """Returns which two ranks hold other values where both should hold the same."""
    for rank, x in fit.actual.items():
        for other in range(rank):
            if other in fit.actual and fit.expected[other].shape == x.shape:
                apart = distance(x, fit.actual[other])
                if apart > bound and torch.equal(fit.expected[rank], fit.expected[other]):
                    return f"ranks {other} and {rank} by {apart:.2g}"
    return ""
