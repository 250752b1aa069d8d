"""Activation checkpointing: a region that is computed again draws what its forward drew.

torch.utils.checkpoint (use_reentrant=False) runs a region again in the backward and puts torch's
own generator back for it. The numbers of DistTensors follow from a counter that torch does not know
of. So each random call is noted with the regions that it runs in, and in a recomputation the n-th
call takes the n-th note:

    the innermost recomputation around a call   gives its note (without one, the counter does)
    the forwards of regions inside that         note it, for recomputations of their own

``disttensor.patches.checkpoint`` opens a ``Run`` around each forward and each recomputation.

Ranks that are in several meshes compute a region again at the first of its nodes that saved
something, which other ranks may not have. What it communicates has all ranks come there first, so a
node whose backward communicates saves something in its region (``join_region``), and unpacks it
before it communicates (``recompute_region``).

A region is computed again out of the place that its forward had in the program, so what was set up
around that is set up for it again (``callbacks.recompute_contexts``).
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

import torch

from disttensor.torch_private import current_backward, next_node, top_saved_tensors_hooks

# of regions, around this code; changed in this module only
INNERMOST: ContextVar[Run | None] = ContextVar("checkpointed region", default=None)
# (first node, node after the last) of the outermost regions, for whoever sets a list
REGIONS: ContextVar[list[tuple[int, int]] | None] = ContextVar("regions", default=None)


class Run:
    """``with Run(notes, ...):`` the code inside is the forward of a region, which adds to its
    notes, or a recomputation, which takes them one by one."""

    __slots__ = ("begin", "ended", "is_recompute", "notes", "outer", "regions", "taken")

    def __init__(self, notes: list[Any], is_recompute: bool) -> None:
        self.notes, self.is_recompute = notes, is_recompute
        self.taken = 0
        self.ended = False

    def __enter__(self) -> None:
        self.outer = INNERMOST.get()
        self.regions = REGIONS.get() if self.outer is None else None
        if self.regions is not None:
            self.begin = next_node()
        INNERMOST.set(self)

    def __exit__(self, *exc: object) -> None:
        self.ended = True
        if self.regions is not None:
            self.regions.append((self.begin, next_node()))
        run = INNERMOST.get()
        while run is not None and run.ended:  # after an error a forward may end late
            run = run.outer
        INNERMOST.set(run)


def current_run() -> Run | None:
    """The innermost run of a region around this code; None outside of regions."""
    return INNERMOST.get()


def outermost_run() -> Run | None:
    """Returns the outermost run of a region around this code; None outside of regions."""
    run = INNERMOST.get()
    while run is not None and run.outer is not None:
        run = run.outer
    return run


def recompute_around(run: Run | None) -> Run | None:
    """The innermost recomputation that this code is part of."""
    while run is not None and not run.is_recompute:
        run = run.outer
    return run


def region() -> Any:
    """What tells this code's region from others, a recomputation from its forward: (weak) the hook
    on top of the stack of saved-tensors hooks. What was put into the graph in one region is not
    used in another: each saves the same tensors in its forward and its recomputation."""
    top = top_saved_tensors_hooks(True)
    return None if top is None else weakref.ref(top[0])


def replayed(run: Run | None, sure: bool = True) -> Any:
    """The note of the random call that a recomputation is about to repeat; None where numbers are
    new.

    Raises RuntimeError where the recomputation draws more often than the forward did; gives None
    there if it is not ``sure`` that anything will be drawn.
    """
    source = recompute_around(run)
    if source is None or (not sure and source.taken >= len(source.notes)):
        return None
    if source.taken >= len(source.notes):
        raise RuntimeError(
            f"the recomputation of a checkpointed region draws random numbers {source.taken + 1} "
            f"times, its forward did so {len(source.notes)} times: the region must make the same "
            "calls in both (does it depend on state that changed since?)"
        )
    return source.notes[source.taken]


def note(run: Run | None, what: Any) -> None:
    """Note a random call with all regions that it runs in. Raises RuntimeError in a backward that
    repeats no region."""
    source = recompute_around(run)
    if source is not None:
        source.taken += 1
    elif current_backward() != -1:
        raise RuntimeError(
            "random numbers for a DistTensor are drawn inside a backward, outside a region of "
            "torch.utils.checkpoint(..., use_reentrant=False): whether they should repeat those of "
            "the forward is not known here. To recompute a region, use that checkpoint; for new "
            "numbers (noise on a gradient) pass generator=, a torch.Generator seeded alike on all "
            "ranks: torch.empty_like(grad).normal_(generator=g)"
        )
    while run is not source and run is not None:
        run.notes.append(what)
        run = run.outer


def join_region(ctx: Any) -> None:
    """In the forward of a node whose backward communicates: tie it to the region that it is made
    in, if any."""
    if top_saved_tensors_hooks(True) is not None:
        ctx.save_for_backward(torch.empty(0, device="cpu"))
        ctx.in_region = True


def recompute_region(ctx: Any) -> None:
    """In its backward, before it communicates: have the region computed again now. Hooks of the
    user on saved tensors look like a region that never ends: there a node may serve several
    backwards, and has nothing left after the first."""
    if getattr(ctx, "in_region", False):
        try:
            _ = ctx.saved_tensors
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
