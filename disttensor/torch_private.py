"""All private names of torch that disttensor uses: another version of torch breaks this file first.

Each name is looked up once, at import, and is the function of torch itself, so that a call through
it costs nothing. A missing name raises one error, which says what the name is needed for. Not here:
functions that rules are registered for by name (``torch._foreach_add``); they are data.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction as without_function_modes
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch import eager_transforms
from torch._functorch import vmap as vmap_module
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch._guards import CompileContext
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutput
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShape
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as as_meta
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fakes
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.nn.utils import clip_grad
from torch.optim import optimizer
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [  # the imported names; all others are defined here
    "DataDependentOutput", "DynamicOutputShape", "FakeTensor", "FakeTensorMode",
    "StorageWeakRef", "TorchDispatchMode", "as_meta", "outside_transforms", "without_fakes",
    "without_function_modes", "without_modes",
]  # fmt: skip


def need(purpose: str, owner: Any, *names: str) -> Any:
    """Returns the first of ``names`` that ``owner`` has. Raises ImportError if it has none."""
    for name in names:
        found = getattr(owner, name, None)
        if found is not None:
            return found
    where = getattr(owner, "__qualname__", getattr(owner, "__name__", repr(owner)))
    raise ImportError(
        f"torch {torch.__version__} has no {where}.{' or '.join(names)}, which disttensor needs "
        f"{purpose}",
        name="torch",
    )


# Autograd -----------------------------------------------------------------------------------------

_engine = need("to run code after a backward", torch.autograd.Variable, "_execution_engine")
_C_autograd = need("to follow saved tensors", torch._C, "_autograd")

# The number of the backward that this code runs in; -1 outside.
current_backward: Callable[[], int] = need(
    "to tell a backward from a forward", torch._C, "_current_graph_task_id"
)
# The node of autograd's graph that runs; None outside of nodes.
current_node: Callable[[], Any] = need(
    "to know of which layer a backward is", torch._C, "_current_autograd_node"
)
# Returns True if the current call of autograd will run a node; not for the node of a leaf.
is_in_backward: Callable[[Any], bool] = need(
    "to gather what a backward will use", torch._C, "_will_engine_execute_node"
)
# torch.autograd.backward behind its checks: (roots, grads, retain_graph, create_graph, inputs).
run_backward: Callable[..., Any] = partial(
    need("to run a backward", torch.autograd.graph, "_engine_run_backward"),
    allow_unreachable=True, accumulate_grad=True,
)  # fmt: skip
# Run a function when the present backward has run all its nodes.
after_backward: Callable[[Callable[[], Any]], None] = _engine.queue_callback
# The innermost pair of saved-tensors hooks, or None.
top_saved_tensors_hooks: Callable[[bool], Any] = need(
    "to tell checkpointed regions apart", _C_autograd, "_top_saved_tensors_default_hooks"
)
# Take the innermost pair of hooks off the stack of this thread, and put a pair on.
pop_saved_tensors_hooks, push_saved_tensors_hooks = (
    need("to take hooks into another thread", _C_autograd, f"_{name}_saved_tensors_default_hooks")
    for name in ("pop", "push")
)
set_versions: Callable[[Any, Any], None] = need(
    "for gathered memory that keeps its version", _C_autograd, "_unsafe_set_version_counter"
)
# The place of a node of autograd's graph in the order in which nodes were made.
node_number: Callable[[Any], int] = methodcaller("_sequence_nr")
# The class of the nodes that accumulate the gradients of leaves.
AccumulateGrad: Any = need("to know the leaves of a graph", torch._C._functions, "AccumulateGrad")


def renumber(node: Any, number: int) -> None:
    """Changes the number of a node: of all ready nodes, a backward runs the node with the highest
    number."""
    node._set_sequence_nr(number)


def next_node() -> int:
    """Returns the counter of autograd, which increases with every node that this thread makes."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return next_node()
    node: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    return node_number(node)


# The number of the next node that this thread makes.
next_number: Callable[[], int] = getattr(_C_autograd, "_get_sequence_nr", next_node)

