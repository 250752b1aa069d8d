"""Classifies functions of regular tensors for a recording: questions, refused functions, calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttensor.dispatch.function_body import body_of
from disttensor.pytree import collect
from disttensor.torch_private import TorchDispatchMode
from ops.answer import named_dynamic

# Questions about a tensor whose answers follow from its metadata, or are read by our own code.
_ASKED = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "_version",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes",
    "is_mkldnn", "output_nr", "name", "is_xla", "is_mps", "is_xpu", "names", "retains_grad",
    "_base", "is_sparse_csr", "_backward_hooks", "_post_accumulate_grad_hooks",
})  # fmt: skip
_ASKING = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "storage_offset", "get_device",
    "untyped_storage", "is_same_size", "_is_view", "is_conj", "is_neg", "result_type", "__len__",
    "_set_grad_enabled", "_use_count", "__hash__", "broadcast_shapes", "is_tensor",
    "is_grad_enabled", "has_names", "can_cast", "promote_types", "get_default_dtype", "finfo",
    "iinfo", "is_distributed",
})  # fmt: skip
_REFUSED = frozenset({
    "requires_grad_", "detach_", "set_", "resize_", "resize_as_", "backward", "register_hook",
    "retain_grad", "register_post_accumulate_grad_hook", "swap_tensors", "rename_",
})  # fmt: skip
_SETS = ("set_", "_set_", "manual_seed", "seed", "use_deterministic", "init_")
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
# Functions that may read sizes in the second argument.
_SIZES_IN_SECOND = frozenset({
    "repeat_interleave", "tensor_split", "pack_padded_sequence", "pad_packed_sequence",
})  # fmt: skip
_SIZED_BY_SHAPES = ("nonzero_static", "combinations")  # though their names begin so
_OMITTED = frozenset({"detach", "view_as"})  # omitted if the result is unused

# Python functions that read options and sizes, and call C++ functions. Functions that also read
# settings of the process (``torch.backends``, deterministic algorithms) are not listed.
_BODIES = frozenset({
    "layer_norm", "rms_norm", "group_norm", "embedding", "cross_entropy", "nll_loss", "mse_loss",
    "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "softmax", "log_softmax", "softmin", "normalize", "relu",
    "relu6", "silu", "mish", "elu", "selu", "celu", "glu", "leaky_relu", "hardtanh", "hardswish",
    "hardsigmoid", "sigmoid", "tanh", "tanhshrink", "softsign",
})  # fmt: skip
# Casts: they return a tensor itself if it has the dtype already.
_CASTS = frozenset({
    "to", "float", "double", "half", "bfloat16", "int", "long", "short", "bool", "char", "byte",
    "cfloat", "cdouble",
})  # fmt: skip

QUESTION, CALL, ASSIGNMENT, REFUSED = "question", "call", "assignment", "refused"
NOT_IF_UNUSED = "call whose result is used"

_BY_SPEC = frozenset({
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "size", "dim", "ndimension",
    "numel", "nelement", "is_floating_point", "is_complex", "is_grad_enabled", "element_size",
    "itemsize", "_set_grad_enabled", "result_type", "promote_types", "can_cast", "is_cuda",
    "is_cpu", "broadcast_shapes", "finfo", "iinfo", "is_tensor",
})  # fmt: skip


def by_spec(func: Any) -> bool:
    """Returns True if the answer follows from specs and flags, which are part of the key."""
    name = getattr(func, "__name__", "")
    return (getattr(func.__self__, "__name__", "") if name == "__get__" else name) in _BY_SPEC


def kind_of(func: Any) -> str:
    """Returns how a recording treats a function of torch. An attribute is represented by its
    getter."""
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        return ASSIGNMENT
    if name == "__get__":
        return QUESTION if getattr(func.__self__, "__name__", "") in _ASKED else CALL
    if name in _ASKING:
        return QUESTION
    if name in _REFUSED or name.startswith(_SETS):
        return REFUSED
    return NOT_IF_UNUSED if name in _OMITTED else CALL


class NumberReads(TorchDispatchMode):
    """``found``: a call inside has read the number in a tensor, as it may for a size."""

    found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of ``ops.answer.DrawDetector``

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def shape_is_read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True for functions of regular tensors that read the shape of the result in them. Does
    not ask torch (``ops.answer.is_dynamic``), which would import its compiler."""
    name, count = getattr(func, "__name__", "").strip("_"), len(args) + len(kwargs)
    if name == "where":
        return count == 1
    if name == "one_hot":
        return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1
    if name in _SIZES_IN_SECOND:
        sizes = len(collect((args, kwargs), [])) > 1 or count == 1
        return sizes and kwargs.get("output_size") is None
    return named_dynamic(func, args) and name not in _SIZED_BY_SHAPES


def reads_sizes(func: Any, tensors: Sequence[torch.Tensor]) -> NumberReads | None:
    """Returns what detects whether ``func`` reads a number from one of ``tensors``, or None if it
    reads none that decides on a shape."""
    numbers = func not in _INDEXING and any(t.dim() == 0 for t in tensors)
    return NumberReads() if numbers else None


def body(func: Any) -> Callable[..., Any] | None:
    """Returns the body of a function of ``torch.nn.functional``, or None if it stays one call."""
    mine = getattr(func, "__module__", "") == "torch.nn.functional"
    return body_of(func) if mine and func.__name__ in _BODIES else None


def unneeded_cast(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> bool:
    """Returns True for a cast that returned its tensor, as for all tensors of that dtype."""
    only = all(isinstance(a, (torch.dtype, bool)) for a in (*args[1:], *kwargs.values()))
    return bool(args) and out is args[0] and only and getattr(func, "__name__", "") in _CASTS


def permuted(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Returns the order in which ``func`` puts the dims of its first argument, or None if it does
    anything else."""
    name = getattr(func, "__name__", "")
    if kwargs or name not in ("transpose", "permute"):
        return None
    n, dims = args[0].dim(), args[1:]
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    if any(type(d) is not int for d in dims):
        return None
    dims = [d % n if n else 0 for d in dims]
    if name == "permute":
        return tuple(dims) if len(dims) == n else None
    order = list(range(n))
    if n and len(dims) == 2:
        order[dims[0]], order[dims[1]] = dims[1], dims[0]
    return tuple(order)
