"""Functions of torch that have a handler instead of a rule."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from types import GetSetDescriptorType
from typing import Any

import torch

from disttensor.dispatch.call_plan import PythonCall
from disttensor.dispatch.fallback import gather_and_run
from disttensor.dispatch.resolve import HANDLERS, OF_KEY, handler
from disttensor.tensor import backward, memory
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.in_place import replace_in_place
from disttensor.torch_private import is_view

Tensor = torch.Tensor

HANDLERS[torch.autograd.grad] = backward.autograd_grad
HANDLERS[torch.autograd.backward] = backward.autograd_backward
HANDLERS[torch.detach] = lambda input: input.detach()
HANDLERS[torch.detach_] = lambda input: input.detach_()
HANDLERS[torch.is_complex] = lambda input: input.spec.dtype.is_complex
HANDLERS[torch.is_floating_point] = lambda input: input.spec.dtype.is_floating_point
HANDLERS[torch.numel] = lambda input: input.numel()
OF_KEY.update([torch.is_complex, torch.is_floating_point, torch.numel])


def _of_meta_tensor(func: Any) -> None:
    """Registers a function that reads only shape and dtype: it runs on a meta tensor of the global
    shape."""

    def stand_in(v: Any) -> Any:
        return v.spec.meta_tensor if type(v) is DistTensor else v

    HANDLERS[func] = lambda *args, **kwargs: func(
        *map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()}
    )


for _func in (
    torch.is_signed, torch.result_type, torch.is_same_size, Tensor.is_same_size,
    Tensor.is_signed, Tensor.get_device, Tensor.dim_order,
):  # fmt: skip
    _of_meta_tensor(_func)


def _of_local(func: Any) -> None:
    """Registers a function that reads storage or device: runs on the local of this rank."""
    HANDLERS[func] = lambda x, *args, **kwargs: func(x.local, *args, **kwargs)


for _method in (
    torch.is_conj, Tensor.is_conj, torch.is_neg, Tensor.is_neg, Tensor.is_pinned,
    Tensor.is_shared, Tensor.storage_type, is_view, Tensor.is_coalesced,
    torch.is_inference, Tensor.is_inference,
):  # fmt: skip
    _of_local(_method)

# Attributes of C++ (``name``, ``_cdata``): reading them sends nothing. C++ reads ``_grad`` by grad.
for _name, _attribute in vars(Tensor.__base__).items():
    if isinstance(_attribute, GetSetDescriptorType):
        if getattr(DistTensor, _name) is _attribute:
            _of_local(_attribute.__get__)
        elif _name in ("grad", "grad_fn"):
            HANDLERS[_attribute.__get__] = attrgetter(_name)
HANDLERS[Tensor.data_ptr] = memory.data_ptr
for _name in ("untyped_storage", "storage", "_typed_storage"):
    HANDLERS[getattr(Tensor, _name)] = partial(memory.storage, name=_name)


@handler(Tensor.type)
def _type(x: DistTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    if dtype is None:
        return x.spec.meta_tensor.type()
    if not isinstance(dtype, torch.dtype):  # "torch.FloatTensor" or torch.FloatTensor
        dtype = torch.empty(0).type(dtype).dtype
    return x.to(dtype, non_blocking=non_blocking)


@handler(torch._has_compatible_shallow_copy_type)
def _same_kind(x: Any, other: Any) -> bool:
    """Returns True if ``nn.Module.to`` may replace the data of ``x`` by the data of ``other``."""
    if type(x) is not type(other):
        return False
    gets_memory = x.local.is_meta  # ``module.to_empty``
    return gets_memory or bool(torch._has_compatible_shallow_copy_type(x.local, other.local))


@handler(Tensor.is_set_to)
def _is_set_to(x: Any, other: Any) -> bool:
    return bool(getattr(x, "local", x).is_set_to(getattr(other, "local", other)))


def _view_in_place(name: str) -> None:
    """Registers an in-place view such as ``x.t_()``: x becomes the view."""
    view = getattr(Tensor, name.removesuffix("_"))
    HANDLERS[getattr(Tensor, name)] = lambda x, *args, **kwargs: replace_in_place(
        x, view(x, *args, **kwargs)
    )


for _name in (
    "t_",
    "transpose_",
    "swapdims_",
    "swapaxes_",
    "squeeze_",
    "unsqueeze_",
    "as_strided_",
):
    _view_in_place(_name)


@handler(Tensor.resize_, Tensor.resize_as_)
def _resize(x: DistTensor, *args: Any, **kwargs: Any) -> DistTensor:
    """Returns x unchanged if the shape is equal; an empty x becomes zeros of the new shape.
    Raises RuntimeError otherwise: memory of another size would need another layout."""
    like = args[0] if args else None
    shape = (
        tuple(like.shape)
        if isinstance(like, Tensor)
        else like
        if isinstance(like, (tuple, list))
        else args
    )
    plain = isinstance(like, Tensor) and type(like) is not DistTensor
    if not x.numel() and tuple(shape) != tuple(x.spec.shape) and not plain:
        empty: Any = x.new_zeros(tuple(shape))
        replace_in_place(x, empty)
        return x
    if tuple(shape) != tuple(x.spec.shape) or plain:
        raise RuntimeError(
            f"{x.spec!r}: a DistTensor is not resized, nor given other memory; make a new one, or "
            "assign to its .data"
        )
    return x


_STRIDED = PythonCall(torch.as_strided, gather_and_run, "it reads the memory of one process")


@handler(torch.as_strided, Tensor.as_strided)
def _as_strided(x: DistTensor, *args: Any, **kwargs: Any) -> Any:
    if x.spec is not x.spec.replicated() and not x.is_contiguous():
        raise RuntimeError(
            f"as_strided of {x.spec!r}: strides are those of the memory of one process, which a "
            "split tensor has only where it is contiguous; call contiguous() first, or use views "
            "that name dims"
        )
    return gather_and_run(_STRIDED, (x, *args), kwargs)


@handler(Tensor.__dlpack__)
def _dlpack(x: DistTensor, *args: Any, **kwargs: Any) -> Any:
    return x.full_tensor().__dlpack__(*args, **kwargs)


@handler(Tensor.pin_memory)
def _place(x: DistTensor, *args: Any, **kwargs: Any) -> Any:
    return wrap(x.local.pin_memory(*args, **kwargs), x.spec)


@handler(Tensor.share_memory_)
def _share(x: DistTensor) -> DistTensor:
    x.local.share_memory_()
    return x


# Python values of whole tensors -------------------------------------------------------------------


@handler(torch.is_nonzero, Tensor.is_nonzero)
def _is_nonzero(input: DistTensor) -> bool:
    return bool(input.item())


@handler(torch.equal, Tensor.equal)
def _equal(input: Any, other: Any) -> bool:
    return tuple(input.shape) == tuple(other.shape) and bool((input == other).all())


@handler(torch.allclose, Tensor.allclose)
def _allclose(
    input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())
