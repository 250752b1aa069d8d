"""The wrapper of a DistTensor holds a number that stands for its elements. Functions and setters
of C++, which do not call ``__torch_function__``, never read it as a value: the result is the same
as with regular tensors, or there is an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import disttensor as dt
from tests.support.pool import on_ranks
from tests.support.training import full

Tensor = torch.Tensor
Program = Callable[[Any], Any]  # of a function that makes the tensor of a value
V = torch.tensor([1.0, 2.0, 3.0])
INDEX, ROWS = torch.tensor([0, 1, 2]), torch.tensor([0, 3])
ONE = torch.tensor(2.0)


def after(change: Callable[[Any], Any], start: Any = None) -> Any:
    """The tensor that ``change`` has changed."""
    regular = torch.zeros(3) if start is None else start
    change(regular)
    return regular


def hooked(register: Callable[[Any, Any], Any]) -> Any:
    leaf = torch.ones(3, requires_grad=True)
    y = leaf * 2
    register(leaf, y)
    y.sum().backward()
    return leaf.grad


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, grad: Any) -> Any:
        ctx.grad = grad
        return a * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.grad(), None


def saved(d: Any) -> Any:
    leaf = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: d(V)):
        y = leaf * leaf
    y.sum().backward()
    return leaf.grad


def by_custom(d: Any) -> Any:
    leaf = torch.ones(3, requires_grad=True)
    Backward.apply(leaf, lambda: d(V)).sum().backward()
    return leaf.grad


def state(d: Any) -> Any:
    generator = torch.Generator()
    generator.set_state(d(torch.Generator().manual_seed(3).get_state()))
    return generator.get_state()


def grad_outputs(d: Any) -> Any:
    leaf = torch.ones(3, requires_grad=True)
    return torch.autograd.grad(leaf * 2, leaf, d(V))[0]


def imaginary(d: Any) -> Any:
    return after(lambda r: setattr(r, "imag", d(V)), torch.zeros(3, dtype=torch.complex64))


PROGRAMS: dict[str, Program] = {
    "data": lambda d: after(lambda r: setattr(r, "data", d(V))),
    "data of integers": lambda d: after(lambda r: setattr(r, "data", d(INDEX)), INDEX.clone()),
    "data of a parameter": lambda d: after(
        lambda r: setattr(r, "data", d(V)), nn.Parameter(torch.zeros(3))
    ),
    "data, descriptor": lambda d: after(lambda r: Tensor.data.__set__(r, d(V))),  # type: ignore[attr-defined]
    "imag": imaginary,
    "swap": lambda d: after(lambda r: torch.utils.swap_tensors(r, d(V))),
    "sparse values": lambda d: torch.sparse_coo_tensor(INDEX[None], d(V), (3,)).to_dense(),
    "sparse places": lambda d: torch.sparse_coo_tensor(d(INDEX[None]), V, (3,)).to_dense(),
    "sparse list": lambda d: torch.sparse_coo_tensor(INDEX[None], [d(ONE)] * 3).to_dense(),
    "csr values": lambda d: torch.sparse_csr_tensor(ROWS, INDEX, d(V), (1, 3)).to_dense(),
    "csr rows": lambda d: torch.sparse_csr_tensor(d(ROWS), INDEX, V, (1, 3)).to_dense(),
    "compressed": lambda d: torch.sparse_compressed_tensor(
        ROWS, INDEX, d(V), (1, 3), layout=torch.sparse_csr
    ).to_dense(),
    "nested": lambda d: torch.nested.nested_tensor([d(V)]).to_padded_tensor(0),
    "as nested": lambda d: torch.nested.as_nested_tensor([d(V)], layout=torch.jagged).values(),
    "nested parts": lambda d: torch._nested_tensor_from_tensor_list([d(V)]),  # type: ignore[attr-defined]
    "quantized": lambda d: torch.quantize_per_tensor(d(V), 0.1, 0, torch.qint8).dequantize(),
    "scale": lambda d: torch.quantize_per_tensor(
        V, d(torch.tensor(0.1)), d(torch.tensor(0)), torch.qint8
    ).dequantize(),
    "channels": lambda d: torch.quantize_per_channel(
        torch.ones(3, 2), d(V), d(INDEX), 0, torch.qint8
    ).dequantize(),
    "tensor": lambda d: torch.tensor(d(V)),
    "tensor of a list": lambda d: torch.tensor([d(ONE), 1.0]),
    "as_tensor": lambda d: torch.as_tensor(d(V), dtype=torch.float64),
    "asarray": lambda d: torch.asarray(d(V), dtype=torch.float64),
    "new_tensor": lambda d: V.new_tensor(d(V)),
    "new_tensor of a list": lambda d: d(V).new_tensor([d(ONE), 1.0]),
    "new_tensor of lists": lambda d: d(V).new_tensor([[d(ONE)], (d(ONE),)]),
    "new_tensor of vectors": lambda d: d(V).new_tensor([d(V)]),
    "regular new_tensor": lambda d: V.new_tensor([d(ONE), 1.0]),
    "new": lambda d: V.new([d(ONE)]),
    "FloatTensor": lambda d: torch.FloatTensor(d(V)),
    "FloatTensor of a list": lambda d: torch.FloatTensor([d(ONE)]),
    "FloatStorage": lambda d: torch.tensor(torch.FloatStorage([d(ONE)])),
    "set_": lambda d: after(lambda r: r.set_(d(V))),
    "set_ of a storage": lambda d: after(lambda r: r.set_(d(V).untyped_storage(), 0, (3,), (1,))),
    "dlpack": lambda d: torch.from_dlpack(d(V)),
    "to_dlpack": lambda d: torch.from_dlpack(torch.utils.dlpack.to_dlpack(d(V))),
    "_to_dlpack": lambda d: torch.from_dlpack(torch._C._to_dlpack(d(V))),
    "numpy's dlpack": lambda d: torch.as_tensor(np.from_dlpack(d(V)).copy()),
    "np.array": lambda d: torch.as_tensor(np.array([d(V), d(V)])),
    "np.array of numbers": lambda d: torch.as_tensor(np.array([d(ONE)])),
    "buffer": lambda d: torch.frombuffer(d(V), dtype=torch.float32),
    "index list": lambda d: V[[d(INDEX)]],
    "assignment": lambda d: after(lambda r: r.__setitem__(0, d(ONE))),
    "copy_": lambda d: after(lambda r: r.copy_(d(V))),
    "aten": lambda d: torch.ops.aten.add.Tensor(V, d(V)),
    "full": lambda d: torch.full((2,), d(ONE)),
    "state of a generator": state,
    "grad_outputs": grad_outputs,
    "hook of a leaf": lambda d: hooked(lambda x, y: x.register_hook(lambda g: d(V))),
    "hook": lambda d: hooked(lambda x, y: y.register_hook(lambda g: d(V))),
    "hook of a node": lambda d: hooked(lambda x, y: y.grad_fn.register_prehook(lambda g: (d(V),))),
    "saved": saved,
    "custom function": by_custom,
}
RIGHT = {  # no error is expected here
    "as_tensor", "asarray", "tensor", "tensor of a list", "new_tensor", "new_tensor of a list",
    "new_tensor of lists", "regular new_tensor", "np.array", "copy_", "aten",
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@on_ranks(2)
def test_no_function_below_torch_function_reads_a_placeholder(inference: bool) -> None:
    mesh = dt.init_mesh((2,), ("a",))

    def placed(value: Tensor) -> Any:
        return dt.shard_tensor(value, mesh, [dt.Shard(0) if value.ndim else dt.Replicate()])

    wrong: list[str] = []
    for name, program in PROGRAMS.items():
        with torch.inference_mode(inference), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                want = program(lambda value: value.clone())
            except Exception:
                want = None  # torch refuses it
            try:
                got = full(program(placed))
            except Exception as error:
                if name in RIGHT and want is not None:
                    wrong.append(f"{name}: {error}")
                continue
            if want is not None and not torch.equal(torch.as_tensor(got), want):
                wrong.append(f"{name}: {got}, and {want} is right")
            elif want is None and not torch.as_tensor(got).isfinite().all():
                wrong.append(f"{name}: {got}")
    assert not wrong, "\n".join(wrong)
