"""The engine of one module: hooks around the forwards and backwards of its segments.

    before a forward      gather the segment, show its unsharded parameters, start the next
                          all-gather
    after it              show the sharded ones again, free the memory
    before its backward   gather the segment, start the next all-gather in the opposite order
    after its backward    free the memory, reduce the gradients

The order of the last forward predicts the next segment. ``disttensor.fsdp.states`` lists the states
of a segment.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from disttensor import callbacks
from disttensor.autograd.accumulation import RETURNED, BackwardContext, current_context
from disttensor.autograd.activation_checkpoint import current_run, recompute_around
from disttensor.autograd.joined_backward import run_after_backward, run_after_failure, this_backward
from disttensor.autograd.split_backward import compute_weight_now
from disttensor.comm import buffers
from disttensor.comm.compare_values import is_due
from disttensor.fsdp import graph_hooks
from disttensor.fsdp.backward import ReduceOrder
from disttensor.fsdp.own_arguments import RefuseOwn, compare_arguments
from disttensor.fsdp.param import FSDPParam, is_borrowed
from disttensor.fsdp.segment import Segment
from disttensor.fsdp.states import Pin, ReduceState, ShardState
from disttensor.fsdp.unseen import outside_user_modes
from disttensor.gradients.memory import GradMemory, grad_memory_of
from disttensor.gradients.reduce import Reduction, accumulate_in_graph, make_groups, reductions
from disttensor.observe import observers
from disttensor.pytree import find_tensors, replace_tensors
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.uses import forget_derivation, leaves_of
from disttensor.torch_private import current_backward

Tensor = torch.Tensor

ENGINE = "_data_parallel"  # the attribute of a module that holds its Engine
SEGMENTS = "_segments"  # the attribute of a module that holds the segments that its call made
# By id, in order of creation, which all ranks share
_ENGINES: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()


class Engine:
    """Runs the all-gathers and gradient reductions of the segments of one module, from hooks.

    scatter   gradients are reduced to shards (stages 2 and 3)
    prefetch  how many segments are gathered ahead of their use
    """

    def __init__(self, segments: Sequence[Segment], *, scatter: bool, prefetch: int) -> None:
        self.all = list(segments)
        self.segments = [s for s in segments if s.is_on_mesh]
        self.off_mesh = [s for s in segments if not s.is_on_mesh and s.copied]
        self.scatter, self.prefetch = scatter, prefetch
        self.context: BackwardContext | None = None  # see ``accumulate``
        self.handles: list[Any] = []
        self.refusal: RefuseOwn | None = None  # while a forward runs with a batch of its own
        self.calls = 0  # forwards of the root that are on the stack, without recomputations
        self.all_calls = 0
        self.epoch = 0  # number of forwards of the root so far
        self.order: dict[Segment, None] = {}  # in the order of their forwards in this epoch
        self.last_order: list[Segment] = []  # the same for the previous epoch
        self.backward: ReduceOrder | None = None
        self.param_ids = {id(p.sharded_param) for s in segments for p in s.params}
        _ENGINES[id(self)] = self
        if _follow_start not in callbacks.before_start:  # only now: it slows each backward
            callbacks.before_start.append(_follow_start)
        weakref.finalize(self, buffers.clear).atexit = False
        self.uncopied = [s for s in self.segments if not s.copied]  # nothing to gather
        for position, segment in enumerate(self.uncopied):
            segment.position = position
        for index, segment in enumerate(self.all):
            segment.index = index
            plan, enter, leave = [
                partial(f, segment) for f in (self._plan, self._enter, self._leave)
            ]
            segment.forward = graph_hooks.SegmentForward(plan, enter, leave)
            segment.engine = weakref.ref(self)

    def add_hooks(self, root: nn.Module) -> None:
        self.root = weakref.ref(root)
        add = self.handles.append
        for segment in [s for s in self.segments if s.copied]:
            for module in segment.modules:
                is_read = is_borrowed(segment.copied, module)
                if is_read:
                    begin = partial(self._begin_forward, segment)
                    add(module.register_forward_pre_hook(begin, prepend=True))
                begin = partial(self._module_begins, segment, is_read)
                add(module.register_forward_pre_hook(begin))
                end = partial(self._module_ends, segment)
                add(module.register_forward_hook(end, always_call=True))
        for segment in self.off_mesh:
            begin, end = [partial(f, segment) for f in (self._begin_off_mesh, self._end_off_mesh)]
            for hook in (begin, end):  # a module with this hook can be skipped
                hook.harmless = True  # type: ignore[attr-defined]
            for module in segment.modules:
                is_read = is_borrowed(segment.copied, module)
                add(module.register_forward_pre_hook(begin, prepend=is_read))
                add(module.register_forward_hook(end, always_call=True))
        begins = self._begin_call
        add(root.register_forward_pre_hook(begins, prepend=True, with_kwargs=True))
        add(root.register_forward_hook(self._end_call, always_call=True))

    def release(self) -> list[Segment]:
        """Removes the hooks, and returns the segments, for the engine of a module around."""
        self.clean_up()
        self.flush()
        for handle in self.handles:
            handle.remove()
        for segment in self.all:
            if self.root() in segment.modules:  # it is now a segment in a root
                segment.free_after_forward = segment.uses_memory_pool
        return self.all

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """Returns an engine for the copies of its modules, whose hooks are copied with them."""
        root = self.root()
        if id(root) not in memo:
            raise RuntimeError(
                "copy.deepcopy copies a part of a module under shard_data_parallel, and segments "
                "belong to the root module. Copy the module that was given to shard_data_parallel, "
                "or shard each part in a call of its own"
            )
        if self.backward is not None or any(s.is_visible or s.busy for s in self.all):
            raise RuntimeError(
                "copy.deepcopy copies a module under shard_data_parallel during its forward or "
                "backward, while its parameters are unsharded. Copy it between steps"
            )
        new = memo[id(self)] = Engine.__new__(Engine)
        new.__init__(  # type: ignore[misc]
            deepcopy(self.all, memo), scatter=self.scatter, prefetch=self.prefetch
        )
        new.root = weakref.ref(memo[id(root)])
        new.handles = deepcopy(self.handles, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a module under shard_data_parallel cannot be pickled: its hooks belong to its own "
            "parameters. Save the values: module.state_dict()"
        )

    def params(self) -> list[FSDPParam]:
        return [p for s in self.all for p in s.params]

    # Forward --------------------------------------------------------------------------------------

    @outside_user_modes
    def _root_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_backward() == -1:
            if self.all_calls or any(s.forward.running or s.is_visible for s in self.all):
                self._drop_forwards(module)
            self.clean_up()
            self.calls += 1
            self.epoch += 1
            self.last_order, self.order = list(self.order) or self.last_order, {}
        self.all_calls += 1

    def _begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begins a call of the root. At some of them the ranks compare the arguments."""
        self._root_begins(module, args, kwargs)
        if self.calls != 1 or current_backward() != -1 or not is_due(self.epoch):
            return
        meshes = {p.sharded_param.spec.mesh for s in self.segments for p in s.params}
        mesh = meshes.pop() if len(meshes) == 1 else None
        if mesh is not None and mesh.size > 1:
            who, group = f"the call of {type(module).__name__}", mesh.group(range(mesh.ndim))
            self.refusal = compare_arguments(who, (args, kwargs), group)
            if self.refusal is not None:
                self.refusal.__enter__()

    def _end_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.refusal is not None and self.calls <= 1:
            self.refusal.__exit__(None, None, None)
            self.refusal = None
        self._root_ends(module, args, output)

    @outside_user_modes
    def _module_begins(self, segment: Segment, is_read: bool, module: nn.Module, args: Any) -> None:
        is_recompute = current_backward() != -1  # of a checkpointed region
        if segment.forward.running and not self.calls and not is_recompute:
            self._drop_forwards(module)
        if not is_read:
            self._begin_forward(segment, module, args)

    @outside_user_modes
    def _begin_forward(self, segment: Segment, module: nn.Module, args: Any) -> None:
        """Gathers and shows the segment. Hooks that reshard a shared parameter to another stage run
        after this, because the parameter must be unsharded first. A schedule may switch to another
        micro-batch while this module waits for its arguments, so the forwards of a segment end at
        different times on different ranks."""
        if not segment.is_visible:
            is_recompute = current_backward() != -1
            if not is_recompute and segment not in self.order:
                segment.position = len(self.order)
                self.order[segment] = None
            segment.finish_gather()
            segment.show_params()
            if not is_recompute:
                self._prefetch(segment, self.last_order, segment.options.forward_prefetch)
        segment.forward.begin(module)
        callbacks.recompute_contexts()[segment] = lambda: nullcontext(self._show_again(segment))

    def _drop_forwards(self, begins: nn.Module | None = None) -> None:
        """Ends the forwards whose end hooks were not called, unless other forwards than the one
        that ``begins`` are on the stack."""
        running = [m for s in self.all for m in s.forward.running]
        if any(graph_hooks.calls_on_stack(m) != int(m is begins) for m in [self.root(), *running]):
            return
        self.calls = self.all_calls = 0
        for segment in self.all:
            segment.forward.drop()
            segment.pins.discard(Pin.BACKWARD)
            callbacks.recompute_contexts().pop(segment, None)
            if segment.is_visible:
                segment.free()

    @outside_user_modes
    def _module_ends(self, segment: Segment, module: nn.Module, args: Any, output: Any) -> Any:
        forward = segment.forward
        if not forward.end(module):
            return None
        if not forward.runs_here:
            callbacks.recompute_contexts().pop(segment, None)
        if current_backward() != -1:
            if torch.is_grad_enabled() and self._keep_to_the_end(segment):
                return None
            used = forward.running or Pin.BACKWARD in segment.pins
            entered = self.backward is None or segment in self.backward.entered
            if segment.free_after_forward and not used and not entered:
                segment.free()
            return None
        outputs = find_tensors(output, attributes=True)
        copied = any(map(segment.shares_memory, outputs))
        if copied:
            output = replace_tensors(
                output, lambda x: x.clone() if segment.shares_memory(x) else x, attributes=True
            )
            outputs = find_tensors(output, attributes=True)
        if segment.copied:
            graph_hooks.mark_results(outputs)
        forward.ran.add(module)
        for x in outputs if segment.buffers and not segment.persist else ():
            if isinstance(x, DistTensor):  # its aliases must not be made from freed memory
                forget_derivation(x)
        if forward.is_over(segment.modules, self.calls > 0):
            self._close(segment)
        return output if copied else None

    def _begin_off_mesh(self, segment: Segment, module: nn.Module, args: Any) -> None:
        segment.forward.begin(module)
        callbacks.recompute_contexts()[segment] = segment.shown_params
        segment.show_params()

    def _end_off_mesh(self, segment: Segment, module: nn.Module, args: Any, output: Any) -> None:
        segment.forward.end(module)
        segment.forward.ran.add(module)
        if not segment.forward.runs_here:
            callbacks.recompute_contexts().pop(segment, None)
        if segment.forward.is_over(segment.modules, self.all_calls > 0):
            segment.forward.close()
            segment.hide_params()

    @outside_user_modes
    def _root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.all_calls = max(self.all_calls - 1, 0)
        for segment in self.off_mesh:
            if not segment.forward.running:
                segment.forward.close()
                segment.hide_params()
        if current_backward() != -1:
            return
        self.calls = max(self.calls - 1, 0)
        if torch.is_grad_enabled() and self.uncopied:
            for x in find_tensors(output, attributes=True):
                graph_hooks.before_node(x, self._enter_uncopied)
            for segment in self.uncopied:
                self._hook_leaves(segment)
        for segment in self.segments:
            if segment.copied and not segment.forward.running:
                if segment.is_visible or segment.busy:
                    self._close(segment)
                elif segment.state is not ShardState.GATHERED:
                    segment.free()  # prefetched, and not used
                elif segment.persist:
                    self._hook_leaves(segment)  # a shared parameter may have a new use

    def _prefetch(
        self, segment: Segment, order: list[Segment], chosen: list[Segment] | None
    ) -> None:
        """Starts to gather the segments that follow this one in ``order``, or ``chosen`` ones."""
        if chosen is None and self.prefetch and segment in order:
            at = order.index(segment) + 1
            chosen = order[at : at + self.prefetch]
        for other in chosen or ():
            other.start_gather()

    def _close(self, segment: Segment) -> None:
        """Ends the forwards of this segment."""
        self._hook_leaves(segment)
        made_nodes = segment.forward.close()
        segment.hide_params()
        written = any(buffer.was_written() for buffer in segment.buffers)
        if written or segment.free_after_forward or not made_nodes:
            segment.free(written)
        if written:
            raise RuntimeError(
                f"shard_data_parallel: a forward of segment {segment.name!r} wrote to one of its "
                "parameters. The write is lost, because it went to a gathered copy. Write to "
                "parameters between forwards, or write to a buffer instead"
            )

    def _hook_leaves(self, segment: Segment) -> None:
        """Registers ``_record_gradient`` as a hook on new leaves."""
        for param in segment.params:
            new = param.new_leaves()
            if new:
                make_groups([param], scatter=self.scatter)
            for leaf in new:
                if segment.options.changes:
                    segment.add_change(param, leaf)
                if segment.copied:  # gathered for one backward, and freed at its end
                    compute_weight_now(leaf)
                at = len(segment.leaves)
                segment.leaves.append(param.name)
                # Weak: the garbage collector does not see hooks of autograd.
                memory = None if param.is_copy else grad_memory_of(param.sharded_param)
                hook = partial(_record_gradient, weakref.ref(segment), at, memory)
                leaf.register_post_accumulate_grad_hook(hook)

    # Backward -------------------------------------------------------------------------------------

    def _current_backward(self) -> ReduceOrder:
        """Returns the state of the running backward. Its first call makes the state, and registers
        what runs at the end of the backward."""
        id = this_backward()
        if self.backward is None or self.backward.id != id:
            self.clean_up()
            context = current_context()
            if context is not RETURNED and self.context is not None:
                last = self.context.is_last and context.is_last
                context = self.context._replace(is_last=last)
            reduce = partial(self._reduce, None if torch.is_grad_enabled() else context)
            self.backward = ReduceOrder(id, reduce, bounded=self.scatter)
            run_after_backward(partial(self._finish, self.backward, context))
            run_after_failure(clean_up)  # also for a backward that no DistTensor started
        return self.backward

    @outside_user_modes
    def _plan(self, segment: Segment) -> None:
        self._current_backward().plan(segment)

    @outside_user_modes
    def _enter(self, segment: Segment) -> None:
        backward = self._current_backward()
        first = not backward.entered
        backward.begin(segment)
        if segment.buffers:
            if segment.options.unshard_in_backward:
                segment.finish_gather()
                if backward.keeps_graph:
                    segment.pins.add(Pin.GRAPH)
                segment.show_params()

            def comes(s: Segment) -> bool:
                return s not in backward.entered and s.options.unshard_in_backward

            order = [s for s in reversed(self.order) if s is segment or comes(s)]
            if first:  # often the root's segment, whose forward began first
                order = [segment, *[s for s in order if s is not segment]]
            chosen = segment.options.backward_prefetch
            if chosen is not None:
                chosen = [s for s in chosen if comes(s)]
            self._prefetch(segment, order, chosen)

    @outside_user_modes
    def _show_again(self, segment: Segment) -> None:
        """Gathers and shows the segment before a region inside its modules is recomputed. The
        backward may not have entered the segment, whose results are on another stage. The end of
        the backward hides it."""
        self._current_backward()
        self._keep_to_the_end(segment)
        segment.finish_gather()
        segment.show_params()

    def _keep_to_the_end(self, segment: Segment) -> bool:
        """Keeps the segment gathered until the backward ends, and returns True, unless this code is
        a recomputation. Needed in the backward of a custom function, which differentiates results
        of the segment itself."""
        if recompute_around(current_run()) is not None:
            return False
        segment.pins.add(Pin.BACKWARD)
        return True

    def _enter_uncopied(self) -> None:
        for segment in self.uncopied:
            self._enter(segment)

    @outside_user_modes
    def _leave(self, segment: Segment) -> None:
        backward = self._current_backward()
        held = Pin.BACKWARD in segment.pins
        backward.leave(segment, launch=not held)
        is_over = not backward.of(segment).to_leave  # all nodes that need it have run
        if segment.is_visible and not segment.busy and not held and is_over:
            segment.end_backward()

    def _reduce(self, context: BackwardContext | None, segment: Segment) -> list[Reduction]:
        if context is not None:
            context = _join(context, segment.options.context)
        if context is None or (context.reduce != "scatter" and not context.is_last):
            return []
        return self._reductions(segment, context.is_last)

    def _reductions(self, segment: Segment, last: bool) -> list[Reduction]:
        custom = segment.options.reduce_scatter
        return reductions(segment.params, scatter=self.scatter, last=last, custom=custom)

    def _finish(self, backward: ReduceOrder, context: BackwardContext) -> None:
        if self.backward is backward:
            try:
                self._complete(backward, context)
            finally:
                self.run_hooks()

    @outside_user_modes
    def _complete(self, backward: ReduceOrder, context: BackwardContext) -> None:
        try:
            backward.finish()
            if context is not RETURNED:
                for segment in backward.in_order() if backward.keeps_graph else ():
                    last = _join(context, segment.options.context).is_last
                    accumulate_in_graph(segment.params, last=last)
                self._record(backward, context)
        finally:
            self._end(backward)

    def _record(self, backward: ReduceOrder, context: BackwardContext) -> None:
        """Records what the backward has reached, and defers reductions to the last micro-batch.
        Micro-batches may reach different parameters: the last backward may not enter all deferred
        segments."""
        for segment, one in backward.entered.items():
            is_last = _join(context, segment.options.context).is_last
            one.state = ReduceState.DONE if is_last else ReduceState.DEFERRED
            segment.last = one
            for param in segment.copied:
                if param.collects and not is_last:
                    param.collect()

    def _end(self, backward: ReduceOrder) -> None:
        self.backward = None
        for segment in self.segments:
            segment.pins.discard(Pin.BACKWARD)
            is_unused = segment.state is not ShardState.GATHERED
            if not segment.busy and (segment in backward.entered or is_unused):
                segment.end_backward()

    def flush(self) -> None:
        """Reduces the deferred segments, in one order on all ranks, when an accumulation ends or
        gradients are about to be read. Calls the hooks of their parameters."""
        self._reduce_deferred()
        self.run_hooks()

    @outside_user_modes
    def _reduce_deferred(self) -> None:
        for segment in self.deferred():
            for steps in self._reductions(segment, last=True):
                for work in steps:
                    work.wait()
            segment.last.state = ReduceState.DONE

    def deferred(self) -> list[Segment]:
        """Returns the segments whose gradients wait for the last micro-batch."""
        return [s for s in self.segments if s.last.state is ReduceState.DEFERRED]

    def reset(self) -> None:
        """Drops what a forward or a backward that failed has left, and unreduced gradients."""
        self.clean_up()
        self._drop_forwards()
        for segment in self.segments:
            for param in segment.params:
                param.drop()
                for axes, leaf in leaves_of(param.sharded_param):
                    leaf.grad = None if axes else leaf.grad
            if not segment.busy:
                segment.free(always=True)
            segment.last.state = ReduceState.DONE

    def run_hooks(self) -> None:
        params = [p for s in self.segments for p in s.params]
        for param in [p for p in params if p.pop_accumulated()]:
            for hook in list(param.hooks.values()):
                hook(param.sharded_param)

    def clean_up(self) -> None:
        """Resets the state after a backward that ended with an error."""
        if self.backward is not None:
            backward = self.backward
            backward.drain()
            if any(s.forward.running for s in self.segments):  # of a recomputed region
                self._drop_forwards()
            self._end(backward)
            # Deferred gradients of earlier micro-batches stay, as in torch.
            entered = [s for s in backward.entered if s.last.state is not ReduceState.DEFERRED]
            for param in [p for s in entered for p in s.params]:
                param.drop()


