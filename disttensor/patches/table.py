"""The table of changes to torch, transformers and opt_einsum. The behaviour for regular tensors
does not change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint as torch_checkpoint

from disttensor.comm import failure_watch
from disttensor.nn import init
from disttensor.optim import grad_scaler, step_hooks
from disttensor.patches import (
    autograd_function,
    backward_hooks,
    checkpoint,
    clip_grad,
    refusals,
    state_dicts,
    tracers,
)
from disttensor.patches.imports import once_imported
from disttensor.random import counter
from disttensor.tensor.dist_tensor import DistTensor, rebuild
from disttensor.torch_private import default_group, foreach_types, jit_tracers, transform_ends
from disttensor.trace import module_guard

Undo = Callable[[], None]

_undo: dict[str, Undo] = {}
_originals: dict[str, Any] = {}


@dataclass(frozen=True)
class Change:
    """what: a name in torch; why: the problem without the change; public: the public API, and why
    it is not enough; make: makes the change, and returns a function to undo it."""

    what: str
    why: str
    public: str
    make: Callable[[str], Undo]


def replaced(new: Callable[[Any], Any], *places: tuple[Any, str]) -> Callable[[str], Undo]:
    """Returns a change that puts ``new(original)`` at ``places``, which are names of one function.
    Undoing it keeps replacements that other code has made since."""

    def make(what: str) -> Undo:
        owner, name = places[0]
        before = _originals[what] = inspect.getattr_static(owner, name)
        after = new(before)
        for owner, name in places:
            setattr(owner, name, after)

        def undo() -> None:
            for owner, name in places:
                if inspect.getattr_static(owner, name) is after:
                    setattr(owner, name, before)

        return undo

    return make


def replaced_in(
    module: str, new: Callable[[Any], Any], name: str, owner: str | None = None
) -> Callable[[str], Undo]:
    """Returns ``replaced`` for a module, or its class ``owner``, applied when it is imported."""

    def make(what: str) -> Undo:
        def change(found: Any) -> Undo:
            return replaced(new, (getattr(found, owner) if owner else found, name))(what)

        return once_imported(module, change)

    return make


def entered(table: list[Any], item: Any) -> Callable[[str], Undo]:
    def make(what: str) -> Undo:
        table.append(item)
        return lambda: table.remove(item)

    return make


def together(*makes: Callable[[str], Undo]) -> Callable[[str], Undo]:
    """Joins several changes to one."""

    def make(what: str) -> Undo:
        undos = [one(what) for one in makes]

        def undo() -> None:
            for one in reversed(undos):
                one()

        return undo

    return make


def tracing(name: str) -> Callable[[str], Undo]:
    """Returns a change that records when the tracer of this name runs."""
    owner, begin, end = transform_ends[name]
    return together(
        replaced(tracers.entering(name), (owner, begin)), replaced(tracers.leaving, (owner, end))
    )


def _step_hook(what: str) -> Undo:
    handle = register_optimizer_step_pre_hook(step_hooks.before_step)
    return handle.remove


def _safe_to_load(what: str) -> Undo:
    torch.serialization.add_safe_globals([rebuild])

    def undo() -> None:
        left = [known for known in torch.serialization.get_safe_globals() if known is not rebuild]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(left)

    return undo


def _contract_with_torch(what: str) -> Undo:
    def change(dispatch: Any) -> Undo:
        dispatch._aliases["disttensor"] = "opt_einsum.backends.torch"
        return lambda: dispatch._aliases.pop("disttensor", None)

    return once_imported("opt_einsum.backends.dispatch", change)


def _tell_of_failures(what: str) -> Undo:
    if default_group() is not None:
        failure_watch.watch()
    return failure_watch.unwatch


def _guard_modules(what: str) -> Undo:
    module_guard.allow()
    return module_guard.unwrap_methods


_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_clip: Any = torch.nn.utils.clip_grad
_STATE_DICTS = "torch.distributed._state_dict_utils"
_checkpoint_generator = (
    "_checkpoint_without_reentrant_generator_impl"
    if hasattr(torch_checkpoint, "_checkpoint_without_reentrant_generator_impl")  # torch 2.14
    else "_checkpoint_without_reentrant_generator"
)

TABLE = (
    Change(
        "torch.autograd.Function.apply",
        "a custom function on a DistTensor loses the gradient without a word: the wrapper is in no "
        "graph. It runs on whole locals instead",
        "none: apply does not ask __torch_function__",
        replaced(autograd_function.on_whole_locals, (torch.autograd.Function, "apply")),
    ),
    Change(
        "torch.nn.parallel.DistributedDataParallel",
        "it takes the pieces of DistTensors for replicas. It raises instead",
        "none: it reads parameters from C++",
        replaced(refusals.data_parallel, (torch.nn.parallel.DistributedDataParallel, "__init__")),
    ),
    Change(
        "torch.distributed.fsdp.fully_shard",
        "it cuts the pieces of DistTensors again. It raises instead",
        "none: it asks for DTensor by name",
        replaced_in(_FULLY_SHARD, refusals.fully_shard, "_validate_module"),
    ),
    Change(
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "the same",
        "the same",
        replaced_in(_FSDP, refusals.data_parallel, "__init__", "FullyShardedDataParallel"),
    ),
    Change(
        "torch.nn.attention.flex_attention",
        "Dynamo's error for the C code of this package. It raises one that says what to do",
        "none: it does not ask __torch_function__",
        replaced_in(
            "torch.nn.attention.flex_attention", refusals.flex_attention, "_validate_sdpa_input"
        ),
    ),
    Change(
        "torch.cuda.jiterator",
        "it computes this rank's piece, and returns a regular tensor. It raises instead",
        "none: it goes to C++ unasked",
        replaced_in("torch.cuda.jiterator", refusals.jiterator, "__call__", "_JittedFunction"),
    ),
    Change(
        "torch.nn.Module.register_full_backward_hook",
        "the node whose hooks it calls is a custom function, which would lose the gradient",
        "none: torch.utils.hooks.BackwardHook asks nobody",
        replaced(
            backward_hooks.for_dist_tensors,
            (torch.utils.hooks.BackwardHook, "_apply_on_tensors"),
        ),
    ),
    Change(
        "torch.nn.Module.register_backward_hook",
        "its hooks would get gradients of this rank's pieces. It raises instead",
        "none: the node of the result is taken unasked",
        replaced(refusals.backward_hook, (torch.nn.Module, "_maybe_warn_non_full_backward_hook")),
    ),
    Change(
        "torch.utils.checkpoint.checkpoint",
        "a region draws other random numbers when it is computed again, and its inputs are brought "
        "back without their gradient",
        "context_fn= of each call: see disttensor/patches/checkpoint.py",
        replaced(checkpoint.for_dist_tensors, (torch_checkpoint, _checkpoint_generator)),
    ),
    Change(
        "torch.optim.Optimizer.step",
        "gradients that are still a sum of contributions would be reduced one by one, and "
        "parameters that the model no longer has would be changed in place of its own",
        "this is one: register_optimizer_step_pre_hook",
        _step_hook,
    ),
    Change(
        "torch.nn.utils.clip_grad_norm_",
        "the norm would be that of the parameters which have a gradient on this rank",
        "none: of other ranks' parameters torch calls nothing here",
        replaced(
            clip_grad.over_all_meshes,
            (torch.nn.utils, "clip_grad_norm_"),
            (_clip, "clip_grad_norm_"),
        ),
    ),
    Change(
        "torch.nn.utils.get_total_norm",
        "the norm of one mesh would be taken for that of the world",
        "none: the functions in it, which are asked, do not know what the norm is for",
        replaced(
            clip_grad.on_the_whole_world,
            (torch.nn.utils, "get_total_norm"),
            (_clip, "_get_total_norm"),
        ),
    ),
    Change(
        "torch.nn.utils.clip_grad_value_",
        "it raises on a rank whose parameters all lie elsewhere",
        "none: without a gradient torch calls nothing that is asked",
        replaced(
            clip_grad.where_gradients_are,
            (torch.nn.utils, "clip_grad_value_"),
            (_clip, "clip_grad_value_"),
        ),
    ),
    Change(
        "torch.amp.GradScaler.unscale_",
        "ranks would decide on their own whether a step is skipped",
        "a subclass of GradScaler, which a script has to name",
        replaced(grad_scaler.deciding_together, (torch.amp.GradScaler, "_unscale_grads_")),
    ),
    Change(
        "torch.nn.init.trunc_normal_",
        "it samples again while a number is out of bounds, and ranks without a piece see none",
        "torch.overrides, which five functions of nn.init ask; this is not one of them",
        replaced(init.by_position, (torch.nn.init, "_no_grad_trunc_normal_")),
    ),
    Change(
        "torch.nn.init.sparse_",
        "it draws the rows of zeros from torch's own generator, which differs between ranks",
        "torch.overrides: it does not ask",
        replaced(init.on_the_whole, (torch.nn.init, "sparse_")),
    ),
    Change(
        "torch.manual_seed, torch.get_rng_state, torch.set_rng_state",
        "the random numbers of DistTensors would go on after a seed, fork_rng or a state that is "
        "brought back",
        "none: a torch.Generator has no place for a count of ours",
        together(
            replaced(counter.seeding, (torch, "manual_seed"), (torch.random, "manual_seed")),
            replaced(counter.reading, (torch, "get_rng_state"), (torch.random, "get_rng_state")),
            replaced(counter.restoring, (torch, "set_rng_state"), (torch.random, "set_rng_state")),
        ),
    ),
    Change(
        "torch.optim: functions on lists",
        "optimizers on a GPU would go through the parameters one by one",
        "foreach=True for each optimizer; DTensor enters itself here too",
        entered(foreach_types[0], DistTensor),
    ),
    Change(
        "torch.nn.utils: functions on lists",
        "clipping would go through the gradients one by one, a message for each",
        "foreach=True for each call; DTensor enters itself here too",
        entered(foreach_types[1], DistTensor),
    ),
    Change(
        "torch.load(weights_only=True)",
        "it refuses a DistTensor",
        "this is one: torch.serialization.add_safe_globals",
        _safe_to_load,
    ),
    Change(
        "torch.distributed.checkpoint: full_state_dict",
        "values come back in pieces, and copies are made of the stand-ins of whole tensors",
        "none: torch's walk over a state dict knows DTensor by its name",
        replaced_in(_STATE_DICTS, state_dicts.iterating, "_iterate_state_dict"),
    ),
    Change(
        "torch.distributed.checkpoint: broadcast_from_rank0",
        "every rank would hold the whole model until it is loaded",
        "none: the same",
        replaced_in(_STATE_DICTS, state_dicts.broadcasting, "_broadcast_tensors"),
    ),
    Change(
        "torch.distributed.checkpoint: async_save",
        "it asks for the memory of one process, and refuses",
        "a stager, which each call of async_save has to be given",
        replaced_in(
            "torch.distributed.checkpoint._state_dict_stager",
            state_dicts.staging,
            "_offload_tensor",
            owner="StateDictStager",
        ),
    ),
    Change(
        "torch.distributed.checkpoint: optimizers of several stages",
        "a rank has no state, and no names, for the parameters of other stages",
        "none: hooks of state_dict are set for each optimizer",
        replaced_in(
            "torch.distributed.checkpoint.state_dict",
            state_dicts.known_everywhere,
            "_state_dict_fn",
        ),
    ),
    Change(
        "transformers: save_pretrained",
        "rank 0 changes the folder, and may wait for the others, before its memory is refused",
        "none: it asks nobody before it writes",
        replaced_in(
            "transformers.modeling_utils",
            refusals.save_pretrained,
            "save_pretrained",
            "PreTrainedModel",
        ),
    ),
    Change(
        "opt_einsum.contract",
        "it finds the backend by the module of the array's class, and takes a DistTensor for a "
        "NumPy array: the result is one, without a graph",
        "contract(..., backend='torch') of each call",
        _contract_with_torch,
    ),
    Change(
        "torch.nn.Module: attributes and hooks",
        "a module on another stage, whose forward is replayed, would not see that it was changed. "
        "From the first such module on",
        "none: nn.Module tells nobody of an assignment",
        _guard_modules,
    ),
    Change(
        "torch.func, torch.autograd.forward_ad",
        "transforms would follow the local of a captured DistTensor, and tangents are not "
        "communicated. The whole is gathered, or it raises",
        "none: they do not ask __torch_function__",
        together(*[tracing(what) for what in transform_ends if what != "make_fx"]),
    ),
    Change(
        "make_fx, torch.jit.trace",
        "what they trace takes the locals of DistTensors for constants. It raises instead",
        "none: they do not ask __torch_function__",
        together(
            tracing("make_fx"),
            *[replaced(tracers.within("torch.jit.trace"), place) for place in jit_tracers],
        ),
    ),
    Change(
        "torch.compile",
        "Dynamo compiles our frames and takes one closure for another: wrong numbers; and it warns "
        "that it cannot trace our C code, where it shall not",
        "torch.compiler.disable, which costs each call",
        together(
            tracers.run_by_python,
            replaced_in("torch._dynamo.utils", tracers.silent_on_ours, "warn_once"),
        ),
    ),
    Change(
        "sys.excepthook",
        "a rank that waits for one that failed cannot say why. From the first collective on",
        "torch.distributed.elastic's record, which a script has to name",
        _tell_of_failures,
    ),
    Change(
        "torch.distributed.new_group",
        "the members of a group would wait for each other under different names. While one is made",
        "none: new_group takes no name",
        lambda what: lambda: None,
    ),
)


def _chosen(names: tuple[str, ...]) -> list[Change]:
    known = [change.what for change in TABLE]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is none of the changes: {', '.join(known)}")
    return [change for change in TABLE if not names or change.what in names]


def install(*names: str) -> None:
    """Makes the changes with these names in ``TABLE``, or all, that are not made yet."""
    for change in _chosen(names):
        if change.what not in _undo:
            _undo[change.what] = change.make(change.what)


def uninstall(*names: str) -> None:
    """Reverts the changes with these names, or all: torch gets its old attributes back.

    DistTensors are not safe without them: gradients may be lost or incomplete.
    """
    for change in reversed(_chosen(names)):
        undo = _undo.pop(change.what, None)
        if undo is not None:
            undo()


def original(name: str) -> Any:
    """Returns the object of torch that a change replaced."""
    return _originals[name]
