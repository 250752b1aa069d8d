"""Kernels of this machine that take longer than the roofline of a Device says, or not as long.

The roofline knows the fastest products of matrices, and copies into memory that is there. An
exponential is arithmetic without FLOPs, attention in half precision is far from the products, and
memory that is asked for comes page by page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from disttensor.simulate import shapes
from disttensor.simulate.device import Device
from disttensor.simulate.events import Op
from disttensor.simulate.reference_step import reference_step, world_of_one
from disttensor.torch_private import TorchDispatchMode

_STEPS = 2
_WIDTH, _ROWS = 256, 512
_SLOW = 2e10  # FLOP per second, below which a quarter of the rows has to do
_SHORT = 2e-5  # seconds of a kernel: of a shorter one most is what the host takes
_PARTS, _PART = 16, 1 << 17  # tensors that are put into one, and elements of each


def slower(
    device: Device, clock: Callable[[], float], together: bool
) -> Mapping[tuple[str, torch.dtype], float]:
    """How many times as long as ``device`` says the kernels of a training step take, each by its
    name and dtype, in float32 and under autocast."""
    timer = _Timer(clock)
    with world_of_one(together):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows = _ROWS if device.peak[dtype] > _SLOW else _ROWS // 4
            step = reference_step(_WIDTH, rows, 1, None if dtype is torch.float32 else dtype)
            step()
            with timer:
                for _ in range(_STEPS):
                    step()
                    _gathers(dtype)
    return dict(timer.slower(device))


def _gathers(dtype: torch.dtype) -> None:
    """What buffers of parameters and gradients are made by, as fsdp does it."""
    parts = [torch.ones(_PART, dtype=dtype) for _ in range(_PARTS)]
    buffer = torch.empty(_PARTS * _PART, dtype=dtype)
    torch._foreach_copy_(buffer.split(_PART), parts)
    torch._chunk_cat(parts, 0, 4)
    torch.split_with_sizes_copy(buffer, [_PART] * _PARTS, out=parts)


class _Timer(TorchDispatchMode):
    """Seconds of each kernel, and those of one that has nothing to do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.times: dict[Op, list[float]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = self.clock()
        out = func(*args, **kwargs)
        took = self.clock() - start
        if func.namespace == "aten":
            cost = shapes.cost(func, args, kwargs, out)
            if not cost.views:
                name = func._overloadpacket.__name__
                op = Op(name, cost.flops, cost.nbytes, cost.dtype, "", "", "", cost.causal)
                self.times[op].append(took)
        return out

    def slower(self, device: Device) -> Iterator[tuple[tuple[str, torch.dtype], float]]:
        call = min(min(times) for times in self.times.values())  # nothing but torch's dispatch
        real: dict[Any, float] = defaultdict(float)
        said: dict[Any, float] = defaultdict(float)
        for op, times in self.times.items():
            seconds = device.kernel(op) if op.dtype in device.peak or not op.flops else 0.0
            if seconds > _SHORT:
                real[op.name, op.dtype] += sum(times) - call * len(times)
                said[op.name, op.dtype] += seconds * len(times)
        for key, seconds in said.items():
            yield key, real[key] / seconds