no_torch_function: Any = need(
    "to reach the C++ tensor of a wrapper", torch._C, "DisableTorchFunctionSubclass"
)

# Inside, neither subclasses nor function modes see a call.
no_function_mode: Any = need("to compare states within a mode", torch._C, "DisableTorchFunction")


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """Returns ``function.apply`` in C++, without the wrappers of torch and our patches."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


# Tensors ------------------------------------------------------------------------------------------

make_subclass: Callable[..., Any] = need("to make a DistTensor", torch.Tensor, "_make_subclass")
refuse_memory: Callable[[torch.Tensor], None] = need(
    "to refuse who reads a wrapper from C++", torch._C, "_set_throw_on_mutable_data_ptr"
)
is_view: Callable[[torch.Tensor], bool] = need(
    "to tell views from copies", torch.Tensor, "_is_view"
)
# A number that identifies an untyped storage while it lives, also an empty one.
STORAGE_ID = "_cdata"
storage_id: Callable[[Any], int] = attrgetter(STORAGE_ID)


def copied_storages(memo: dict[Any, Any]) -> dict[int, Any]:
    """Returns the storages that a deepcopy has copied, by the ``storage_id`` of their source."""
    return memo.get("torch", {})


# The number of references in C++ to a tensor, and to its memory (views, other programs).
tensor_users: Callable[[Any], int] = methodcaller("_use_count")
_storage_use_count = need("to write where nobody looks", torch._C, "_storage_Use_Count")


def users_of_storage(storages: list[Any], i: int) -> int:
    """Returns the references to ``storages[i]``. A list, as a call of a Python function may hold a
    second reference to an argument: torch.compile and debuggers change that at any time."""
    return int(_storage_use_count(storages[i]._cdata)) + sys.getrefcount(storages[i])


_from_weak = need("to find memory again", torch.UntypedStorage, "_new_with_weak_ptr")


def alive(ref: StorageWeakRef) -> Any:
    """Returns the storage of a weak reference, or None if it has been freed."""
    return _from_weak(ref.cdata)


# Swaps the memory of two storages of one size, or of which one is empty.
swap_memory: Callable[[Any, Any], None] = need(
    "to use memory again", torch.UntypedStorage, "_swap_data_ptr_"
)

_has_kernel = need("to see what is composite", torch._C, "_dispatch_has_kernel_for_dispatch_key")


def is_composite(func: Any) -> bool:
    """Returns True if this overload of an operator, with its gradient, is composed of others."""
    return bool(_has_kernel(func.name(), "CompositeImplicitAutograd"))


def schemas_of(func: Any) -> list[Any]:
    """Returns the schemas of an operator of ``torch.ops``; of all overloads if none is chosen; an
    empty result for other functions."""
    names = func.overloads() if hasattr(func, "overloads") else ()
    overloads = [getattr(func, name) for name in names] or [func]
    return [one._schema for one in overloads if hasattr(one, "_schema")]


_schemas = need("to know the names of arguments", torch._C, "_jit_get_schemas_for_operator")
nn_functions: Any = need("for the rules of torch.nn.functional", torch._C, "_nn")


def schemas_named(name: str) -> list[Any]:
    """Returns the schemas of torch's operator of this name, as used by its Python functions."""
    return [s for s in _schemas(f"aten::{name}") if not any(a.is_out for a in s.arguments)]


