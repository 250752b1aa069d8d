"""Chooses the code that runs warm calls: ``native.c`` if it was compiled, else ``dispatch`` in
Python. The results are equal, bit for bit.

``DISTTENSOR_PYTHON=1`` in the environment chooses Python. In a checkout ``make native`` compiles; a
module compiled from another version of the file is not used.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from types import MethodDescriptorType
from typing import Any

import torch

from disttensor import callbacks
from disttensor.autograd import token
from disttensor.cache import call_when_cleared
from disttensor.comm import compare_programs
from disttensor.core.spec import DistSpec
from disttensor.dispatch import dispatch, outputs, run, writes
from disttensor.dispatch.call_plan import Answer, CallPlan
from disttensor.observe import observers
from disttensor.tensor import versions, views
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.uses import Uses
from disttensor.torch_private import (
    autocast_is_on,
    make_subclass,
    modes_see_functions,
    torch_functions_are_seen,
)
from ops.answer import TensorResult
from ops.registry import RULES, Rule

Tensor = torch.Tensor

_FILE = Path(__file__).with_name("native.c")

# Operators, and the methods that ``__torch_function__`` receives for them.
OPERATORS = {
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul",
    "__truediv__": "div", "__matmul__": "matmul", "__neg__": "neg", "__iadd__": "add_",
    "__isub__": "sub_", "__imul__": "mul_",
}  # fmt: skip
# Methods of DistTensor that run known calls without torch's argument parser.
METHODS = (
    "view", "reshape", "transpose", "permute", "t", "flatten", "expand", "expand_as", "squeeze",
    "unsqueeze", "select", "narrow", "chunk", "unbind", "contiguous", "clone", "to", "float",
    "type_as", "add", "sub", "mul", "div", "matmul", "mm", "bmm", "pow", "neg", "abs", "exp", "log",
    "sqrt", "rsqrt", "square", "sin", "cos", "tanh", "sigmoid", "relu", "clamp", "masked_fill",
    "sum", "mean", "var", "max", "argmax", "cumsum", "softmax", "log_softmax", "gather", "add_",
    "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_", "sqrt_", "zero_", "copy_", "fill_",
    *OPERATORS,
)  # fmt: skip


def _compiled() -> tuple[Any, str]:
    """Returns the C module and "", or None and the reason."""
    if os.environ.get("DISTTENSOR_PYTHON", "0") not in ("", "0"):
        return None, "DISTTENSOR_PYTHON is set"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "this Python runs without the GIL"
    try:
        found = import_module("disttensor.dispatch._native")
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            return None, str(error)
        here = _FILE.exists()
        return (
            None,
            f"it was not compiled: {'run make native' if here else 'no C compiler was found'}",
        )
    # a checkout has the file, an installed package does not
    if _FILE.exists() and f"{zlib.crc32(_FILE.read_bytes()):08x}" != found.SOURCE:
        return None, "it was compiled from another native.c: run make native"
    return found, ""


def _configure(module: Any) -> None:
    module.configure(
        DistTensor=DistTensor, Tensor=Tensor, Parameter=torch.nn.Parameter, Size=torch.Size,
        Uses=Uses, Generator=torch.Generator, RULES=RULES, integers=Rule.__dict__["integers"],
        dtype_class=torch.dtype, memory_format=torch.memory_format,
        layout=torch.layout, CallPlan=CallPlan, Answer=Answer, Out=TensorResult,
        local=DistTensor.__dict__["local"], spec=DistTensor.__dict__["spec"],
        meta_tensor=DistSpec.__dict__["meta_tensor"],
        shape=Tensor.shape, dtype=Tensor.dtype, requires_grad=Tensor.requires_grad,
        grad_fn=Tensor.grad_fn, is_leaf=Tensor.is_leaf,
        make_subclass=make_subclass, is_grad_enabled=torch.is_grad_enabled,
        autocast_is_on=autocast_is_on,
        functions_are_seen=torch_functions_are_seen, modes_see_functions=modes_see_functions,
        dispatch=dispatch.dispatch, first_call=dispatch.first_call, run_planned=run.run_planned,
        note=compare_programs.record_call, note_error=writes.note_error,
        wrap_outputs=outputs.wrap_outputs,
        derive=run.derive,
        written=writes.mark_written, count=versions.count, share=views.register_view,
        no_grad_token=token.no_grad_token, no_source_token=token.no_source_token, LIVE=views.LIVE,
    )  # fmt: skip
    call_when_cleared(module.plans.clear)
    for name in METHODS:
        of_tensor, function = getattr(Tensor, name), getattr(Tensor, OPERATORS.get(name, name))
        is_ours = getattr_static(DistTensor, name) is not getattr_static(Tensor, name)
        if type(of_tensor) is MethodDescriptorType and not is_ours:
            setattr(DistTensor, name, module.method(of_tensor, function))


module, why = _compiled()
if module is not None:
    _configure(module)
DistTensor.__torch_function__ = module.dispatch if module else classmethod(dispatch.dispatch)

_in_c = module is not None


def choose() -> None:
    """Runs calls in C, or in Python while an observer or a tracer needs to see them."""
    if module is not None:
        seen = any(o.sees_calls for o in observers)
        module.enable(_in_c and not seen and not dispatch.INTERCEPTORS)


def in_c() -> bool:
    return _in_c


def active() -> str:
    """Returns "C", or "Python" with the reason, as text for people."""
    return "C" if _in_c else f"Python ({why or 'chosen by native.using'})"


@contextmanager
def using(in_c: bool) -> Iterator[None]:
    """Runs warm calls in C or in Python within the block: for tests and measurements. Without the C
    module always in Python."""
    before = _in_c
    _choose(in_c and module is not None)
    try:
        yield
    finally:
        _choose(before)


def _choose(in_c: bool) -> None:
    global _in_c
    _in_c = in_c
    choose()


choose()
callbacks.on_observers.append(choose)
