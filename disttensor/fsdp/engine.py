"""The engine of one module: hooks around the forwards and backwards of its segments.

    before a forward   gather the segment, show the twins, begin to gather the next one
    after it           show the shards again, free the twins
    before its backward and after: the same, in the other order; then its gradients are reduced

Which segment is next is what the last forward did.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from disttensor.autograd.accumulation import EACH_TIME, Window, present
from disttensor.fsdp.accumulation import Accumulation
from disttensor.fsdp.backward import Backward, at_the_end, number
from disttensor.fsdp.graph_hooks import Pass
from disttensor.fsdp.param import cast
from disttensor.fsdp.reduce import Steps, make_groups, reductions
from disttensor.fsdp.segment import Segment
from disttensor.tensor.grad_sync import BEFORE_SYNC, BEFORE_ZERO
from disttensor.tensor.gradient import AFTER_FAILURE
from disttensor.tree import flat, substitute

Tensor = torch.Tensor


_ENGINES: list[weakref.ref[Engine]] = []  # in the order of their making, which all ranks share


class Engine:
    """The segments of ``root``.

    scatter  gradients are reduced to shards (stages 2 and 3); prefetch: segments gathered ahead of
    their use compute  dtype of the twins, None: that of the parameters; wire: dtype of reductions,
    None: that of the twins
    """

    def __init__(
        self, root: nn.Module, segments: Sequence[Segment], *, scatter: bool, prefetch: int,
        compute: torch.dtype | None, wire: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.segments, self.scatter, self.prefetch = list(segments), scatter, prefetch
        self.compute, self.wire = compute, wire
        self.window = EACH_TIME  # see ``accumulate``
        self.epoch = 0
        self.order: list[Segment] = []  # in which the forwards of this epoch began
        self.before: list[Segment] = []  # the same of the last one
        self.now: Backward | None = None
        self.held = {id(t.held) for s in self.segments for t in s.twins}
        self.sums = Accumulation(partial(self._reduce, EACH_TIME))
        _share(self.segments)
        _ENGINES.append(weakref.ref(self))
        self.still = [s for s in self.segments if not s.apart]  # nothing is gathered for them
        for position, segment in enumerate(self.still):
            segment.position = position
        root.register_forward_pre_hook(self._root_begins, prepend=True)
        for segment in [s for s in self.segments if s.apart]:
            for module in segment.modules:
                module.register_forward_pre_hook(
                    partial(self._module_begins, segment), with_kwargs=True
                )
                module.register_forward_hook(partial(self._module_ends, segment), always_call=True)
        root.register_forward_hook(self._root_ends, always_call=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a module under shard_data_parallel cannot be copied or pickled: its hooks belong to "
            "its own parameters. Copy or save the values: module.state_dict()"
        )

    # Forward --------------------------------------------------------------------------------------

    def _root_begins(self, module: nn.Module, args: Any) -> None:
        if number() == -1:
            self.clean_up()
            self.epoch += 1
            self.before, self.order = self.order or self.before, []

    def _module_begins(self, segment: Segment, module: nn.Module, args: Any, kwargs: Any) -> Any:
        again = number() != -1  # a checkpointed region that a backward computes again
        if not segment.shown:
            if not again:
                self._take_place(segment)
            segment.gather()
            segment.show()
            if not again:
                self._ahead(segment, self.before)
        segment.running += 1
        if not again and torch.is_grad_enabled():
            if segment.passing is None:
                segment.passing = Pass(segment, self._enter, self._leave)
                segment.made.append(segment.passing)
                segment.passing.beside = segment.made
            if segment.comes_and_goes:
                segment.passing.takes(flat((args, kwargs), []))
        if self.compute is None:
            return None
        return cast(args, self.compute), cast(kwargs, self.compute)

    def _module_ends(self, segment: Segment, module: nn.Module, args: Any, output: Any) -> Any:
        segment.running -= 1
        if number() != -1:
            if segment.free_after_forward and not segment.running and self.now is not None:
                self.now.again(segment)
            return None
        given = flat(output, [])
        copied = any(map(segment.lends, given))
        if copied:
            output = substitute(output, lambda x: x.clone() if segment.lends(x) else x)
            given = flat(output, [])
        segment.ran.add(module)
        over = not segment.running and len(segment.ran) == len(segment.modules)
        if segment.passing is not None and (over or segment.comes_and_goes):
            segment.passing.gives(given, settle=segment.comes_and_goes)
            if segment.comes_and_goes:
                segment.passing.keeps(segment.kept(module), settle=True)
        if over:
            self._close(segment)
        return output if copied else None

    def _root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if number() != -1:
            return
        if torch.is_grad_enabled() and self.still:
            outputs = flat(output, [])
            for segment in self.still:
                Pass(segment, self._enter, self._leave).gives(outputs, settle=False)
                self._listen(segment)
        for segment in self.segments:
            if segment.apart and not segment.running:
                if segment.shown or segment.passing is not None:
                    self._close(segment)
                elif not segment.whole:
                    segment.free()  # gathered ahead, and not used
                elif segment.persist:
                    self._listen(segment)  # a twin that was lent may have found another use

    def _take_place(self, segment: Segment) -> None:
        if segment.epoch != self.epoch:
            segment.epoch, segment.position = self.epoch, len(self.order)
            segment.made = []
            self.order.append(segment)

    def _ahead(self, segment: Segment, order: list[Segment]) -> None:
        """Begin to gather the segments that come after this one in ``order``."""
        if self.prefetch and segment in order:
            at = order.index(segment) + 1
            for other in order[at : at + self.prefetch]:
                other.start()

    def _close(self, segment: Segment) -> None:
        """The forwards of this segment are over."""
        self._listen(segment)
        in_graph = segment.passing is not None and segment.passing.entered
        segment.passing = None
        segment.ran.clear()
        segment.hide()
        written = any(buffer.written() for buffer in segment.buffers)
        if written or segment.free_after_forward or not in_graph:
            segment.free()
        if written:
            raise RuntimeError(
                f"shard_data_parallel: a forward of segment {segment.name!r} wrote to one of its "
                "parameters: to a copy, which is gone now. Write to parameters between forwards, "
                "or keep what is written to in a buffer"
            )

    def _listen(self, segment: Segment) -> None:
        """Be told when a leaf has its gradient, of those that have come since the last time."""
        for twin in segment.twins:
            new = twin.new_leaves()
            if new:
                make_groups([twin], scatter=self.scatter)
            for leaf in new:
                at = len(segment.leaves)
                segment.leaves.append(twin.name)
                leaf.register_post_accumulate_grad_hook(partial(self._arrived, segment, at))

    # Backward -------------------------------------------------------------------------------------

    def _present(self) -> Backward:
        """The backward that runs now."""
        at = number()
        if self.now is None or self.now.number != at:
            self.clean_up()
            window = self.window if self.window.counted else present()
            self.now = Backward(at, partial(self._reduce, window), bounded=self.scatter)
            at_the_end(partial(self._finish, self.now, window))
        return self.now

    def _enter(self, one: Pass) -> None:
        now = self._present()
        first = not now.passes
        segment = one.segment
        if now.enter(one) and segment.buffers:
            segment.gather()
            segment.show()
            order = [s for s in reversed(self.order) if s is segment or s not in now.passes]
            if first:  # often the root's, whose forward began first
                order = [segment, *[s for s in order if s is not segment]]
            self._ahead(segment, order)

    def _leave(self, one: Pass) -> None:
        now = self._present()
        if one.segment in now.passes:
            for started in now.leave(one.segment):
                self._free(now, started)
            self._free(now, one.segment)

    def _arrived(self, segment: Segment, leaf: int, _: Tensor) -> None:
        now = self._present()
        for started in now.arrived(segment, leaf):
            self._free(now, started)
        self._free(now, segment)

    def _free(self, now: Backward, segment: Segment) -> None:
        if segment.shown and not segment.busy and now.done_with(segment):
            segment.free()

    def _reduce(self, window: Window, segment: Segment) -> list[Steps]:
        if window.reduce == "none" and not window.last:
            return []
        return reductions(segment.twins, scatter=self.scatter, last=window.last, dtype=self.wire)

    def _finish(self, now: Backward, window: Window) -> None:
        if self.now is not now:
            return
        try:
            now.finish()
            self.sums.after(now, window)
        finally:
            self.now = None
            for segment in self.segments:
                if not segment.busy and (
                    segment.shown or segment in now.passes or not segment.whole
                ):
                    segment.free()
            for twin in [t for s in now.passes for t in s.twins if t.hooks]:
                twin.tell()

    def clean_up(self) -> None:
        """After a backward that ended with an error."""
        if self.now is not None:
            now, self.now = self.now, None
            now.abandon()
            for segment in now.passes:
                segment.free()
                for twin in segment.twins:
                    twin.drop()

    def forget(self, params: set[int]) -> None:
        """Drop what the twins of these parameters (by id) have collected. With all, the
        accumulation begins anew."""
        kept = False
        for twin in [t for s in self.segments for t in s.twins]:
            if id(twin.held) not in params:
                kept = kept or twin.held.requires_grad
            elif twin.apart:
                twin.drop()
        if not kept:
            self.sums.begin_anew()


def _share(segments: Sequence[Segment]) -> None:
    """Each module to the innermost module of a segment around it."""
    own: dict[nn.Module, tuple[Segment, nn.Module]] = {}
    trees = [
        (list(module.modules()), (segment, module))
        for segment in segments
        for module in segment.modules
    ]
    for members, around in sorted(trees, key=lambda tree: -len(tree[0])):
        own.update(dict.fromkeys(members, around))
    for inner, (segment, module) in own.items():
        segment.tables.setdefault(module, []).append(inner.__dict__)


def _engines() -> list[Engine]:
    found = [made() for made in _ENGINES]
    if None in found:
        _ENGINES[:] = [made for made in _ENGINES if made() is not None]
    return [engine for engine in found if engine is not None]


def flush(params: Sequence[Any]) -> None:
    """Before the gradients of ``params`` are read: what other tensors hold of them is reduced."""
    for engine in _engines():
        if engine.sums and not engine.held.isdisjoint(map(id, params)):
            engine.sums.flush()


def forget(params: Sequence[Any]) -> None:
    """Before the gradients of ``params`` are dropped: what other tensors hold of them is too."""
    for engine in _engines():
        if engine.sums:
            engine.forget(set(map(id, params)))


def clean_up() -> None:
    for engine in _engines():
        engine.clean_up()


AFTER_FAILURE.append(clean_up)
BEFORE_SYNC.append(flush)
BEFORE_ZERO.append(forget)
