"""Lets torch choose for tensors of the CPU, on which a simulated rank computes, as it chooses on a
GPU: kernels of attention, loops of optimizers, casts of autocast.

The choices stay until the process of the rank ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.nn import functional

from disttensor.pytree import substitute
from disttensor.torch_private import update_lists_on
from ops.nn import attention_block

Tensor = torch.Tensor
_aten = torch.ops.aten
_HALF = torch.bfloat16, torch.float16
_WIDEST = 256  # elements of a head in FlashAttention
# Operators that autocast runs in float32 on a GPU and not on the CPU: AT_FORALL_FP32 and
# AT_FORALL_FP32_SET_OPT_DTYPE in ATen/autocast_mode.h.
_IN_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "logsumexp", "softmax", "log_softmax", "cumprod", "cumsum", "sum",
)  # fmt: skip


def choose_as_on(device_type: str) -> Any:
    """Replaces choices of torch in this process. Returns an object to keep alive until it ends."""
    if device_type == "cpu":
        return None
    update_lists_on("cpu")
    vars(attention_block)["flash_on_cpu"] = None  # of blocks, which the engine composes on a GPU
    init = torch.autocast.__init__
    torch.autocast.__init__ = _of_cpu(init)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda x, *_: x  # type: ignore[method-assign]
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a kernel that is replaced
        library.impl("scaled_dot_product_attention", _attention, "CompositeImplicitAutograd")
        for func in _overloads(_IN_FLOAT32):
            library.impl(func, partial(_in_float32, func), "AutocastCPU")
    return library


# Autocast -----------------------------------------------------------------------------------------


def _of_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Returns ``autocast.__init__`` with the CPU in place of a GPU."""

    @wraps(init)
    def call(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            dtype, device_type = dtype or torch.get_autocast_dtype("cuda"), "cpu"
        init(self, device_type, dtype, *args, **kwargs)

    return call


def _overloads(names: tuple[str, ...]) -> list[Any]:
    packets = [getattr(_aten, name) for name in names]
    found = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [f for f in found if not any(
        a.is_out or "Dimname" in str(a.type) for a in f._schema.arguments
    )]  # fmt: skip


def _in_float32(func: Any, *args: Any, **kwargs: Any) -> Any:
    def widened(x: Tensor) -> Tensor:
        return x.float() if x.dtype in _HALF else x

    with torch.autocast("cpu", enabled=False):
        return func(*substitute(args, widened), **substitute(kwargs, widened))


# Attention ----------------------------------------------------------------------------------------


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Runs the kernel that torch chooses on a GPU: FlashAttention, the memory-efficient one, or the
    composite one (``sdp_utils.cpp`` of ATen/native/transformers/cuda)."""
    cuda, width = torch.backends.cuda, q.shape[-1]
    same = q.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] and 0 not in q.shape + k.shape
    alike = q.dtype == k.dtype == v.dtype and same and (enable_gqa or q.shape[1] == k.shape[1])
    if (
        cuda.flash_sdp_enabled() and alike and mask is None and q.dtype in _HALF
        and width == k.shape[-1] == v.shape[-1] <= _WIDEST
    ):  # fmt: skip
        q, k, v = (functional.pad(t, (0, -width % 8)) if width % 8 else t for t in (q, k, v))
        scale = width**-0.5 if scale is None else scale
        out = _aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)
        return out[0][..., :width] if width % 8 else out[0]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    efficient = cuda.mem_efficient_sdp_enabled() and alike and not enable_gqa
    if efficient and q.dtype in (*_HALF, torch.float32) and width % 4 == v.shape[-1] % 4 == 0:
        if mask is not None:
            mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return _aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, trains, dropout, causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa
    )[0]
