"""What a rank does in a step, as it is recorded: operators, collectives, messages, waits, where
forwards and backwards of a pipeline begin, and gradients that come."""

from __future__ import annotations

from typing import NamedTuple

import torch

PHASES = ("forward", "backward", "optimizer")


class Op(NamedTuple):
    """One operator on locals that computes something, so no view. ``nbytes``: what it reads and
    writes; ``flops`` by torch's formulas; ``dtype`` of what it computes in; ``layer``: of those
    with FLOPs, see ``layers.py``; ``causal``: of a causal attention the numbers of its queries and
    keys."""

    name: str
    flops: int
    nbytes: int
    dtype: torch.dtype
    phase: str
    where: str
    layer: str = ""
    causal: tuple[int, ...] = ()


class Collective(NamedTuple):
    """The start of a collective. ``nbytes``: what this rank puts on the wire; ``payload``: bytes of
    its largest tensor. ``group``: the name of the process group, and ``number`` the collectives on
    it so far, are the same on all its ranks. ``uneven``: ranks exchange pieces of several sizes.
    ``work``: what a Wait names."""

    kind: str
    axis: str
    nbytes: int
    payload: int
    ranks: tuple[int, ...]
    group: str
    number: int
    uneven: bool
    work: int
    phase: str
    where: str


class Message(NamedTuple):
    """A message is sent to ``peer``, or asked for from it. ``tag`` and ``number``, of the messages
    between the two with this tag, are the same on both."""

    peer: int
    sends: bool
    nbytes: int
    tag: int
    number: int
    work: int
    phase: str
    where: str


class Wait(NamedTuple):
    """The rank needs what ``work`` brings."""

    work: int


class Visit(NamedTuple):
    """A forward or a backward of a micro-batch begins, in a pipeline run."""

    phase: str
    where: str


class Gradient(NamedTuple):
    """The gradient of a parameter that lies in shards has come."""

    where: str


Event = Op | Collective | Message | Wait | Visit | Gradient
