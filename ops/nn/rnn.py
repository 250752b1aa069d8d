"""Recurrent networks (lstm, gru, rnn): the batch passes through; time, features and weights stay
whole."""

from __future__ import annotations

from typing import Any

import torch

from ops.empty_pieces import zeros_if_empty
from ops.factors import Arg, Factors, NoRule
from ops.registry import rule


@rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, floats=True, exact=True)
def recurrent(
    input: Arg, hx: Any, params: Any, has_biases: Any, num_layers: int, dropout: float = 0.0,
    train: bool = False, bidirectional: bool = False, batch_first: bool = False,
) -> Factors:  # fmt: skip
    """batch passes through; all else is whole"""
    if isinstance(has_biases, (list, tuple)):  # data, batch_sizes, hx, params
        raise NoRule("a packed sequence")
    if dropout and train and num_layers > 1:
        raise NoRule("dropout between the layers, which draws inside")
    states = [hx] if isinstance(hx, Arg) else hx
    lead = ("n", "t") if batch_first else ("t", "n")
    kept = [("l", "n", f"h{i}") for i in range(len(states))]
    sizes: dict[Any, int] = {"o": states[0].shape[2] * (2 if bidirectional else 1)}
    inputs = ((*lead, None), *kept, *((None,) * w.ndim for w in params))
    whole = {"t", "l", *(names[2] for names in kept)}
    return Factors(inputs, ((*lead, "o"), *kept), sizes, unsplittable=whole, local=zeros_if_empty)