def _join(one: BackwardContext, other: BackwardContext) -> BackwardContext:
    reduce = "none" if "none" in (one.reduce, other.reduce) else one.reduce
    return BackwardContext(one.is_last and other.is_last, reduce)


@outside_user_modes
def _record_gradient(
    segment: weakref.ref[Segment], number: int, memory: GradMemory | None, leaf: Tensor
) -> None:
    if memory is not None:
        memory.adopt_grad(leaf)
    of = segment()
    owner = None if of is None else of.engine()
    if owner is not None and of is not None:
        for o in observers:
            o.accumulate_grad(of.params)
        owner._current_backward().record_gradient(of, number)


# For all engines: called before gradients are read or dropped -------------------------------------


def engines() -> list[Engine]:
    return list(_ENGINES.values())


def flush(params: Sequence[Any]) -> None:
    """Reduces the deferred gradients of ``params`` before they are read."""
    for engine in engines():
        if engine.deferred() and not engine.param_ids.isdisjoint(map(id, params)):
            engine.flush()


@outside_user_modes
def _follow_start(node: Any) -> None:
    """Registers the hooks of segments in the graph of a call of autograd that may have started at
    ``node``."""
    copied = [s.forward for engine in engines() for s in engine.segments if s.copied]
    if copied:
        graph_hooks.follow(node, copied)


def clean_up() -> None:
    """Resets all engines after a backward that ended with an error."""
    if current_backward() == -1:
        for engine in engines():
            engine.clean_up()


callbacks.after_backward_error.append(clean_up)
callbacks.before_grad_read.append(flush)
