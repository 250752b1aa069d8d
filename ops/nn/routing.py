"""Routes tokens to members of a group: a pure function of the router's choices on all members.

A token is sent to a member once, for all of its experts there. The rows that a member receives are
numbered by sender and token. A *pair* is a row and one of this member's experts; pairs are sorted
by expert. For an index that is not the number of an expert, the token is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from disttensor.torch_private import FakeTensor, without_fakes

Range = tuple[int, int]  # first and one past the last expert of a member


class Route(NamedTuple):
    """The tokens that one member sends and receives.

    send      its tokens in the order in which they leave, those for member 0 first
    sent      how many go to each member; received: how many rows come from each
    rows      for each pair the number of its row; slots: which of the row's choices it is
    counts    pairs of each of its experts
    """

    send: Tensor
    sent: list[int]
    received: list[int]
    rows: Tensor
    slots: Tensor
    counts: list[int]


def narrow(indices: Tensor, experts: int) -> Tensor:
    """Returns indices in the smallest dtype, as they are sent; -1 if there is no such expert."""
    indices = indices.long()  # the dtype of the indices may not hold ``experts``
    dtype = torch.int8 if experts < 2**7 else torch.int16 if experts < 2**15 else torch.int32
    return torch.where((indices < 0) | (indices >= experts), -1, indices).to(dtype)


def route(every: Tensor, tokens: int, me: int, ranges: Sequence[Range]) -> Route:
    """Returns the route of each token. every: [members, most tokens of one, k], narrow, -1 if a
    member has fewer; ``tokens``: the number of this member's; ``ranges[i]``: the experts of member
    i, in order."""
    n, most, k = every.shape
    mine, device = every[me, :tokens].long(), every.device
    first, last = ranges[me]
    # Tokens to send: to each member the tokens that have an expert there. Column n: no member.
    owner = torch.full((max([1, *(stop for _, stop in ranges)]) + 1,), n, device=device)
    for i, (start, stop) in enumerate(ranges):
        owner[start:stop] = i
    members = owner[mine.clamp(max=len(owner) - 1)]  # the last entry and -1: no member
    goes = torch.zeros(n + 1, tokens, dtype=torch.bool, device=device)
    goes[members, torch.arange(tokens, device=device).unsqueeze(1)] = True
    to = goes[:n].nonzero()
    # Rows to receive.
    chosen = (every >= first) & (every < last)
    comes = chosen.any(-1).flatten()
    pairs = chosen.flatten().nonzero().squeeze(1)
    expert = every.flatten()[pairs]
    pairs = pairs[expert.argsort(stable=True)]
    number = comes.cumsum(0) - 1
    # One copy to the host for all sizes.
    sizes = torch.cat([
        goes[:n].sum(1), comes.view(n, most).sum(1),
        torch.bincount(expert.long() - first, minlength=last - first),
    ]).tolist()  # fmt: skip
    return Route(
        to[:, 1], sizes[:n], sizes[n : 2 * n], number[pairs // max(1, k)], pairs % max(1, k),
        sizes[2 * n :],
    )  # fmt: skip


def spread(every: Tensor, tokens: Sequence[int], me: int, ranges: Sequence[Range]) -> Route:
    """Returns a ``route`` without data, as in a simulation: tokens take experts in turn, and the
    choices of a token have equal distances."""
    n, most, k = every.shape
    experts = max([1, *(stop for _, stop in ranges)])
    with without_fakes():
        turns = torch.arange(n * most).view(n, most, 1)
        choices = (turns + torch.arange(k) * max(1, experts // max(1, k))) % experts
        for i, count in enumerate(tokens):
            choices[i, count:] = -1
        found = route(choices, tokens[me], me, ranges)
        sizes = [len(found.send), len(found.rows)]
    send, rows = (every.new_zeros(n, dtype=torch.long) for n in sizes)
    return found._replace(send=send, rows=rows, slots=rows)


def without_data(x: Tensor) -> bool:
    return isinstance(x, FakeTensor)
