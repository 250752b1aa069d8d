"""dispatch_tokens and combine_tokens: send the tokens of a mixture of experts to their experts and
back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from disttensor.autograd.tie import tie_grads, tie_outputs
from disttensor.checks import check_callable, check_int, check_type
from disttensor.core.spec import DistSpec
from disttensor.experts.bounded import run_bounded
from disttensor.tensor.dist_tensor import DistTensor
from ops.nn.experts import run_experts

Tensor = torch.Tensor


class Stage(NamedTuple):
    """The function that experts apply to their rows, and its parameters."""

    fn: Callable[..., Tensor]
    parameters: tuple[Any, ...]


class DispatchedTokens:
    """Tokens, the experts that they are sent to, and the functions of these experts. See
    ``dispatch_tokens``.

    If it is an attribute of a module, ``expert_load`` counts its tokens, after ``combine_tokens``.
    """

    def __init__(
        self, tokens: Any, indices: Any, num_experts: int, capacity: int | None = None
    ) -> None:
        self.tokens, self.indices, self.num_experts = tokens, indices, num_experts
        self.capacity = capacity
        self.stages: list[Stage] = []
        self.owner: DistSpec | None = None  # of the first parameter: which rank has which expert

    def apply(self, fn: Callable[..., Tensor], *parameters: Any) -> DispatchedTokens:
        """Sets the function of the experts: each rank calls ``fn(rows, counts, *parameters)``
        with regular tensors. rows [n, d] are sorted by expert, counts is the list of their numbers
        of rows, parameters are the slices [experts, ...] of this rank's experts. fn returns [n, d].
        A rank without tokens does not call it. Returns self."""
        check_callable("DispatchedTokens.apply: fn", fn)
        for i, p in enumerate(parameters):
            check_type(f"DispatchedTokens.apply: parameter {i}", p, Tensor, "a tensor")
            if not p.ndim or p.shape[0] != self.num_experts:
                raise ValueError(
                    f"DispatchedTokens.apply: parameter {i} has shape {list(p.shape)}: a slice for "
                    f"each expert is expected, [{self.num_experts}, ...]"
                )
        self.stages.append(Stage(fn, parameters))
        return self


class _Experts:
    """The stages as one function. All such functions are equal, because the plan of a call does not
    depend on them."""

    untraceable = "it sends tokens to experts by functions of one call (dispatch_tokens)"

    def __init__(self, stages: list[Stage]) -> None:
        self.stages: list[Stage] = stages

    def __eq__(self, other: object) -> bool:
        return type(other) is _Experts

    def __hash__(self) -> int:
        return hash(_Experts)

    def __repr__(self) -> str:  # in the text of the call that ranks compare
        return "experts"

    def __call__(self, rows: Tensor, counts: list[int], *parameters: Tensor) -> Tensor:
        given, out, parameters = rows, rows, tuple(tie_grads(parameters, rows))
        left = list(parameters)
        for fn, own in self.stages if len(rows) else ():
            mine, left = left[: len(own)], left[len(own) :]
            out = fn(out, counts, *mine)
            if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(given):
                shown = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(
                    f"combine_tokens: the experts returned {shown} for {len(given)} rows: a tensor "
                    "with as many rows is expected"
                )
        if out.shape[1] != given.shape[1]:
            raise ValueError(
                f"combine_tokens: the experts returned rows of {out.shape[1]} elements for tokens "
                f"of {given.shape[1]}: equal widths are expected"
            )
        wanting = [x for x in (given, *parameters) if x.requires_grad]
        if not wanting or not torch.is_grad_enabled():
            return out
        if not out.requires_grad:  # no stage used them, for example without rows
            out = out + wanting[0][:0].sum()
        return tie_outputs([out], wanting)[0]


def dispatch_tokens(
    tokens: Any, indices: Any, num_experts: int, *, capacity: int | None = None
) -> DispatchedTokens:
    """Assigns tokens [..., d] to the experts ``indices`` [..., k] (0 to num_experts - 1; other
    numbers select no expert).

    ``apply`` of the result takes the function of the experts; ``combine_tokens`` returns their
    results. No token is dropped. All communication takes place in ``combine_tokens``: the three are
    one call, whose result is as large as the tokens. Over an axis that splits tokens and
    parameters, each token is sent to a rank once for all its experts there, and one row is sent
    back. Raises TypeError and ValueError for invalid arguments.

    With ``capacity``, each expert has exactly so many rows: its first tokens in the order of the
    whole batch, on any number of ranks, and then zeros; tokens beyond are dropped. No rank reads a
    size on the host, so a step can be captured and compiled, but more is sent. The result has the
    layout of the tokens.

    >>> x, up = dt.ones(6, 4, mesh=mesh), dt.ones(3, 4, 4, mesh=mesh)
    >>> indices, weights = torch.tensor([[0, 2]] * 6), torch.tensor([[0.5, 0.5]] * 6)
    >>> def mlp(rows, counts, up):  # the rows and the slices of the experts of one rank
    ...     return torch.cat([r @ w for r, w in zip(rows.split(counts), up)])
    >>> sent = dt.experts.dispatch_tokens(x, indices, 3)
    >>> y = dt.experts.combine_tokens(sent.apply(mlp, up), weights)
    >>> y.shape, y[0].tolist()
    (torch.Size([6, 4]), [4.0, 4.0, 4.0, 4.0])
    """
    check_type("dispatch_tokens: tokens", tokens, Tensor, "a tensor")
    check_type("dispatch_tokens: indices", indices, Tensor, "a tensor")
    check_int("dispatch_tokens: num_experts", num_experts, 1)
    if capacity is not None:
        check_int("dispatch_tokens: capacity", capacity, 1)
    if tokens.ndim < 2 or indices.shape[:-1] != tokens.shape[:-1]:
        raise ValueError(
            f"dispatch_tokens: tokens {list(tokens.shape)} and indices {list(indices.shape)}: "
            "[..., d] and [..., k] with the same dims before are expected"
        )
    if not tokens.is_floating_point():
        raise TypeError(f"dispatch_tokens: tokens are {tokens.dtype}, and not of a floating dtype")
    if indices.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"dispatch_tokens: indices are {indices.dtype}, and not whole numbers")
    return DispatchedTokens(tokens, indices, num_experts, capacity)


def combine_tokens(dispatched: DispatchedTokens, weights: Any) -> Any:
    """Returns the results of the experts of ``dispatched`` for each token, times ``weights``
    [..., k] and summed over k: [..., d] in the dtype and the layout of the tokens; a pending sum
    over an axis that splits the experts and not the tokens. See ``dispatch_tokens``.

    >>> x, chosen = torch.ones(2, 3), torch.tensor([[0], [1]])
    >>> sent = dt.experts.dispatch_tokens(x, chosen, 2).apply(lambda rows, counts: rows * 10)
    >>> dt.experts.combine_tokens(sent, torch.tensor([[1.0], [0.5]]))[:, 0]
    tensor([10.,  5.])
    """
    who = "a DispatchedTokens, as dispatch_tokens gives,"
    check_type("combine_tokens: dispatched", dispatched, DispatchedTokens, who)
    check_type("combine_tokens: weights", weights, Tensor, "a tensor")
    tokens, indices = dispatched.tokens, dispatched.indices
    if tokens is None:
        raise ValueError("combine_tokens: these tokens were combined already: dispatch them again")
    if weights.shape != indices.shape:
        raise ValueError(
            f"combine_tokens: weights {list(weights.shape)} for indices {list(indices.shape)}: one "
            "for each is expected"
        )
    experts = _Experts(dispatched.stages)
    parameters = [p for stage in dispatched.stages for p in stage.parameters]
    try:
        n, most = dispatched.num_experts, dispatched.capacity
        if most is None:
            out = run_experts(experts, n, tokens, indices, weights, *parameters)
        else:
            out = run_bounded(experts, n, most, tokens, indices, weights, parameters)
    finally:
        experts.stages = []
    if isinstance(indices, DistTensor):
        indices = indices.detach()
    first = parameters[0] if parameters else None
    dispatched.owner = first.spec if isinstance(first, DistTensor) else None
    dispatched.tokens, dispatched.indices, dispatched.stages = None, indices, []
    return out
