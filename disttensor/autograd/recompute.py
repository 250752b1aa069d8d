"""Activation checkpointing and random numbers: a recomputed region draws what its forward drew.

torch.utils.checkpoint (use_reentrant=False) runs a region again in the backward and puts torch's
own generator back for it. Our numbers hang on a counter that torch does not know of. But while a
region runs, the hooks of its checkpoint lie on the stack of default saved-tensors hooks:
``_checkpoint_hook`` in the forward, which holds the frame of the region, and
``_recomputation_hook`` in the recomputation, which refers to that same frame. So each random call
is noted with the frames that it runs in, and in a recomputation the n-th call takes the n-th note:

    innermost recomputation on the stack     gives the numbers of the call (none: the counter does)
    checkpoints entered since                note them, for their own recomputation later (nested checkpoints)

Ranks that are in several meshes compute a region again at the first of its nodes that saved
something, which other ranks may not have. What it communicates has all ranks come there first, so a
node whose backward communicates saves something in a region (``hold``), and unpacks it before it
communicates (``redo``).

A random call in a backward that is no such recomputation would draw numbers that nobody can repeat
or expects (a region recomputed by other means, for one): ``note`` raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from disttensor.torch_private import current_backward

_autograd: Any = torch._C._autograd
_top: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
_FILE = "torch.utils.checkpoint"


@dataclass(slots=True)
class Replay:
    """One recomputation: the notes of its region, and how many have been taken."""

    notes: list[Any]
    taken: int = 0


class Scope(NamedTuple):
    """What the hooks now on the stack say: where numbers come from, and where random calls are
    noted."""

    source: Replay | None
    notes: list[list[Any]]


_notes: weakref.WeakKeyDictionary[Any, list[Any]] = (
    weakref.WeakKeyDictionary()
)  # frame -> one note per random call
_replays: weakref.WeakKeyDictionary[Any, Replay] = (
    weakref.WeakKeyDictionary()
)  # hook of one recomputation ->
_scopes: weakref.WeakKeyDictionary[Any, Scope] = (
    weakref.WeakKeyDictionary()
)  # hook of one checkpoint on the top ->


def scope() -> Scope | None:
    """The checkpointed regions that this code runs in; None where there are none."""
    top = _top(True)
    if top is None:
        return None
    found = _scopes.get(top[0]) if _is_ours(top[0]) else None
    return found or _read_stack()


def drawn(where: Scope | None) -> Any:
    """The note of the random call that a recomputation is about to repeat; None where numbers are
    new.

    Raises RuntimeError where the recomputation draws more often than the forward did.
    """
    if where is None or where.source is None:
        return None
    source = where.source
    if source.taken >= len(source.notes):
        raise RuntimeError(
            f"the recomputation of a checkpointed region draws random numbers {source.taken + 1} "
            f"times, its forward did so {len(source.notes)} times: the region must make the same "
            "calls in both (does it depend on state that changed since?)"
        )
    return source.notes[source.taken]


def note(where: Scope | None, what: Any) -> None:
    """Note a random call with all regions that it runs in. Raises RuntimeError in a backward that
    repeats no region."""
    if where is not None and where.source is not None:
        where.source.taken += 1
    elif current_backward() != -1:
        raise RuntimeError(
            "random numbers for a DistTensor are drawn inside a backward, outside a region of "
            "torch.utils.checkpoint(..., use_reentrant=False): whether they should repeat those of "
            "the forward is not known here. To recompute a region, use that checkpoint; for new "
            "numbers (noise on a gradient) pass generator=, a torch.Generator seeded alike on all "
            "ranks: torch.empty_like(grad).normal_(generator=g)"
        )
    if where is not None:
        for notes in where.notes:
            notes.append(what)


def hold(ctx: Any) -> None:
    """In the forward of a node whose backward communicates: tie it to the region that it is made
    in, if any."""
    if _top(True) is not None:
        ctx.save_for_backward(torch.empty(0))
        ctx.held = True


def redo(ctx: Any) -> None:
    """In its backward, before it communicates: have the region computed again now."""
    if getattr(ctx, "held", False):
        _ = ctx.saved_tensors


def _is_ours(pack: Any) -> bool:
    return getattr(pack, "__module__", "") == _FILE


def _read_stack() -> Scope:
    """Walk the stack of hooks from the top down to the innermost recomputation."""
    pairs = []
    while (pair := _top(True)) is not None:
        pairs.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(pairs):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    source: Replay | None = None
    notes: list[list[Any]] = []
    for pack in (pack for pack, _ in pairs if _is_ours(pack)):
        frame = _held(pack, "frame")
        if frame is None:
            source = _replay(pack)
            break
        notes.append(_notes.setdefault(frame, []))
    found = Scope(source, notes)
    if _is_ours(pairs[0][0]):
        _scopes[pairs[0][0]] = found
    return found


def _replay(pack: Any) -> Replay:
    """The state of the recomputation that this hook belongs to."""
    found = _replays.get(pack)
    if found is None:
        region = _held(getattr(pack, "_torchdynamo_orig_callable", pack), "target_frame_ref")
        frame = None if region is None else region()
        found = _replays[pack] = Replay([] if frame is None else _notes.get(frame, []))
    return found


def _held(function: Any, name: str) -> Any:
    """What the variable ``name`` of a closure holds; None if there is no such variable."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None
