"""The methods of torch's FSDPModule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from disttensor.autograd.accumulation import BackwardContext
from disttensor.checks import (
    argument_error,
    check_bool,
    check_callable,
    check_int,
    check_positive,
    check_sequence,
)
from disttensor.fsdp.engine import ENGINE, SEGMENTS
from disttensor.fsdp.segment import Segment


class FSDPModule:
    """Base class of a module that ``dt.fully_shard`` or ``dt.replicate`` returned.

    The methods have the names and the meaning that they have in torch. They apply to the parameters
    of this call; with ``recurse`` also to calls for inner modules. All ranks make the same calls.

    >>> model = dt.fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 2)), mesh=mesh)
    >>> isinstance(model, dt.fsdp.FSDPModule)
    True
    >>> model.set_gradient_divide_factor(2.0)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> model[0].bias.grad.tolist()
    [1.5, 1.5]
    """

    __slots__ = ()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters for the next forward. The module still shows its shards.

        ``async_op``: only starts to gather, and returns a handle with ``wait()``.
        """
        check_bool("unshard: async_op", async_op)
        handle = UnshardHandle(_segments(self))
        for segment in handle.segments:
            segment.start_gather()
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the gathered parameters."""
        for segment in _segments(self):
            if not segment.is_visible and not segment.busy:
                segment.free()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: backwards send nothing, and gradients add up, until it is True again, or an
        optimizer reads them. ``dt.accumulate`` does the same in a context."""
        check_bool("set_requires_gradient_sync: requires_gradient_sync", requires_gradient_sync)
        how = BackwardContext(
            requires_gradient_sync, "scatter" if requires_gradient_sync else "none"
        )
        for segment in _segments(self, recurse):
            segment.options.context = how

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backwards reduce to shards only, and not over replicas."""
        check_bool("set_requires_all_reduce: requires_all_reduce", requires_all_reduce)
        for segment in _segments(self, recurse):
            if segment.options.context.reduce == "scatter":
                segment.options.context = BackwardContext(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Changes nothing: each backward waits for its reductions before it ends."""
        check_bool("set_is_last_backward: is_last_backward", is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """False: parameters stay gathered from the forward to the backward."""
        check_bool("set_reshard_after_forward: reshard_after_forward", reshard_after_forward)
        for segment in _segments(self, recurse):
            segment.free_after_forward = reshard_after_forward and not segment.persist

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """False: parameters stay gathered after the backward, until they change."""
        check_bool("set_reshard_after_backward: reshard_after_backward", reshard_after_backward)
        for segment in _segments(self, recurse):
            segment.options.keep_after_backward = not reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gathers these FSDPModules when a forward has gathered this one. An empty list: none."""
        chosen = _chosen("set_modules_to_forward_prefetch", modules)
        for segment in _segments(self)[-1:]:
            segment.options.forward_prefetch = chosen

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gathers these FSDPModules when a backward has gathered this one. An empty list: none."""
        chosen = _chosen("set_modules_to_backward_prefetch", modules)
        for segment in _segments(self)[:1]:
            segment.options.backward_prefetch = chosen

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides gradients by ``factor``. The default divides by nothing, because there is one
        global loss; torch divides by the number of ranks, because each rank has a loss there."""
        check_positive("set_gradient_divide_factor: factor", factor, "a positive number")
        for segment in _segments(self):
            segment.change_gradients(divide_by=float(factor))

    def set_all_reduce_hook(self, hook: Callable[[Tensor], Any], *, stream: Any = None) -> None:
        """Calls ``hook`` with each complete gradient of this rank's shard of a parameter, before it
        is added to ``p.grad``; the hook may change it in place. In torch the gradients of all
        parameters are one flat tensor. All ranks set one. ``stream`` changes nothing: the hook runs
        in the stream of the reduction."""
        check_callable("set_all_reduce_hook: hook", hook, "a function of a tensor")
        for segment in _segments(self):
            segment.change_gradients(all_reduce_hook=hook)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backwards do not gather the parameters. For parameters whose values no backward
        needs, as of an embedding; a backward that reads them raises an error."""
        check_bool("set_unshard_in_backward: unshard_in_backward", unshard_in_backward)
        for segment in _segments(self):
            segment.options.unshard_in_backward = unshard_in_backward

    def reset_iter_state(self) -> None:
        """Drops what a forward or a backward that raised an error has left: gathered parameters,
        and gradients that are not reduced to shards of all ranks yet. Call it of the outermost
        module, on all ranks. Without it the next forward cleans up, and keeps such gradients of
        earlier micro-batches."""
        if ENGINE not in vars(self):
            raise RuntimeError(
                f"reset_iter_state of {type(self).__name__}: call it of the module of the last, "
                "outermost call of fully_shard"
            )
        vars(self)[ENGINE].reset()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Changes nothing: a rank without a gradient of a parameter sends zeros. If no rank has
        one, the gradient stays None."""
        who = "set_reduce_scatter_unused_params: reduce_scatter_unused_params"
        check_bool(who, reduce_scatter_unused_params)
        _segments(self, recurse)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Changes nothing: reductions have a communicator of their own."""
        check_bool("set_separate_reduce_scatter_group: enable", enable)
        _segments(self, recurse)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Changes nothing: a hint about the memory of buffers."""
        check_bool("set_allocate_memory_from_process_group_for_comm: enable", enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Changes nothing: a hint about the memory of buffers."""
        if backend != "NCCL":
            raise argument_error("set_symm_mem_for_comm: backend", backend, "'NCCL'", ValueError)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Changes nothing: all reductions of gradients are sums."""
        check_bool("set_force_sum_reduction_for_comms: enable", enable)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Sets how many reductions to shards run at once, each with its gradients. Default: 2."""
        who = "set_reduce_scatter_max_input_buffers: max_input_buffers"
        most = check_int(who, max_input_buffers, 1)
        for segment in _segments(self, recurse):
            segment.options.most_reductions = most

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers parameters by ``comm``, an ``AllGather`` of torch.distributed.fsdp."""
        _check_comm("set_custom_all_gather", comm)
        for buffer in [b for s in _segments(self) for b in s.buffers]:
            buffer.custom = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces gradients to shards by ``comm``, a ``ReduceScatter`` of torch.distributed.fsdp.
        It has to add, and gets one more number for each parameter."""
        _check_comm("set_custom_reduce_scatter", comm)
        for segment in _segments(self):
            segment.options.reduce_scatter = comm

    def set_post_optim_event(self, event: Any) -> None:
        """Makes the current stream wait for ``event``, so that parameters are gathered after it."""
        if not callable(getattr(event, "wait", None)):
            raise argument_error("set_post_optim_event: event", event, "an event of torch")
        event.wait()


class UnshardHandle:
    """Waits for the parameters that ``FSDPModule.unshard`` gathers."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments

    def wait(self) -> None:
        for segment in self.segments:
            segment.finish_gather()


def as_fsdp_module(module: nn.Module) -> nn.Module:
    """Adds ``FSDPModule`` to the bases of its class. The class keeps its name, which libraries
    write to files; its own methods go before ours."""
    kind = type(module)
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    module.__class__ = type(kind.__name__, (kind, FSDPModule), names)
    return module


def _segments(module: Any, recurse: bool = False) -> list[Segment]:
    """Returns the segments of this rank of the calls for ``module``, and for the modules in it."""
    if SEGMENTS not in vars(module):
        raise RuntimeError(
            f"{type(module).__name__} was made from a module that fully_shard returned, and is not "
            "sharded itself: call this method of the module that fully_shard returned"
        )
    check_bool(f"{type(module).__name__}: recurse", recurse)
    modules = module.modules() if recurse else [module]
    return [s for m in modules for s in vars(m).get(SEGMENTS, ()) if s.is_on_mesh]


def _chosen(who: str, modules: Any) -> list[Segment]:
    expected = "a list of modules that fully_shard returned"
    found = check_sequence(f"{who}: modules", modules, expected)
    if not all(isinstance(m, FSDPModule) for m in found):
        raise argument_error(f"{who}: modules", modules, expected)
    return [s for m in found for s in _segments(m)]


def _check_comm(who: str, comm: Any) -> None:
    if not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise argument_error(
            f"{who}: comm", comm, "a callable with allocate(size, dtype=, device=)"
        )
