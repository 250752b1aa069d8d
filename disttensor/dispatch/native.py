"""Which code carries out warm calls: ``native.c`` where it was compiled, else ``dispatch`` in
Python. The results are the same, bit for bit.

``DISTTENSOR_PYTHON=1`` in the environment chooses Python. In a checkout ``make native`` compiles;
what was compiled of another state of the file is not used.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from typing import Any

import torch

from disttensor.autograd import activation_checkpoint, token
from disttensor.cache import call_when_cleared
from disttensor.comm import lone_failure, p2p, program
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Partial, Replicate, Shard
from disttensor.core.spec import DistSpec
from disttensor.dispatch import dispatch, outputs, reduction_cache, reshards, run, strict, writes
from disttensor.dispatch.call_plan import Answer, CallPlan, Origin
from disttensor.meta.infer import Out
from disttensor.runtime import current_runtime
from disttensor.tensor import grad_sync, versions, views
from disttensor.tensor.base import GradState
from disttensor.tensor.dist_tensor import SHORTCUTS, WRAP, DistTensor, carry_out_with, wrapped
from disttensor.tensor.reshard import TAPE
from disttensor.torch_private import (
    autocast_is_on,
    make_subclass,
    modes_see_functions,
    top_saved_tensors_hooks,
    torch_functions_are_seen,
    use_count,
)

Tensor = torch.Tensor

_FILE = Path(__file__).with_name("native.c")


def _compiled() -> tuple[Any, str]:
    """The module of C, or None and why there is none."""
    if os.environ.get("DISTTENSOR_PYTHON", "0") not in ("", "0"):
        return None, "DISTTENSOR_PYTHON is set"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "this Python runs without the global lock"
    try:
        found = import_module("disttensor.dispatch._native")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        return None, "it was not compiled: make native" if missing else str(error)
    # a checkout has the file, what is installed has not
    if _FILE.exists() and f"{zlib.crc32(_FILE.read_bytes()):08x}" != found.SOURCE:
        return None, "it was compiled of another native.c: make native"
    return found, ""


def _configure(module: Any) -> None:
    module.configure(
        DistTensor=DistTensor, Tensor=Tensor, Parameter=torch.nn.Parameter, Size=torch.Size,
        dtype_class=torch.dtype, memory_format=torch.memory_format, layout=torch.layout,
        GradState=GradState,
        local=DistTensor.__dict__["local"], spec=DistTensor.__dict__["spec"],
        idle=DistSpec.__dict__["idle"],
        shape=Tensor.shape, dtype=Tensor.dtype, requires_grad=Tensor.requires_grad,
        grad_fn=Tensor.grad_fn, grad=Tensor.grad, is_leaf=Tensor.is_leaf,
        version=Tensor._version,
        dist_grad=DistTensor.grad,
        meta_tensor=DistSpec.__dict__["meta_tensor"],
        make_subclass=make_subclass, is_grad_enabled=torch.is_grad_enabled,
        autocast_is_on=autocast_is_on, untyped_storage=Tensor.untyped_storage, use_count=use_count,
        top_saved_tensors_hooks=top_saved_tensors_hooks,
        functions_are_seen=torch_functions_are_seen, modes_see_functions=modes_see_functions,
        dispatch=dispatch.dispatch, first_call=dispatch.first_call, note=program.note,
        note_error=lone_failure.note_error,
        wrap_outputs=outputs.wrap_outputs, written=writes.written, share=views.share,
        CallPlan=CallPlan, Answer=Answer, Out=Out, carry_out=run.carry_out, derive=run.derive,
        no_origin=Origin.NONE, nothing=token.detached, orphan=token.orphan,
        remember=reduction_cache.remember, strict_depth=strict.strict.current,
        UNCOUNTED=versions.UNCOUNTED,
        LIVE=views.LIVE, INFERENCE=versions.INFERENCE,
        ProcessMesh=ProcessMesh, Replicate=Replicate, Shard=Shard, Partial=Partial,
        reshard=reshards.reshard, first_reshard=reshards.first_reshard,
        TAPE=TAPE, REGION=activation_checkpoint.INNERMOST, CHANNEL=p2p.CHANNEL,
        current_world=current_runtime,
    )  # fmt: skip
    call_when_cleared(module.clear)
    for name, method in module.methods().items():
        own = getattr_static(DistTensor, name) is not getattr_static(Tensor, name)
        if not own or name == "grad":
            setattr(DistTensor, name, method)
    SHORTCUTS.append(module.shortcuts)
    SHORTCUTS.append(lambda on: WRAP.__setitem__(0, module.wrap if on else wrapped))
    SHORTCUTS.append(
        lambda on: grad_sync.WAITING.__setitem__(0, module.waiting if on else grad_sync.waiting)
    )


module, why = _compiled()
if module is not None:
    _configure(module)

_in_c = module is not None

# Carries out ``dt.reshard(x, mesh, placements)`` of a DistTensor.
reshard: Callable[..., DistTensor] = module.reshard if _in_c else reshards.reshard


def carrier() -> Callable[..., Any]:
    """Returns the function that carries out calls of DistTensors while no tracer runs."""
    return module.dispatch if _in_c else dispatch.dispatch


def in_c() -> bool:
    return _in_c


def active() -> str:
    """Returns "C", or "Python" with the reason: for people."""
    return "C" if _in_c else f"Python ({why or 'asked for'})"


@contextmanager
def using(in_c: bool) -> Iterator[None]:
    """Carries out warm calls in C or in Python: for tests and measurements. Without C code, in
    Python."""
    before = _in_c
    _choose(in_c and module is not None)
    try:
        yield
    finally:
        _choose(before)


def _choose(in_c: bool) -> None:
    global _in_c, reshard
    _in_c, reshard = in_c, module.reshard if in_c else reshards.reshard
    carry_out_with(carrier())


carry_out_with(carrier())
