"""A segment: the parameters of some modules that are gathered and reduced together.

There is one all-gather for each dtype and shard axis. At stage 3 it precedes each use, and the
unsharded parameters are freed afterwards (see ``disttensor.fsdp.states``). Off the mesh nothing is
gathered: the modules show metadata of unsharded parameters, as their layouts decide the layouts of
results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from disttensor.autograd.accumulation import ONLY, BackwardContext
from disttensor.fsdp.all_gather_buffer import AllGatherBuffer
from disttensor.fsdp.graph_hooks import SegmentForward
from disttensor.fsdp.param import FSDPParam
from disttensor.fsdp.states import ForwardState, Pin, SegmentBackward, ShardState
from disttensor.off_mesh import execute
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.grad_slot import grad_slot
from disttensor.torch_private import storage_id

Tensor = torch.Tensor


@dataclass
class SegmentOptions:
    """The settings that methods of ``FSDPModule`` change.

    context           of all backwards, in addition to the context of ``accumulate``.
    most_reductions   reductions to shards under way at once: each holds the gradients of a segment.
    forward_prefetch, backward_prefetch
                      the segments to gather ahead; None: by the order of the last forward.
    divide_by         the number by which gradients are divided.
    all_reduce_hook   the user's function that changes complete gradients in place.
    changes           True if leaves have hooks for the two.
    reduce_scatter    the user's collective.
    unshard_in_backward
                      False: the backward needs no unsharded parameter.
    """

    context: BackwardContext = ONLY
    keep_after_backward: bool = False
    most_reductions: int = 2
    forward_prefetch: list[Segment] | None = None
    backward_prefetch: list[Segment] | None = None
    divide_by: float | None = None
    all_reduce_hook: Callable[[Tensor], Any] | None = None
    changes: bool = False
    reduce_scatter: Any = None
    unshard_in_backward: bool = True


class Segment:
    """The parameters of some modules.

    modules             modules whose forward uses the parameters.
    persist             True if gathered parameters stay until they change (stages 1 and 2, or
                        modules on several meshes).
    free_after_forward  True if they are freed after the forward, and gathered for the backward.
    uses_memory_pool    True if freed memory returns to a pool, for the next segment.
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], params: Sequence[FSDPParam], *,
        persist: bool, free_after_forward: bool, uses_memory_pool: bool,
    ) -> None:  # fmt: skip
        self.name, self.modules, self.params = name, tuple(modules), tuple(params)
        self.persist, self.free_after_forward = persist, free_after_forward
        self.uses_memory_pool = uses_memory_pool
        # Parameters whose unsharded tensor is a copy of its own: they are sharded, or cast.
        self.copied = [p for p in params if p.spec is not p.sharded_param.spec]
        self.is_on_mesh = params[0].sharded_param.is_initialized
        self.state = ShardState.SHARDED
        self.pins: set[object] = set()  # a Pin, or an ``unshard`` context: why it stays gathered
        self.options = SegmentOptions()
        kinds: dict[Any, list[FSDPParam]] = {}
        for param in self.copied:
            if self.is_on_mesh:
                kinds.setdefault((param.spec.dtype, param.axis), []).append(param)
            else:
                param.set_unsharded(
                    execute.off_mesh_leaf(param.spec, param.sharded_param.requires_grad)
                )
        self.buffers: list[AllGatherBuffer] = []
        for (dtype, axis), members in kinds.items():
            mesh = members[0].spec.mesh
            group = None if axis is None else mesh.group((axis,), "gather")
            self.buffers.append(
                AllGatherBuffer(members, dtype, group, uses_memory_pool=uses_memory_pool)
            )
        bucket = object()
        for param in params:
            grad_slot(param.sharded_param).bucket = bucket
        self.index = 0  # among the segments of the module
        self.position = 0  # in the order in which forwards begin
        self.forward: SegmentForward  # set by the engine
        self.engine: Any  # a weak reference to the engine
        self.leaves: list[str] = []  # the parameter of each leaf that collects gradients
        self.last = SegmentBackward()  # in the last backward

    def __deepcopy__(self, memo: dict[int, Any]) -> Segment:
        """Returns a segment of copies of its modules, not gathered."""
        new = memo[id(self)] = Segment.__new__(Segment)
        new.__init__(  # type: ignore[misc]
            self.name,
            deepcopy(self.modules, memo),
            deepcopy(self.params, memo),
            persist=self.persist,
            free_after_forward=self.free_after_forward,
            uses_memory_pool=self.uses_memory_pool,
        )
        for copied, buffer in zip(new.buffers, self.buffers, strict=True):
            copied.custom = buffer.custom
        fields = ("forward_prefetch", "backward_prefetch")
        new.options = replace(
            self.options, **{f: deepcopy(getattr(self.options, f), memo) for f in fields}
        )
        for param in new.params:
            param.all_reduce_hook = self.options.all_reduce_hook
        return new

    def change_gradients(self, **options: Any) -> None:
        """Sets options that change the gradients of all later backwards."""
        before, self.options = self.options, replace(self.options, changes=True, **options)
        for param in self.params:
            param.all_reduce_hook = self.options.all_reduce_hook
            for leaf in [] if before.changes else param.hooked_leaves():
                self.add_change(param, leaf)

    def add_change(self, param: FSDPParam, leaf: Tensor) -> None:
        is_complete, requires_grad = leaf is param.sharded_param.local, leaf.requires_grad
        leaf.requires_grad_()  # it may be frozen since
        leaf.register_hook(partial(_change, weakref.ref(self), is_complete))
        leaf.requires_grad_(requires_grad)

    @property
    def is_visible(self) -> bool:
        return self.state is ShardState.VISIBLE

    @property
    def busy(self) -> bool:
        """True if a forward of it is on the stack, or between two of its modules."""
        return self.forward.state is not ForwardState.IDLE

    def start_gather(self) -> None:
        """Starts the all-gather, unless the memory holds the present values."""
        if self.state is ShardState.GATHERED:  # values that persist may be out of date
            old = [buffer for buffer in self.buffers if not buffer.is_current()]
            for buffer in old:
                buffer.is_gathered = False
                self.pins.discard(Pin.GRAPH)
                self.state = ShardState.SHARDED
        if self.state is ShardState.SHARDED:
            for buffer in self.buffers:
                buffer.start()
            self.state = ShardState.GATHERING

    def finish_gather(self) -> None:
        """Waits until the unsharded parameters have their values; starts the gather if needed."""
        self.start_gather()
        if self.state is ShardState.GATHERING:
            for buffer in self.buffers:
                buffer.finish()
            self.state = ShardState.GATHERED

    def shares_memory(self, x: Tensor) -> bool:
        """Returns True if x shares memory with a parameter that is freed between uses."""
        if self.persist or type(x) is not DistTensor:
            return False
        at = storage_id(x.local.untyped_storage())
        return any(storage_id(b.memory.untyped_storage()) == at for b in self.buffers)

    def show_params(self) -> None:
        """Makes the modules hold the unsharded parameters."""
        if not self.is_visible:
            self.state = ShardState.VISIBLE
            for param in self.copied:
                param.show_unsharded()

    def hide_params(self) -> None:
        """Makes the modules hold the sharded parameters."""
        if self.is_visible:
            self.state = ShardState.GATHERED
            for param in self.copied:
                param.show_sharded()

    @contextmanager
    def shown_params(self) -> Iterator[None]:
        """Shows the unsharded parameters in its block."""
        was_visible = self.is_visible
        self.show_params()
        try:
            yield
        finally:
            if not was_visible:
                self.hide_params()

    def free(self, always: bool = False) -> None:
        """Hides the parameters and frees their memory, unless it persists. Memory with a pin is
        freed only with ``always``."""
        self.hide_params()
        if not self.persist and (always or not self.pins):
            for buffer in self.buffers:
                buffer.free()
            self.state = ShardState.SHARDED

    def end_backward(self) -> None:
        if self.options.keep_after_backward:
            self.hide_params()
        else:
            self.free()


def _change(segment: weakref.ref[Segment], is_complete: bool, grad: Tensor) -> Tensor | None:
    # Weak: the garbage collector does not see hooks of autograd.
    of = segment()
    if of is None:
        return None
    grad = grad if of.options.divide_by is None else grad / of.options.divide_by
    if is_complete and of.options.all_reduce_hook is not None:
        grad = grad.clone()
        of.options.all_reduce_hook(grad)
    return grad
