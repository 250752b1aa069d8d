"""The recorded events of a step: operators, collectives, messages, waits, begins of the forwards
and backwards of a pipeline, and gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from disttensor.pipeline.action import Action

PHASES = ("forward", "backward", "optimizer")
Label = tuple[int, Action | None]  # a pipeline run and an action; None: the part before the run
# Of a storage or work: what made it and how many that made before, or a number while it is recorded
# (negative: it is older than the step).
Name = tuple[Label, int] | int


class Op(NamedTuple):
    """An operator on locals, except views.

    flops   by torch's formulas
    nbytes  bytes that it reads and writes
    dtype   the dtype in which it computes
    layer   of operators with FLOPs, see ``layers.py``
    causal  of a causal attention: the numbers of its queries and keys
    again   it was computed before, in a forward that is recomputed
    """

    name: str
    flops: int
    nbytes: int
    dtype: torch.dtype
    phase: str
    where: str
    layer: str = ""
    causal: tuple[int, ...] = ()
    again: bool = False


class Collective(NamedTuple):
    """The start of a collective.

    nbytes   bytes that this rank sends
    group    the name of the process group, the same on all its ranks
    uneven   the amounts sent to each rank, and received, if they are not all equal; else ()
    work     its number or name, which a Wait has, too
    """

    kind: str
    axis: str
    nbytes: int
    ranks: tuple[int, ...]
    group: str
    uneven: tuple[tuple[int, ...], ...]
    work: Name
    phase: str
    where: str


class Message(NamedTuple):
    """A message that is sent to ``peer``, or received from it. ``tag`` is the same on both ranks,
    and so is ``number``, which counts the messages with this tag between the two."""

    peer: int
    sends: bool
    nbytes: int
    tag: int
    number: int
    work: Name
    phase: str
    where: str


class Wait(NamedTuple):
    """The rank needs the result of ``work``."""

    work: Name


class Visit(NamedTuple):
    """A forward or a backward of a micro-batch begins, in a pipeline run."""

    phase: str
    where: str


class Gradient(NamedTuple):
    """The gradient of a sharded parameter is ready."""

    where: str


Event = Op | Collective | Message | Wait | Visit | Gradient
