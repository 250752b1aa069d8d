"""A tensor subclass with operators of its own, as torchao's quantized weights are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Int8Tensor(Tensor):
    """A weight of one row scale and int8 numbers. It knows ``F.linear``, detach, clone and a copy
    to a device, and no other operator."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, requires_grad: bool = False) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device,
            requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, numbers: Tensor, scale: Tensor, requires_grad: bool = False) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def quantized(cls, weight: Tensor) -> Int8Tensor:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def dequantized(self) -> Tensor:
        return self.numbers * self.scale

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["numbers"], inner["scale"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Int8Tensor({list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dequantized(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            raise NotImplementedError(f"Int8Tensor has no {func}")
        x = args[0]
        out = cls(func(x.numbers), func(x.scale))
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


class Adapted(nn.Module):
    """A linear layer of a frozen quantized weight, with a trained bias and low-rank adapter."""

    def __init__(self, n: int, m: int, rank: int = 2) -> None:
        super().__init__()
        base = nn.Linear(n, m)
        quantized = Int8Tensor.quantized(base.weight)
        self.weight = nn.Parameter(quantized, requires_grad=False)
        self.bias = base.bias
        self.down, self.up = nn.Linear(n, rank, bias=False), nn.Linear(rank, m, bias=False)

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.weight, self.bias) + self.up(self.down(x))
