"""Taps: replace functions of this package while one thread records.

Each tap calls the function that it replaces and reports the call to the recorder of its thread. On
other threads, and inside a call that is already one line, it only calls the function.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from disttensor.cache import Cache
from disttensor.comm import log, objects
from disttensor.core.spec import DistSpec
from disttensor.dispatch import dispatch, fallback, rematerialize, run, writes
from disttensor.dispatch.resolve import Plan
from disttensor.errors import name_of
from disttensor.tensor import awaited, base, views
from disttensor.tensor import reshard as tensor_reshard
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import storage_id
from reshard import cross_mesh

Function = Callable[..., Any]

_now = threading.local()


def recording(recorder: Any) -> bool:
    """Returns True if this thread records with ``recorder``."""
    return getattr(_now, "recorder", None) is recorder


@contextmanager
def taps(recorder: Any) -> Iterator[None]:
    """Installs the taps while the block runs. The process has one recorder at a time."""
    modules: dict[str, Any] = {
        "base": base, "run": run,
        "fallback": fallback, "rematerialize": rematerialize,
        "tensor_reshard": tensor_reshard, "awaited": awaited,
    }  # fmt: skip
    plans: Cache[Any, Any] = Cache(16384)  # new plans, of tapped local functions
    table: list[tuple[Any, str, Callable[[Any, Any], Any]]] = [
        (dispatch, "PLANS", lambda recorder, original: plans),
        (dispatch, "_known", lambda recorder, original: plans.get),
        (dispatch, "note", _noting),
        (dispatch, "plan_of", _quiet),
        (DistSpec, "__new__", _quiet),
        (Plan, "local_fn", _local_fn),
        (MeshTensor, "local_for", _local_for),
        (cross_mesh, "run", _one_line),
        (objects, "gather_objects", _telling),
        (torch.autograd.Function, "apply", _custom),
    ]
    more: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = (
        ("base", "along", _one_line), ("rematerialize", "move", _one_line),
        ("awaited", "beginning", _at_once),
        ("tensor_reshard", "along", _one_line), ("tensor_reshard", "through", _through),
        ("run", "written", _written),
        ("fallback", "written", _written),
        ("fallback", "forked", _forked), ("fallback", "count", _uncounted),
    )  # fmt: skip
    table += [(modules[where], name, tap) for where, name, tap in more]
    with ExitStack() as stack:
        for owner, name, tap in table:
            original = inspect.getattr_static(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, tap(recorder, getattr(original, "__func__", original)))
        _now.recorder = recorder
        log.active.append(recorder.seen)
        try:
            yield
        finally:
            log.active.remove(recorder.seen)
            _now.recorder = None


def _one_line(recorder: Any, original: Function) -> Function:
    line: Function = recorder.one_line(original)
    return line


def _quiet(recorder: Any, original: Function) -> Function:
    """Wraps a function that prepares a call: its own calls are not recorded."""

    def find(*args: Any, **kwargs: Any) -> Any:
        if not recording(recorder):
            return original(*args, **kwargs)
        with recorder.inside():
            return original(*args, **kwargs)

    return find


def _at_once(recorder: Any, original: Function) -> Function:
    """Makes reshards wait at once while this thread records."""

    def beginning(*ends: DistSpec) -> Any:
        return None if recording(recorder) else original(*ends)

    return beginning


def _telling(recorder: Any, original: Function) -> Function:
    def tell(*args: Any, **kwargs: Any) -> Any:
        if recording(recorder):
            recorder.refuse("ranks tell each other sizes in it (local_map: give out_shapes)")
        return _quiet(recorder, original)(*args, **kwargs)

    return tell


def _noting(recorder: Any, original: Function) -> Function:
    def note(noted: Any) -> None:
        original(noted)
        if recording(recorder) and noted.call.mesh is not None:
            recorder.calls.append(noted.call)

    return note


def _local_fn(recorder: Any, original: Function) -> Function:
    def local_fn(plan: Plan) -> Function:
        func: Function = original(plan)
        if not recording(recorder):
            return func
        if plan.rule.inplace and writes.is_untracked(plan.func):
            recorder.refuse(f"{name_of(plan.func)} writes in a way that autograd does not count")
        opened: Function = recorder.opened(func)
        return opened

    return local_fn


def _local_for(recorder: Any, original: Function) -> Function:
    """Records aliases of sources: a replay reads them again, as they collect gradients."""

    def local_for(x: DistTensor, axes: Any) -> torch.Tensor:
        source = recorder.source_of(x)
        if source is None:
            out: torch.Tensor = original(x, axes)
            return out
        with recorder.inside():
            out = original(x, axes)
        if out is not x.local:
            recorder.use(source, axes, out)
        return out

    return local_for


def _through(recorder: Any, original: Function) -> Function:
    """Records whether a source is a leaf without hooks, which decides how it is cut."""

    def through(x: DistTensor, dst: Any, axes: Any) -> Any:
        if recorder.source_of(x) is not None:
            recorder.cut[id(x)] = x, free_leaf(x)
        return original(x, dst, axes)

    return through


def free_leaf(x: MeshTensor) -> bool:
    """Returns True for a leaf whose varying uses collect their own gradients."""
    found = x._grad_state
    return x.local.is_leaf and (found is None or (not found.hooked and found.origin is None))


def _written(recorder: Any, original: Function) -> Function:
    def written(x: DistTensor) -> None:
        original(x)
        if not recorder.listens():
            return
        if x._view_state is not None or (
            views.LIVE and storage_id(x.local.untyped_storage()) in views.LIVE
        ):
            recorder.refuse("it writes to what stands for a view of another tensor")
        recorder.wrote(x, original)

    return written


def _uncounted(recorder: Any, original: Function) -> Function:
    def count(local: torch.Tensor) -> None:
        if recorder.listens():
            recorder.refuse("it writes in a way that autograd does not count")
        original(local)

    return count


def _custom(recorder: Any, original: Any) -> Any:
    """Records a custom function of regular tensors, with its backward, as one line."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = original.__get__(cls)
        if DistTensor not in map(type, args):
            call = recorder.one_line(call)
        return call(*args, **kwargs)

    return classmethod(apply)


def _forked(recorder: Any, original: Function) -> Function:
    """Records the fallback without its seeding of generators, which a replay leaves out. If the
    function draws, the count of random calls changes, and the recording is refused."""

    @contextmanager
    def forked(*args: Any, **kwargs: Any) -> Iterator[None]:
        mine = recorder.listens()
        if mine and not recorder.within:
            recorder.refuse("a custom autograd.Function of DistTensors, which gathers them")
        with ExitStack() as stack:
            recorder.quiet += mine
            stack.enter_context(original(*args, **kwargs))
            recorder.quiet -= mine
            recorder.follow_generator()
            try:
                yield
            finally:
                recorder.quiet += mine
                stack.close()
                recorder.quiet -= mine
                recorder.follow_generator()

    return forked
