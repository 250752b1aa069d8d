"""Places at which a program of the user may fail, and what must not be left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from disttensor import callbacks
from disttensor.autograd import accumulation, joined_backward, starts
from disttensor.fsdp import graph_hooks
from disttensor.fsdp.states import Pin
from disttensor.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    current_backward,
    top_saved_tensors_hooks,
)


class Failure(Exception):
    pass


class Interrupt(KeyboardInterrupt):
    pass


class Point:
    """``POINT("in a hook")`` raises there at the visit that ``armed`` says."""

    name, left, error = "", 0, None
    in_forward = False

    def __call__(self, name: str) -> None:
        if name == self.name:
            self.left -= 1
            if not self.left:
                raise self.error


POINT = Point()


@contextmanager
def armed(name: str, nth: int, error: type[BaseException]) -> Iterator[BaseException]:
    POINT.name, POINT.left, POINT.error = name, nth, error(name)
    try:
        yield POINT.error
    finally:
        POINT.name, POINT.error = "", None


def leftovers() -> dict[str, Any]:
    variables = {
        f"{module.__name__}.{name}": None if value.get(None) in ("auto", ()) else value.get(None)
        for key, module in sys.modules.items()
        if key.split(".")[0] in ("disttensor", "ops", "reshard")
        for name, value in vars(module).items()
        if isinstance(value, ContextVar)
    }
    return {
        **variables,
        "meta_path": len(sys.meta_path),
        "modes": (count_dispatch_modes(), count_function_modes()),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "backward": current_backward(),
        "saved tensors": top_saved_tensors_hooks(True),
        "accumulation": len(accumulation._stack),
        "joined": len(joined_backward._joined),
        "graphs": getattr(starts._thread, "graphs", None),
        "walks": len(graph_hooks._WALKS),
        "default": (torch.get_default_dtype(), torch.get_default_device()),
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {k: (v, after[k]) for k, v in before.items() if v != after[k]}


def at_rest(model: nn.Module) -> None:
    """Nothing is gathered, shown, under way or on a stack."""
    assert not callbacks.recompute_contexts()
    engine = model.__dict__.get("_data_parallel")
    if engine is None:
        return
    assert not engine.calls and not engine.all_calls and engine.backward is None
    for s in engine.segments + engine.off_mesh:
        assert not s.is_visible and not s.busy and Pin.BACKWARD not in s.pins, s.name
        assert not any(s.forward._begun.values()), s.name
        for b in s.buffers:
            assert s.persist or not b.is_gathered, s.name
            assert b._arriving is None, s.name
        for p in s.params:
            assert not p.is_copy or not p.has_grads(), p.name
            assert not p._accumulated, p.name
