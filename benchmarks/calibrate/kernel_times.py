"""Measures the kernels of this machine that deviate from the roofline of a Device.

The roofline is made of the fastest matrix products, and of copies into allocated memory.
Exponentials are arithmetic that is not counted as FLOPs, attention in half precision is slower than
the products, and new memory is mapped page by page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from disttensor.simulate import shapes
from disttensor.simulate.devices import Device
from disttensor.simulate.events import Op
from disttensor.torch_private import TorchDispatchMode

from .reference_step import reference_step, world_of_one

_STEPS = 2
_WIDTH, _ROWS = 256, 512
_SLOW = 2e10  # FLOP per second; slower dtypes use a quarter of the rows
_SHORT = 2e-5  # seconds; most of a shorter kernel is time of the host
_PARTS, _PART = 16, 1 << 17  # tensors that are joined, and elements of each


def slower(
    device: Device, clock: Callable[[], float], together: bool
) -> Mapping[tuple[str, torch.dtype], float]:
    """Returns real time / time by ``device`` for the kernels of a training step, in float32 and
    under autocast."""
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
    """Runs the kernels with which fsdp fills its buffers."""
    parts = [torch.ones(_PART, dtype=dtype) for _ in range(_PARTS)]
    buffer = torch.empty(_PARTS * _PART, dtype=dtype)
    torch._foreach_copy_(buffer.split(_PART), parts)
    torch._chunk_cat(parts, 0, 4)
    torch.split_with_sizes_copy(buffer, [_PART] * _PARTS, out=parts)


class _Timer(TorchDispatchMode):
    """Records the seconds of each kernel."""

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
        call = min(min(times) for times in self.times.values())  # of torch's dispatch alone
        real: dict[Any, float] = defaultdict(float)
        expected: dict[Any, float] = defaultdict(float)
        for op, times in self.times.items():
            seconds = device.kernel(op) if op.dtype in device.peak or not op.flops else 0.0
            if seconds > _SHORT:
                real[op.name, op.dtype] += sum(times) - call * len(times)
                expected[op.name, op.dtype] += seconds * len(times)
        for key, seconds in expected.items():
            yield key, real[key] / seconds
