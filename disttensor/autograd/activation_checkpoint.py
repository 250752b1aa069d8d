"""Activation checkpointing: a recomputed region draws the same random numbers as its forward.

torch.utils.checkpoint (use_reentrant=False) runs a region again in the backward and restores
torch's own generator for it. The numbers of DistTensors follow from a counter that torch does not
save. So each random call adds a note to the regions that it runs in, and in a recomputation the
n-th call takes the n-th note:

    the innermost recomputation around a call   gives its note (without one, the counter does)
    the forwards of regions inside that         note it, for recomputations of their own

``patches/activation_checkpoint.py`` opens a ``Run`` around each forward and each recomputation.

Ranks that are in several meshes recompute a region at the first of its nodes that saved a tensor,
which other ranks may not have. All ranks must recompute it before they run its collectives. So a
node whose backward communicates saves a tensor in its region (``join_region``), and unpacks it
before it communicates (``recompute_region``).

A recomputation runs at another point of the program than its forward, so contexts around the
forward are entered again (``callbacks.recompute_contexts``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from disttensor.torch_private import current_backward, next_node, top_saved_tensors_hooks

# the innermost run around this code; only this module sets it
INNERMOST: ContextVar[Run | None] = ContextVar("checkpointed region", default=None)
# (first node, node after the last) of the outermost regions, if a list is set
REGIONS: ContextVar[list[tuple[int, int]] | None] = ContextVar("regions", default=None)


class Run:
    """``with Run(notes, ...):`` runs the forward of a region, which adds to its notes, or a
    recomputation, which takes the notes one by one."""

    __slots__ = (
        "__weakref__",
        "begin",
        "ended",
        "is_recompute",
        "notes",
        "outer",
        "regions",
        "taken",
    )

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
    """Returns the innermost run of a region around this code; None outside of regions."""
    return INNERMOST.get()


def outermost_run() -> Run | None:
    """Returns the outermost run of a region around this code; None outside of regions."""
    run = INNERMOST.get()
    while run is not None and run.outer is not None:
        run = run.outer
    return run


def recompute_around(run: Run | None) -> Run | None:
    """Returns the innermost recomputation around this code, or None."""
    while run is not None and not run.is_recompute:
        run = run.outer
    return run


def region() -> Any:
    """Returns an identity of this code's region and run: a weak reference to the innermost run.
    Aliases made in one region are not used in another, because each region saves the same tensors
    in its forward and its recomputation."""
    run = INNERMOST.get()
    return None if run is None else weakref.ref(run)


def next_note(run: Run | None, fits: Callable[[Any], bool] = lambda _: True) -> Any:
    """Returns the first note that a recomputation has not taken yet, of those that fit; None if
    there is none, or no recomputation."""
    source = recompute_around(run)
    return None if source is None else next(filter(fits, source.notes[source.taken :]), None)


def repeated_note(run: Run | None) -> Any:
    """Returns the note of the random call that a recomputation is about to repeat, or None if its
    numbers are new. Raises RuntimeError if the recomputation draws more often than the forward."""
    source = recompute_around(run)
    if source is None:
        return None
    if source.taken >= len(source.notes):
        raise RuntimeError(
            f"the recomputation of a checkpointed region draws random numbers {source.taken + 1} "
            f"times, its forward did so {len(source.notes)} times: the region must make the same "
            "calls in both (does it depend on state that changed since?)"
        )
    return source.notes[source.taken]


def add_note(run: Run | None, what: Any) -> None:
    """Adds the note of a random call to all regions around it. Raises RuntimeError in a backward
    that repeats no region."""
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
    """Ties a node whose backward communicates to the region around its forward, if there is one."""
    if top_saved_tensors_hooks(True) is not None:
        ctx.save_for_backward(torch.empty(0, device="cpu"))
        ctx.in_region = True


def recompute_region(ctx: Any) -> None:
    """Recomputes the region of a node, in its backward, before it communicates. The user's own
    saved-tensors hooks look like a region without an end: a node in it may serve several
    backwards, and its saved tensor is freed after the first."""
    if getattr(ctx, "in_region", False):
        try:
            _ = ctx.saved_tensors
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
