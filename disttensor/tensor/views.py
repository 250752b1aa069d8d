"""Tensors that a write to memory makes stale: copies in place of views, kept reductions, and views
on a rank off the mesh.

A view function that had to move data returns a copy. In one process a write to either tensor would
be visible in the other. So a write to such a copy is refused or brought back to its source. After a
write to the source (also through a view of it) the copy is stale: its local is replaced by a
``StaleView``, and any use of it raises. Reads cost nothing extra. A layer of another stage gets a
tensor in place of its input: after a write to that one, the input is stale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from disttensor.errors import name_of
from disttensor.pytree import collect
from disttensor.tensor.versions import count, mark_storage_given_out
from disttensor.torch_private import copied_storages, make_subclass, storage_id

# storage -> the tensors of which a write to it changes something: copies in place of views, and
# tensors with a kept reduction
LIVE: dict[int, list[weakref.ref[Any]]] = {}
# storages of copies whose write is being brought back: they are not stale
_current: list[int] = []


class ViewState:
    """State of the views of a tensor. Made on first use; only this module writes to it.

    func, storages  of a copy: the view function, and the memory of its source (kept alive).
    write_back      brings a write to this copy back to its source; None: it would be lost.
    uncounted       True for ``.data``: autograd counts writes to it separately.
    stands_for      of a tensor that a layer got in place of its input: a reference to the input.
    refusal         the error of a write to it; "": see ``func``.
    base, views     off the mesh: the tensor whose memory this shares; weak references to its views.
    strides         off the mesh: of the global tensor in one process; None: it is contiguous.
    """

    func: Any = None
    storages: tuple[Any, ...] = ()
    write_back: Callable[[Any], Any] | None = None
    uncounted: bool = False
    stands_for: weakref.ref[Any] | None = None
    refusal: str = ""
    base: Any = None
    views: list[weakref.ref[Any]] | None = None
    strides: tuple[int, ...] | None = None


# Copies -------------------------------------------------------------------------------------------


class StaleView(torch.Tensor):
    """Replaces the local of a copy after a write to its source. It is a tensor, because methods of
    tensors accept nothing else and would not call its ``__torch_function__``."""

    message: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        found = next(a for a in collect((args, kwargs), []) if isinstance(a, StaleView))
        raise RuntimeError(found.message)


def register_copy(
    copy: Any, source: Any, func: Any, write_back: Callable[[Any], Any] | None = None
) -> None:
    """Registers ``copy``: the view function ``func`` made it from ``source`` (both DistTensors) and
    moved data."""
    above = source._view_state.storages if source._view_state is not None else ()
    _follow(copy, func, (source.local.untyped_storage(), *above), write_back)


def inherit_copy(view: Any, source: Any) -> None:
    """Marks ``view``, which shares the memory of ``source``, as a copy if ``source`` is one."""
    state = source._view_state
    if state is not None and state.func is not None:
        back = state.write_back
        _follow(view, state.func, state.storages, None if back is None else lambda _: back(source))
    if state is not None and state.uncounted:
        view_state(view).uncounted = True
    if state is not None and state.stands_for is not None:
        view_state(view).stands_for = state.stands_for


def stand_for(new: Any, x: Any) -> None:
    """Registers ``new``, which a layer gets in place of ``x``. In one process they are one tensor,
    so a write to ``new`` makes x stale, on all ranks."""
    view_state(new).stands_for = weakref.ref(x)


def shares_memory(x: Any) -> bool:
    """Returns True if the state of x says more than the input for which it stands."""
    state = x._view_state
    return state is not None and not vars(state).keys() <= {"stands_for", "refusal"}


def outdate_input(written: Any) -> None:
    """Marks the input as stale that ``written``, or the tensor whose memory it shares off the mesh,
    stands for."""
    states = [x._view_state for x in (written, base_of(written)) if x is not None]
    for ref in [state.stands_for for state in states if state is not None]:
        x = None if ref is None else ref()
        if x is not None:
            _make_stale(
                x, f"{x.spec!r} was the input of a layer on another stage, which wrote to it in "
                "place: the write is not in this tensor. Use the result of the layer, or give it a "
                "clone() to keep the old values"
            )  # fmt: skip


def _make_stale(x: Any, message: str) -> None:
    view_state(x)  # for ``check``
    x.local = stale = make_subclass(StaleView, x.spec.meta_tensor)
    stale.message = message


def _follow(
    copy: Any, func: Any, storages: tuple[Any, ...], write_back: Callable[[Any], Any] | None
) -> None:
    state = copy._view_state = ViewState()
    state.func, state.storages, state.write_back = func, storages, write_back
    for storage in storages:
        follow_writes(copy, storage_id(storage))


def follow_writes(x: Any, key: int) -> None:
    """Lets writes to the storage ``key`` invalidate what is kept of ``x``."""
    if any(r() is x for r in LIVE.get(key, ())):
        return

    def gone(ref: weakref.ref[Any]) -> None:
        left = [r for r in LIVE.get(key, ()) if r is not ref]
        if left:
            LIVE[key] = left
        else:
            LIVE.pop(key, None)

    LIVE.setdefault(key, []).append(weakref.ref(x, gone))


def mark_given_out(x: Any) -> None:
    """Marks the local of a pending ``x``, which this rank's user gets. The user may write to it in
    ways that nothing counts (NumPy), so kept reductions of it are compared by content. A read
    changes nothing else: it may happen on one rank only."""
    if x.spec.layout.partial and x.is_initialized:
        mark_storage_given_out(x.local)
        for ref in LIVE.get(storage_id(x.local.untyped_storage()), ()):
            other = ref()
            if other is not None and other._reduced is not None:
                other._reduced.keep_content()


def refuse_copy(x: Any, func: Any) -> None:
    """Raises RuntimeError if a write to ``x`` by ``func`` would be lost."""
    state = x._view_state
    if state is not None and state.refusal:
        raise RuntimeError(f"{name_of(func)}: {state.refusal}")
    if state is not None and state.func is not None and state.write_back is None:
        raise RuntimeError(
            f"{name_of(func)}: {x.spec!r} is a result of {name_of(state.func)}, which had to move "
            "data and returned a copy, so a write would not reach the tensor that it was made "
            "from. Reshard that tensor first, or write to a clone()"
        )


def write_back(x: Any) -> None:
    """Brings a write to ``x`` to its source if x is a copy."""
    state = x._view_state
    if state is not None and state.stands_for is not None:
        outdate_input(x)
    if state is not None and state.uncounted:
        count(x.local)
    if state is not None and state.write_back is not None:
        with up_to_date(x):
            state.write_back(x)


def has_copies(local: torch.Tensor) -> bool:
    """Returns True if a write to ``local`` would make a copy in place of a view stale."""
    refs = LIVE.get(storage_id(local.untyped_storage()), ()) if LIVE else ()
    return any(x._view_state is not None for r in refs if (x := r()) is not None)


def invalidate(written: torch.Tensor) -> None:
    """Drops what was made of the memory of ``written``, which a call that all ranks make has
    changed: kept reductions. Marks copies of it as stale."""
    if not LIVE:
        return
    for ref in LIVE.get(storage_id(written.untyped_storage()), ()):
        copy = ref()
        if copy is None:
            continue
        copy._reduced = None
        state = copy._view_state
        if (
            state is None
            or state.func is None
            or isinstance(copy.local, StaleView)
            or storage_id(copy.local.untyped_storage()) in _current
            or storage_id(copy.local.untyped_storage()) == storage_id(written.untyped_storage())
        ):
            continue
        _make_stale(
            copy, f"{copy.spec!r} came from {name_of(state.func)}, which had to move data and gave "
            "a copy; the tensor that it was taken from has been written to since, which a view "
            "would show. Take it again for the new values, or clone() it before the write to keep "
            "the old ones"
        )  # fmt: skip


def check(copy: Any) -> None:
    """Raises RuntimeError if ``copy`` is stale: called where its local is returned unread."""
    if isinstance(copy.local, StaleView):
        _ = copy.local.shape


@contextmanager
def up_to_date(copy: Any) -> Iterator[None]:
    """Keeps ``copy`` from becoming stale while a write to it is brought back to its source."""
    _current.append(storage_id(copy.local.untyped_storage()))
    try:
        yield
    finally:
        _current.pop()


# Deep copies --------------------------------------------------------------------------------------


def copy_state(new: Any, x: Any, memo: dict[Any, Any]) -> None:
    """Gives ``new``, a deepcopy of x, the strides of x off the mesh. If x or an earlier tensor of
    the same deepcopy is a copy in place of a view, and its source was copied too, the new copy
    follows the new source: a write to either would be visible in the other in one process."""
    state = x._view_state
    if state is not None and state.strides is not None:
        like = torch.empty_strided(x.spec.shape, state.strides, device="meta")
        view_state(new).strides = like.clone().stride() if x._is_param else state.strides
    copies = memo.setdefault("disttensor", [])
    if state is not None and state.func is not None and not x._is_param:
        copies.append((new, state))
    copied = copied_storages(memo)
    for copy, of in copies:
        found = tuple(copied[n] for n in map(storage_id, of.storages) if n in copied)
        if found and (copy._view_state is None or len(copy._view_state.storages) < len(found)):
            _follow(copy, of.func, found, None)


# Off the mesh -------------------------------------------------------------------------------------


def view_state(x: Any) -> ViewState:
    state = x._view_state
    if state is None:
        state = x._view_state = ViewState()
    return state


def base_of(x: Any) -> Any:
    """Returns the tensor whose memory x shares, or None if x has its own."""
    state = x._view_state
    return None if state is None else state.base


def register_view(view: Any, base: Any, strides: tuple[int, ...] | None = None) -> None:
    """Records that ``view`` shares the memory of ``base`` on ranks of the mesh: a write to one is a
    write to both."""
    while (above := base_of(base)) is not None:
        base = above
    view._view_state = state = ViewState()
    state.base, state.strides = base, strides
    local = base.local
    if local.requires_grad and local.is_leaf:
        return  # it cannot be written to
    known = view_state(base)
    if known.views is None:
        known.views = []
    elif len(known.views) > 31:
        known.views[:] = [v for v in known.views if v() is not None]
    known.views.append(weakref.ref(view))


def aliases_of(x: Any) -> list[Any]:
    """Returns all tensors that share the memory of x, x among them."""
    base = base_of(x)
    base = x if base is None else base
    state = base._view_state
    views = () if state is None else state.views or ()
    return [base, *(v for v in (ref() for ref in views) if v is not None), x]