def keep_calls(library: torch.library.Library, name: str) -> None:
    """Makes compilers keep all calls of an operator, in their order."""
    library._register_effectful_op(name, EffectType.ORDERED)


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` is True: models then read no values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def inductor_pass(run: Callable[[torch.fx.Graph], None], file: str) -> dict[str, Any]:
    """Returns the option of inductor that runs ``run`` on each graph at last. ``file``: its source;
    a graph that was kept on the disk is used again only if this file has not changed."""
    module = importlib.import_module("torch._inductor.custom_graph_pass")  # takes a second
    methods = {
        "__call__": lambda self, graph: run(graph),
        "uuid": lambda self: module.get_hash_for_files((file,)),
    }
    option = type("GraphPass", (module.CustomGraphPass,), methods)()
    return {"post_grad_custom_post_pass": option}


def options_of_mode(mode: str | None) -> dict[str, Any]:
    return torch._inductor.list_mode_options(mode) if mode else {}


def mark_parameter(x: torch.Tensor) -> None:
    """Makes compilers take ``x`` for memory that stays, which costs nothing until the backward."""
    torch._dynamo.mark_static_address(x, guard=False)


def is_untraceable(error: Exception) -> bool:
    """Returns True for the error of Dynamo at a call that it cannot trace into one graph."""
    return isinstance(error, torch._dynamo.exc.Unsupported | torch._dynamo.exc.UserError)


# The number of the compilation by torch.compile that runs; None outside.
compile_id: Callable[[], Any] = need(
    "to tell a trace from a run", CompileContext, "current_compile_id"
)

# ``with keep_versions(tensors):`` writes inside do not count as writes for autograd.
keep_versions: Callable[[tuple[Any, ...]], Any] = need(
    "for batch norm, whose writes do not count", torch.autograd, "_unsafe_preserve_version_counter"
)

# Attention that also returns the log-sum-exp of its scores, and its backward; None if torch lacks
# them.
_flash = "_scaled_dot_product_flash_attention_for_cpu"
flash_on_cpu: Any = getattr(torch.ops.aten, _flash, None)
flash_on_cpu_backward: Any = getattr(torch.ops.aten, f"{_flash}_backward", None)


def index_of_dtensor(x: Any) -> list[list[int]]:
    """Returns the numbers of the elements along each dim of a DTensor that this rank holds."""
    index = [torch.arange(n) for n in x.shape]
    for axis, placement in enumerate(x.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:  # Shard, or _StridedShard of FSDP on a tensor that is split already
            row, size = index[dim].view([1] * dim + [-1]), x.device_mesh.size(axis)
            parts, _ = placement._split_tensor(row, size, with_padding=False, contiguous=False)
            index[dim] = parts[x.device_mesh.get_coordinate()[axis]].reshape(-1)
    return [numbers.tolist() for numbers in index]


# Random numbers -----------------------------------------------------------------------------------

# The state of a generator of the CPU: 24 bytes, 624 words of 64 bits of which the upper halves are
# unused, 40 bytes.
_STATE_SIZE, _FIRST = 5056, 24 // 4 + 1
_MARK = [0x64697374, 0x74656E73]
_Words = ctypes.c_uint32 * (_STATE_SIZE // 4)


def embed(state: torch.Tensor, *values: int) -> None:
    """Writes integers of 64 bits into a state of the CPU's generator, where torch reads nothing."""
    halves = [half for v in values for half in (v & 0xFFFFFFFF, v >> 32)]
    for i, half in enumerate(_MARK + halves):
        _words_of(state)[_FIRST + 2 * i] = half


def read_embedded(state: torch.Tensor, count: int) -> tuple[tuple[int, ...] | None, bytes]:
    """Returns the ``count`` integers that ``embed`` wrote, or None, and the bytes of the state."""
    words = _words_of(state)
    mark, halves = words[_FIRST : _FIRST + 4 : 2], words[_FIRST + 4 : _FIRST + 4 + 4 * count : 2]
    found = tuple([halves[i] | halves[i + 1] << 32 for i in range(0, 2 * count, 2)])
    return found if mark == _MARK else None, bytes(words)


def set_generator_method(name: str, method: Any) -> None:
    """Sets a method of ``torch.Generator``, a class of C that has no setattr."""
    (methods,) = gc.get_referents(vars(torch.Generator))
    methods[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Generator))


def _words_of(state: torch.Tensor) -> Any:
    with no_function_mode():
        if state.numel() != _STATE_SIZE:
            raise RuntimeError(
                f"a state of {state.numel()} bytes: torch {torch.__version__} keeps random numbers "
                "in a form that disttensor does not know"
            )
        return _Words.from_address(state.data_ptr())


_foreach_devices: Callable[[], list[str]] = need(
    "to simulate optimizers of another device", optimizer,
    "_get_foreach_kernels_supported_devices",
)  # fmt: skip


def update_lists_on(device_type: str) -> None:
    """Lets optimizers update lists of parameters (foreach) on this type of device by default."""
    optimizer._get_foreach_kernels_supported_devices = lambda: [
        *_foreach_devices(), device_type,
    ]  # fmt: skip


# Modes --------------------------------------------------------------------------------------------

autocast_is_on: Callable[[], bool] = need(
    "to see autocast of any device", torch._C, "_is_any_autocast_enabled"
)
# Settings of the process and of the thread that choose kernels: the answers are constants.
FLAGS = {
    name: need("to know which kernels torch may choose", torch._C, f"_get_{name}")
    for name in (
        "deterministic_algorithms_warn_only", "deterministic_fill_uninitialized_memory",
        "float32_matmul_precision", "mkldnn_enabled", "mkldnn_deterministic",
        "onednn_allow_tf32", "math_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled",
        "overrideable_sdp_enabled",
    )
}  # fmt: skip
FLAGS_OF_CUDA = {
    name: need("to know which kernels torch may choose", torch._C, f"_get_{name}")
    for name in (
        "cudnn_sdp_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic",
        "cudnn_allow_tf32", "cublas_allow_tf32", "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
    )
}  # fmt: skip
order_of_sdp = need("to know which kernels torch may choose", torch._C, "_get_sdp_priority_order")


def flags_of_torch(device: str) -> tuple[Any, ...]:
    """Returns the settings of torch that choose the kernels of a type of device."""
    flags = [flag() for flag in FLAGS.values()]
    if device == "cuda":
        flags += [flag() for flag in FLAGS_OF_CUDA.values()]
    return (*flags, *order_of_sdp(), torch.get_num_threads(), torch.is_anomaly_enabled())


torch_functions_are_seen: Callable[[], bool] = need(
    "to see DisableTorchFunction", torch._C, "_is_torch_function_enabled"
)
modes_see_functions: Callable[[], bool] = need(
    "to see modes that record calls", torch._C, "_is_torch_function_mode_enabled"
)
count_function_modes: Callable[[], int] = need(
    "to see modes that record calls", torch._C, "_len_torch_function_stack"
)

# Inside, no dispatch mode sees new tensors: for internal tensors of the runtime.
no_dispatch: Any = need("for stand-ins under any mode", torch._C, "_DisableTorchDispatch")


@contextmanager
def outside_modes() -> Iterator[None]:
    """Removes the modes of the caller in its block, for tensors that are kept and used under any
    mode. No graph is made inside unless the code enables it."""
    with no_function_mode(), no_dispatch(), torch.inference_mode(False), torch.no_grad():
        yield


_as_dispatched = need("to run eager calls in an operator", torch._C, "_ForceDispatchKeyGuard")


def dispatch_state() -> Callable[[], Any]:
    """Returns a function that makes a context: operators inside are dispatched as at this point,
    with autograd and autocast, but without modes. The code of a mode has none of the three."""
    python = torch._C.DispatchKey
    include = torch._C._dispatch_tls_local_include_set()
    for key in (python.Python, python.PythonDispatcher):
        include = include.remove(key)
    return partial(_as_dispatched, include, torch._C._dispatch_tls_local_exclude_set())


# The modes of this thread that see every operator, the outermost first.
dispatch_modes: Callable[[], list[Any]] = need(
    "to take modes into another thread", _python_dispatch, "_get_current_dispatch_mode_stack"
)
function_modes: Callable[[], list[Any]] = need(
    "to take modes into another thread", torch.overrides, "_get_current_function_mode_stack"
)
# Modes of autograd in this thread: forward derivatives, and several threads in a backward.
has_forward_gradients: Callable[[], bool] = need(
    "to take a mode into another thread", torch._C, "_is_fwd_grad_enabled"
)
set_forward_gradients: Any = need(
    "to take a mode into another thread", torch.autograd.forward_ad, "_set_fwd_grad_enabled"
)
has_multithreading: Callable[[], bool] = need(
    "to take a mode into another thread", torch._C, "_is_multithreading_enabled"
)
count_dispatch_modes: Callable[[], int] = need(
    "to see modes that record operators", torch._C, "_len_torch_dispatch_stack"
)
pop_dispatch_mode, push_dispatch_mode, pop_function_mode, push_function_mode = (
    need("to work outside the modes of users", torch._C, name)
    for name in (
        "_pop_torch_dispatch_stack", "_push_on_torch_dispatch_stack",
        "_pop_torch_function_stack", "_push_on_torch_function_stack",
    )
)  # fmt: skip


@contextmanager
def outside_function_modes() -> Iterator[None]:
    """Removes the function modes of the caller in its block. Subclasses of Tensor still see
    calls."""
    taken = [pop_function_mode() for _ in range(count_function_modes())]
    try:
        yield
    finally:
        for mode in reversed(taken):
            push_function_mode(mode)


_mode_of = need("to see a FakeTensorMode", torch._C, "_get_dispatch_mode")
_FAKE = need("to see a FakeTensorMode", torch._C, "_TorchDispatchModeKey").FAKE


def fakes() -> Any:
    """Returns the FakeTensorMode in which new tensors are made; None if they are real."""
    return _mode_of(_FAKE)


_warns = need("to make fakes", torch._C, "_set_warn_deprecated_on_mutable_data_ptr")


def fake_like(like: FakeTensor, bare: torch.Tensor) -> FakeTensor:
    """Converts ``bare``, a meta tensor, to a FakeTensor with the mode and device of ``like``, an
    unused FakeTensor. The constructor would take five times as long."""
    fake: FakeTensor = make_subclass(
        FakeTensor, bare, dispatch_device=True, device_for_backend_keys=like.fake_device
    )
    _warns(fake)
    fake.__dict__.update(like.__dict__)
    return fake


_modes = threading.local()


def fake_mode() -> Any:
    """Returns a mode in which functions run on tensors without data. Each thread has one, made at
    the first use: torch imports its compiler for it, which takes longer than to import our
    packages."""
    if not hasattr(_modes, "fake"):
        _modes.fake = FakeTensorMode(allow_non_fake_inputs=True)
    return _modes.fake


def _ends(owner: Any, begin: str, end: str) -> tuple[Any, str, str]:
    for name in (begin, end):
        need("to see transforms and tracers", owner, name)
    return owner, begin, end


# Transforms that start with one function of an owner and end with another, by their public name.
transform_ends: dict[str, tuple[Any, str, str]] = {
    "torch.func.grad or vjp": _ends(
        eager_transforms, "_grad_increment_nesting", "_grad_decrement_nesting"
    ),
    "torch.func.vmap": _ends(vmap_module, "_vmap_increment_nesting", "_vmap_decrement_nesting"),
    "torch.func.jvp": _ends(eager_transforms, "_jvp_increment_nesting", "_jvp_decrement_nesting"),
    "torch.func.functionalize": _ends(
        eager_transforms, "_func_increment_nesting", "_func_decrement_nesting"
    ),
    "torch.autograd.forward_ad.dual_level": _ends(
        torch.autograd.forward_ad, "enter_dual_level", "exit_dual_level"
    ),
    "make_fx": _ends(ProxyTorchDispatchMode, "__enter__", "__exit__"),
}
# The functions of an owner that trace for torch.jit.
jit_tracers: tuple[tuple[Any, str], ...] = tuple(
    (owner, f"_create_{made}_from_trace{form}")
    for owner, made in ((torch._C, "function"), (torch._C.ScriptModule, "method"))
    for form in ("", "_with_dict")
)

# Process groups -----------------------------------------------------------------------------------

_world: Any = need("to know the world", c10d, "_world")
# The default process group, or None, also inside ``hide_world``. dist.group.WORLD is slower: two
# properties.
default_group: Callable[[], Any] = partial(
    attrgetter("_default_pg" if hasattr(_world, "_default_pg") else "default_pg"), _world
)


def release_world(group: Any) -> None:
    """Makes the functions of ``torch.distributed.nn`` use the world of their call. Their defaults
    are the world of their import, and would keep it and its store alive."""
    for function in vars(importlib.import_module("torch.distributed.nn.functional")).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(value is group for value in defaults):
            function.__defaults__ = tuple([None if v is group else v for v in defaults])


def default_store() -> Any:
    """Returns the store of the default process group."""
    return _world.pg_map[default_group()][1]


@contextmanager
def hide_world() -> Iterator[None]:
    """Hides the default process group of torch.distributed in its block: ``is_initialized()`` is
    False, in all threads. Existing groups work, and ``default_group`` returns the same group.

    Raises RuntimeError at the end if a process group was started in the block."""
    before, c10d._world = c10d._world, type(_world)()
    try:
        yield
    finally:
        started, c10d._world = dist.is_initialized(), before
    if started:
        raise RuntimeError(
            "a default process group was started while torch.distributed had none for other "
            "libraries: end it before the block ends, or let disttensor start the only one"
        )


# Public since torch 2.14. The private one of before is deprecated there.
set_timeout: Callable[..., None] = getattr(dist, "set_timeout", None) or need(
    "to give a group a timeout", c10d, "_set_pg_timeout"
)
root_of: Callable[[Any], Any] = need(
    "to know which mesh a sub-mesh is of", device_mesh.DeviceMesh, "_get_root_mesh"
)
_backend: Any = need("to know how long a group waits", dist.ProcessGroup, "_get_backend")


def timeout_of(group: Any) -> Any:
    """Returns the timeout of collectives of ``group``; None if the backend has none."""
    kind = "cuda" if "nccl" in str(c10d._world.pg_backend_config.get(group, "")) else "cpu"
    options = getattr(_backend(group, torch.device(kind)), "options", None)
    return getattr(options, "_timeout", None)


# The methods that torch.distributed's functions end in. Newer names first.
all_gather_single: Any = need(
    "to gather", dist.ProcessGroup, "all_gather_single", "_allgather_base"
)
reduce_scatter_single: Any = need(
    "to reduce and scatter", dist.ProcessGroup, "reduce_scatter_single", "_reduce_scatter_base"
)
all_to_all_single: Any = need(
    "to exchange pieces", dist.ProcessGroup, "all_to_all_single", "alltoall_base"
)
backend_of: Callable[[Any, torch.device], Any] = need(
    "to know the backend of a group", dist.ProcessGroup, "_get_backend"
)
_naming = threading.Lock()


@contextmanager
def group_name(name: str) -> Iterator[None]:
    """Gives a new process group the name ``name`` in its block. It replaces torch's function
    meanwhile, because ``new_group`` has no argument for a name. torch.distributed finds the
    world."""
    with _naming:
        usual = need("to name a group", c10d, "_process_group_name")
        seen, c10d._world = c10d._world, _world
        c10d._process_group_name = lambda *_, **__: c10d.GroupName(name)
        try:
            yield
        finally:
            c10d._process_group_name, c10d._world = usual, seen


# The device on which a group sends bytes of the CPU.
object_device: Callable[[Any], str] = need("to send facts", c10d, "_get_object_coll_device")
# The group that an operator of ``torch.ops.c10d`` is for.
unboxed_group: Callable[[Any], Any] = need("to read collectives", dist.ProcessGroup, "unbox")
_default_set = need("to put the process group aside", c10d, "_update_default_pg")
_register = need("to bring process groups back", c10d, "_register_process_group")
_unregister_all = need("to put process groups aside", c10d, "_unregister_all_process_groups")


@contextmanager
def hide_process_groups() -> Iterator[None]:
    """Removes the process groups in its block. Groups that are made inside are dropped at its end,
    and the earlier groups are restored."""
    seen, c10d._world = c10d._world, _world
    world = _world
    tables: Any = (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config,
        world.tags_to_pg, world.pg_to_tag,
    )  # fmt: skip
    kept = [dict(table) for table in tables]
    default, count, hook = world.default_pg, world.group_count, sys.excepthook
    for table in tables:
        table.clear()
    _unregister_all()
    _default_set(None)
    world.group_count = 0
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        for group, name in world.pg_names.items():
            _register(name, group)
        _default_set(default)
        world.group_count, sys.excepthook = count, hook
        c10d._world = seen


creates = c10d, "_new_process_group_helper"  # the module, and its function that makes a group
need("to see new process groups", *creates)


def process_groups() -> list[Any]:
    """Returns all process groups of this process."""
    return list(c10d._world.pg_map)


_dumps: tuple[Any, ...] = tuple(
    getattr(torch._C._distributed_c10d, name)
    for name in ("_dump_fr_trace", "_dump_nccl_trace")
    if dist.is_available() and hasattr(torch._C._distributed_c10d, name)
)


_NAMES_LINES = "torch._inductor.codecache"  # C++ imports it to dump the lines of collectives


def import_names_of_lines() -> None:
    """Imports what torch needs to dump the lines of collectives. To import it in a thread, beside
    an import of the program, could break both."""
    importlib.import_module(_NAMES_LINES)


def flight_record() -> list[dict[str, Any]]:
    """Returns the collectives that torch's flight recorders hold; none where they are switched off
    (``TORCH_FR_BUFFER_SIZE`` when the first process group starts). Without ``frames`` before
    ``import_names_of_lines``."""
    lines = hasattr(sys.modules.get(_NAMES_LINES), "PyCodeCache")
    dumped = [pickle.loads(dump(includeStackTraces=lines)) for dump in _dumps]
    return [entry for record in dumped for entry in record.get("entries", ())]


def members_of() -> dict[str, list[int]]:
    """Returns {name of a process group: its ranks in the world}."""
    ranks, names = c10d._world.pg_group_ranks, c10d._world.pg_names
    return {names[group]: [*ranks[group]] for group in list(names) if group in ranks}


def start_fake_world(rank: int, size: int) -> None:
    """Starts PyTorch's fake process group of ``size`` ranks, which transfers no data."""
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=size)


_operator_names = need("to answer collectives", torch._C, "_dispatch_get_all_op_names")


def replace_collectives(answer: Callable[..., Any]) -> torch.library.Library:
    """Lets ``answer(func, *args)`` run in place of each operator of ``torch.ops.c10d`` that starts
    a transfer of tensors of the CPU, as long as the returned object is alive."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kernel that is replaced
        for name in _operator_names():
            namespace, _, own = name.partition("::")
            func = getattr(torch.ops.c10d, own).default if namespace == "c10d" else None
            if func is not None and any("Work" in str(r.type) for r in func._schema.returns):
                library.impl(func, partial(answer, func), "CPU")
    return library


# Modules, optimizers, gradients, files ------------------------------------------------------------

# Finds the bytes of a tensor in a file of ``torch.save``.
ArchiveReader: Any = need("to load checkpoints", torch._C, "PyTorchFileReader")


def storage_info() -> Any:
    """Returns the class that says where a piece of a checkpoint is. Its module imports slowly."""
    module = importlib.import_module("torch.distributed.checkpoint.filesystem")
    return need("to write checkpoints", module, "_StorageInfo")


# The method that calls a module's hooks and its forward.
module_call: Any = need("to see which forwards run", torch.nn.Module, "_call_impl")
global_module_hooks: tuple[Any, ...] = tuple(
    need("to see hooks of all modules", nn_module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)
# The types of tensors for which torch chooses its functions on lists, here and in optimizers.
foreach_types: tuple[list[type], ...] = tuple(
    need("for functions on lists of DistTensors", owner, "_foreach_supported_types")
    for owner in (optimizer, _foreach_utils)
)


def has_data(x: torch.Tensor) -> bool:
    """Returns False for a tensor that a tracer or a transform of torch.func has wrapped."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return plain and not (is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x))


def see_clipping(see: Callable[[Any, Any], None]) -> None:
    """Calls ``see(parameters, norm)`` before torch scales gradients by their norm."""
    original = need("to see norms", clip_grad, "_clip_grads_with_norm_", "clip_grads_with_norm_")

    def clip(parameters: Any, max_norm: float, total_norm: Any, foreach: Any = None) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        see(parameters, total_norm)
        original(parameters, max_norm, total_norm, foreach)

    setattr(clip_grad, original.__name__, clip)
    torch.nn.utils.clip_grads_with_norm_ = clip
