"""The table of changes to torch, transformers and opt_einsum. The behaviour for regular tensors
does not change."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint as torch_checkpoint

from disttensor.autograd import starts
from disttensor.comm import failure_watch
from disttensor.nn import init
from disttensor.optim import grad_scaler, step_hooks
from disttensor.patches import (
    activation_checkpoint,
    autograd_function,
    backward_hooks,
    clip_grad,
    draws,
    refusals,
    state_dicts,
    tracers,
)
from disttensor.patches.change import Change, Make, Undo, append_to, join, once_imported, replace
from disttensor.random import counter
from disttensor.tensor import backward, gradient_edge
from disttensor.tensor.dist_tensor import DistTensor, rebuild
from disttensor.torch_private import (
    default_group,
    foreach_types,
    jit_tracers,
    set_generator_method,
    transform_ends,
)
from disttensor.trace import module_guard

_undo: dict[str, Undo] = {}


def _record_tracer(name: str) -> Make:
    """Returns a change that records when the tracer of this name runs."""
    owner, begin, end = transform_ends[name]
    return join(
        replace(tracers.wrap_begin(name), (owner, begin)), replace(tracers.wrap_end, (owner, end))
    )


def _allow_load() -> Undo:
    torch.serialization.add_safe_globals([rebuild])

    def undo() -> None:
        left = [known for known in torch.serialization.get_safe_globals() if known is not rebuild]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(left)

    return undo


def _register_backend() -> Undo:
    def change(dispatch: Any) -> Undo:
        dispatch._aliases["disttensor"] = "opt_einsum.backends.torch"
        return lambda: dispatch._aliases.pop("disttensor", None)

    return once_imported("opt_einsum.backends.dispatch", change)


def _report_failures() -> Undo:
    if default_group() is not None:
        failure_watch.watch()
    return failure_watch.unwatch


def _see_seeds() -> Undo:
    wraps = {
        "manual_seed": counter.wrap_generator_seed,
        "set_state": counter.wrap_generator_state,
    }
    before = {name: getattr(torch.Generator, name) for name in wraps}
    after = {name: wrap(before[name]) for name, wrap in wraps.items()}
    for name, method in after.items():
        set_generator_method(name, method)

    def undo() -> None:
        for name, method in after.items():
            if getattr(torch.Generator, name) is method:
                set_generator_method(name, before[name])

    return undo


def _guard_modules() -> Undo:
    module_guard.allow()
    return module_guard.unwrap_methods


_GRAPH = "torch.autograd.graph:"
_FSDP = "torch.distributed.fsdp."
_CHECKPOINT = "torch.distributed.checkpoint."
_STATE_DICTS = "torch.distributed._state_dict_utils:"
_NORM = "torch.nn.utils:get_total_norm", "torch.nn.utils.clip_grad:_get_total_norm"
_checkpoint_generator = (
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl"
    if hasattr(torch_checkpoint, "_checkpoint_without_reentrant_generator_impl")  # torch 2.14
    else "torch.utils.checkpoint:_checkpoint_without_reentrant_generator"
)

TABLE = (
    Change(
        "torch.autograd.Function.apply",
        "A custom function on a DistTensor would lose the gradient silently, because autograd's "
        "graph does not contain the wrapper. It runs on full local tensors instead.",
        "None: ``apply`` does not call __torch_function__.",
        replace(autograd_function.wrap_apply, "torch.autograd:Function.apply"),
    ),
    Change(
        "torch.autograd.backward, torch.autograd.grad",
        "A backward from a regular tensor would read parameters of fully_shard whose memory was "
        "freed after the forward. The nodes where it starts are marked. Edges of DistTensors stand "
        "for them.",
        "None: torch has no hook for the start of a backward.",
        replace(
            lambda original: backward.wrap_run_backward(starts.wrap_run_backward(original)),
            "torch.autograd:_engine_run_backward",
            _GRAPH + "_engine_run_backward",
        ),
    ),
    Change(
        "torch.autograd.graph: get_gradient_edge, register_multi_grad_hook",
        "The gradient of a tensor collects at several nodes, and torch would take one of them.",
        "None: torch reads the node without __torch_function__.",
        join(
            replace(gradient_edge.wrap_node_of, _GRAPH + "_get_grad_fn_or_grad_acc"),
            replace(gradient_edge.wrap_will_execute, "torch._C:_will_engine_execute_node"),
        ),
    ),
    Change(
        "torch.Tensor.data",
        "``regular.data = x`` of a DistTensor would set NaN. It raises an error instead.",
        "None: the setter calls __torch_function__ of the tensor that is set, not of the value.",
        refusals.set_data,
    ),
    Change(
        "torch.nn.parallel.DistributedDataParallel",
        "It would treat the pieces of DistTensors as replicas. It raises an error instead.",
        "None: it reads parameters in C++.",
        replace(refusals.data_parallel, "torch.nn.parallel:DistributedDataParallel.__init__"),
    ),
    Change(
        "torch.distributed.fsdp.fully_shard",
        "It would split the pieces of DistTensors again. It raises an error instead.",
        "None: it checks for the class DTensor.",
        replace(refusals.fully_shard, _FSDP + "_fully_shard._fully_shard:_validate_module"),
    ),
    Change(
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "As for fully_shard.",
        "As for fully_shard.",
        replace(
            refusals.data_parallel,
            _FSDP + "fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
        ),
    ),
    Change(
        "torch.nn.attention.flex_attention",
        "Dynamo would raise an error about the C code of this package. The error now says what to "
        "do.",
        "None: it does not call __torch_function__.",
        replace(refusals.flex_attention, "torch.nn.attention.flex_attention:_validate_sdpa_input"),
    ),
    Change(
        "torch.cuda.jiterator",
        "It would compute this rank's piece and return a regular tensor. It raises an error "
        "instead.",
        "None: it calls C++ without __torch_function__.",
        replace(refusals.jiterator, "torch.cuda.jiterator:_JittedFunction.__call__"),
    ),
    Change(
        "torch.nn.Module.register_full_backward_hook",
        "Its hooks belong to the node of a custom function, which would lose the gradient.",
        "None: torch.utils.hooks.BackwardHook does not call __torch_function__.",
        replace(
            backward_hooks.wrap_apply_on_tensors, "torch.utils.hooks:BackwardHook._apply_on_tensors"
        ),
    ),
    Change(
        "torch.nn.Module.register_backward_hook",
        "Its hooks would get gradients of this rank's pieces. It raises an error instead.",
        "None: torch reads the node of the result without __torch_function__.",
        replace(refusals.backward_hook, "torch.nn:Module._maybe_warn_non_full_backward_hook"),
    ),
    Change(
        "torch.utils.checkpoint.checkpoint",
        "A recomputed region would draw other random numbers than its forward, and its restored "
        "inputs would not require grad.",
        "``context_fn=`` of each call, see disttensor/patches/activation_checkpoint.py.",
        replace(activation_checkpoint.wrap_generator, _checkpoint_generator),
    ),
    Change(
        "torch.optim.Optimizer.step",
        "Pending gradients would be reduced one by one, and an optimizer could update parameters "
        "that the model has since replaced.",
        "The change uses it: register_optimizer_step_pre_hook.",
        lambda: register_optimizer_step_pre_hook(step_hooks.before_step).remove,
    ),
    Change(
        "torch.nn.utils.clip_grad_norm_",
        "The norm would contain only the parameters that have a gradient on this rank.",
        "None: torch calls no function for the parameters of other ranks.",
        replace(
            clip_grad.wrap_clip_grad_norm,
            "torch.nn.utils:clip_grad_norm_",
            "torch.nn.utils.clip_grad:clip_grad_norm_",
        ),
    ),
    Change(
        "torch.nn.utils.get_total_norm",
        "The norm of the gradients of one mesh would count as the norm of all gradients.",
        "None: the functions called inside it cannot know that the norm is for clipping.",
        replace(clip_grad.wrap_get_total_norm, *_NORM),
    ),
    Change(
        "torch.nn.utils.clip_grad_value_",
        "It raises an error on a rank whose parameters all lie on other ranks.",
        "None: without a gradient torch calls no function that can be overridden.",
        replace(
            clip_grad.wrap_clip_grad_value,
            "torch.nn.utils:clip_grad_value_",
            "torch.nn.utils.clip_grad:clip_grad_value_",
        ),
    ),
    Change(
        "torch.amp.GradScaler.unscale_",
        "Each rank would decide alone whether a step is skipped.",
        "A subclass of GradScaler, which every script would have to use.",
        replace(grad_scaler.wrap_unscale_grads, "torch.amp:GradScaler._unscale_grads_"),
    ),
    Change(
        "torch.nn.init.trunc_normal_",
        "It samples again while a number is out of bounds; a rank with an empty piece has no "
        "numbers to check.",
        "None: unlike five other functions of torch.nn.init, it does not call __torch_function__.",
        replace(init.wrap_trunc_normal, "torch.nn.init:_no_grad_trunc_normal_"),
    ),
    Change(
        "torch.nn.init.sparse_",
        "It draws the rows of zeros from torch's own generator, which differs between ranks.",
        "None: it does not call __torch_function__.",
        replace(init.wrap_sparse, "torch.nn.init:sparse_"),
    ),
    Change(
        "torch.distributions: sample, rsample",
        "Most draw regular tensors from torch's own generator, which differs between ranks.",
        "None: they do not call __torch_function__.",
        join(*[replace(draws.wrap_draws, place) for place in draws.SAMPLERS]),
    ),
    Change(
        "torch.nn.utils.prune.random_structured, torch.nn.utils.parametrizations.orthogonal",
        "As for torch.distributions.",
        "None: they do not call __torch_function__.",
        join(
            replace(draws.wrap_draws, "torch.nn.utils.prune:RandomStructured.compute_mask"),
            replace(draws.wrap_draws, "torch.nn.utils.parametrizations:_Orthogonal.right_inverse"),
        ),
    ),
    Change(
        "torch.get_rng_state, torch.set_rng_state",
        "The count of random calls would not be saved and restored with the state.",
        "None: a torch.Generator cannot hold the count.",
        join(
            *[
                replace(getattr(counter, f"wrap_{name}"), f"torch:{name}", f"torch.random:{name}")
                for name in ("get_rng_state", "set_rng_state")
            ]
        ),
    ),
    Change(
        "torch.Generator.manual_seed",
        "A seed given to the default generator, as by torch.manual_seed, would not reset the count "
        "of random calls. If it is the present seed, its state does not show that it was given. "
        "pipeline.run would not find the generators of the user (set_state is seen for it too).",
        "As for torch.get_rng_state.",
        _see_seeds,
    ),
    Change(
        "torch.optim: functions on lists",
        "Optimizers on a GPU would update the parameters one by one.",
        "``foreach=True`` for each optimizer. DTensor is in the same list.",
        append_to(foreach_types[0], DistTensor),
    ),
    Change(
        "torch.nn.utils: functions on lists",
        "Clipping would process the gradients one by one, with a message for each.",
        "``foreach=True`` for each call. DTensor is in the same list.",
        append_to(foreach_types[1], DistTensor),
    ),
    Change(
        "torch.load(weights_only=True)",
        "It refuses to load a DistTensor.",
        "The change uses it: torch.serialization.add_safe_globals.",
        _allow_load,
    ),
    Change(
        "torch.distributed.checkpoint: full_state_dict",
        "It would return pieces instead of full values, and copy full tensors of metadata.",
        "None: torch's iteration over a state dict checks for the class DTensor.",
        replace(state_dicts.wrap_iterate_state_dict, _STATE_DICTS + "_iterate_state_dict"),
    ),
    Change(
        "torch.distributed.checkpoint: broadcast_from_rank0",
        "Every rank would hold the full model until it is loaded.",
        "None, as for full_state_dict.",
        replace(state_dicts.wrap_broadcast_tensors, _STATE_DICTS + "_broadcast_tensors"),
    ),
    Change(
        "torch.distributed.checkpoint: async_save",
        "It would read the memory of a DistTensor, which raises an error.",
        "A stager, which would have to be passed to each call of async_save.",
        replace(
            state_dicts.wrap_offload_tensor,
            _CHECKPOINT + "_state_dict_stager:StateDictStager._offload_tensor",
        ),
    ),
    Change(
        "torch.distributed.checkpoint: optimizers of several stages",
        "A rank has no state and no names for the parameters of other stages.",
        "None: hooks of state_dict belong to one optimizer.",
        replace(state_dicts.wrap_state_dict_fn, _CHECKPOINT + "state_dict:_state_dict_fn"),
    ),
    Change(
        "transformers: save_pretrained",
        "Rank 0 would change the folder, and might wait for other ranks, before reading the "
        "memory of a DistTensor raises an error.",
        "None: it calls no function that can be overridden before it writes.",
        replace(
            refusals.save_pretrained, "transformers.modeling_utils:PreTrainedModel.save_pretrained"
        ),
    ),
    Change(
        "opt_einsum.contract",
        "It finds the backend by the module of the array's class, and would treat a DistTensor as "
        "a NumPy array. The result would be a NumPy array without a graph.",
        "``contract(..., backend='torch')`` in each call.",
        _register_backend,
    ),
    Change(
        "torch.nn.Module: attributes and hooks",
        "A change of a module would not be noticed if the module lies on another stage and its "
        "forward is skipped. Installed with the first such module.",
        "None: nn.Module has no hook for assignments.",
        _guard_modules,
    ),
    Change(
        "torch.nn.Module.load_state_dict(assign=True)",
        "Regular tensors would take the place of sharded parameters. They are sharded first.",
        "register_load_state_dict_pre_hook of each module that gets a DistTensor.",
        replace(state_dicts.wrap_load_own, "torch.nn:Module._load_from_state_dict"),
    ),
    Change(
        "torch.func, torch.autograd.forward_ad",
        "A transform would trace the local of a captured DistTensor, and tangents would not be "
        "communicated. The full tensor is gathered, or an error is raised.",
        "None: transforms do not call __torch_function__.",
        join(*[_record_tracer(what) for what in transform_ends if what != "make_fx"]),
    ),
    Change(
        "make_fx, torch.jit.trace",
        "The traced program would contain the locals of DistTensors as constants. It raises an "
        "error instead.",
        "None: tracers do not call __torch_function__.",
        join(
            _record_tracer("make_fx"),
            *[replace(tracers.wrap_tracer("torch.jit.trace"), place) for place in jit_tracers],
        ),
    ),
    Change(
        "torch.compile",
        "Dynamo would trace frames of this package and confuse closures that have the same code, "
        "with wrong results. It would also warn about the C code.",
        "torch.compiler.disable, which makes each call slower.",
        join(
            tracers.skip_our_frames,
            replace(tracers.wrap_warn_once, "torch._dynamo.utils:warn_once"),
        ),
    ),
    Change(
        "sys.excepthook",
        "A rank that waits for a failed rank could not say why it failed. Installed before the "
        "first collective.",
        "The error file of torch.distributed.elastic, which every script would have to enable.",
        _report_failures,
    ),
    Change(
        "torch.distributed.new_group",
        "Members would wait for each other under different names of the group. Changed only while "
        "a group is made.",
        "None: new_group has no argument for the name.",
        lambda: lambda: None,
    ),
)


def _select(names: tuple[str, ...]) -> list[Change]:
    known = [change.what for change in TABLE]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no change {name!r}; there are {', '.join(known)}")
    return [change for change in TABLE if not names or change.what in names]


def install(*names: str) -> None:
    """Makes the changes with these names in ``TABLE``, or all, that are not made yet."""
    for change in _select(names):
        if change.what not in _undo:
            _undo[change.what] = change.make()


def uninstall(*names: str) -> None:
    """Reverts the changes with these names, or all: torch gets its old attributes back.

    DistTensors are not safe without them: gradients may be lost or incomplete.
    """
    for change in reversed(_select(names)):
        undo = _undo.pop(change.what, None)
        if undo is not None:
            undo()
