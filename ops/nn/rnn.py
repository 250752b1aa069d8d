"""Recurrent networks (lstm, gru, rnn): the batch passes through; time, features and weights stay
whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.registry import rule


def _factors(
    input: Any, states: Sequence[Any], weights: Any, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Factors:  # fmt: skip
    if not isinstance(weights, (list, tuple)):
        raise NoRule("a packed sequence")
    if dropout and train and num_layers > 1:
        raise NoRule("dropout between the layers, which draws inside")
    lead = ("n", "t") if batch_first else ("t", "n")
    sizes: dict[Any, int] = dict(zip((*lead, "i"), input.shape, strict=True))
    inputs: list[Any] = [(*lead, "i")]
    outputs: list[Any] = [(*lead, "o")]
    sizes["o"] = states[0].shape[2] * (2 if bidirectional else 1)
    for i, state in enumerate(states):
        inputs.append(("l", "n", f"h{i}"))
        outputs.append(("l", "n", f"h{i}"))
        sizes.update({"l": state.shape[0], f"h{i}": state.shape[2]})
    inputs += [(None,) * w.ndim for w in weights]
    whole = frozenset(letter for letter in sizes if letter != "n")
    return Factors(tuple(inputs), tuple(outputs), sizes, whole=whole, local=zeros_if_empty)


@rule(torch.lstm, floats=True, exact=True)
def lstm(
    input: Arg, hx: Any, params: Any, has_biases: Any, num_layers: int, dropout: float = 0.0,
    train: bool = False, bidirectional: bool = False, batch_first: bool = False,
) -> Factors:  # fmt: skip
    """batch passes through; all else is whole"""
    if isinstance(hx, Arg):
        raise NoRule("a packed sequence")
    return _factors(input, hx, params, num_layers, dropout, train, bidirectional, batch_first)


@rule(torch.gru, torch.rnn_tanh, torch.rnn_relu, floats=True, exact=True)
def recurrent(
    input: Arg, hx: Arg, params: Any, has_biases: Any, num_layers: int, dropout: float = 0.0,
    train: bool = False, bidirectional: bool = False, batch_first: bool = False,
) -> Factors:  # fmt: skip
    """batch passes through; all else is whole"""
    return _factors(input, [hx], params, num_layers, dropout, train, bidirectional, batch_first)
