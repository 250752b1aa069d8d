"""What a device can do: a roofline. Of a few by their makers' data sheets, of this machine by
measuring.

A kernel takes the longer of two times, that of its arithmetic and that of its memory traffic:
Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from disttensor import arguments
from disttensor.simulate.network import Link as Link
from disttensor.simulate.network import Network as Network


@dataclass(frozen=True, kw_only=True)
class Device:
    """``peak``: floating-point operations per second, by dtype, of which matrix products reach
    ``efficiency``. ``bandwidth``: bytes per second of its memory, of which there are ``memory``
    bytes (None: not known). ``launch``: seconds that the host spends on a kernel, beside the device
    where it is ``asynchronous``, before each kernel where not. ``sharing``: so many ranks share it,
    as four do on two cores: one computes at full speed while the others wait, and all of them at
    half of it.

    >>> a_card = dt.devices.Device(
    ...     name="a card", peak={torch.float32: 1e12}, bandwidth=1e11, memory=8e9, launch=5e-6
    ... )
    >>> a_card.seconds(flops=2e9, nbytes=1e6, dtype=torch.float32)
    0.004
    """

    name: str
    peak: Mapping[torch.dtype, float]
    bandwidth: float
    memory: float | None = None
    launch: float = 5e-6
    efficiency: float = 0.5
    asynchronous: bool = True
    sharing: float = 1.0

    def __post_init__(self) -> None:
        for dtype, flops in self.peak.items():
            arguments.a_dtype("Device: peak", dtype)
            arguments.positive(f"Device: peak of {dtype}", flops, "FLOP per second")
        arguments.positive("Device: bandwidth", self.bandwidth, "bytes per second")
        arguments.positive("Device: efficiency", self.efficiency, "a share of the peak, up to 1")
        arguments.positive("Device: sharing", self.sharing, "a number of ranks")

    @property
    def backend(self) -> str:
        """Of torch.distributed, for tensors on it."""
        return "nccl" if self.asynchronous else "gloo"

    def seconds(self, flops: float, nbytes: float, dtype: torch.dtype) -> float:
        """How long a kernel runs on the device. Raises ValueError for a dtype without a peak."""
        if not flops:
            return nbytes / self.bandwidth
        if dtype not in self.peak:
            known = ", ".join(map(str, self.peak))
            raise ValueError(
                f"the device {self.name!r} has no peak for {dtype}, in which the program computes; "
                f"it has those of {known}. Give one: dataclasses.replace(device, "
                f"peak={{**device.peak, {dtype}: ...}}), or compute in another dtype"
            )
        return max(flops / (self.peak[dtype] * self.efficiency), nbytes / self.bandwidth)


_HALF = (torch.bfloat16, torch.float16)

# Dense peaks, without sparsity: NVIDIA's data sheets of A100 (2021), H100 (2023) and H200 (2024),
# SXM. float32 as torch computes by default, without TF32.
A100 = Device(
    name="A100",
    peak=dict.fromkeys(_HALF, 312e12) | dict.fromkeys((torch.float32, torch.float64), 19.5e12),
    bandwidth=2.039e12, memory=80e9,
)  # fmt: skip
H100 = Device(
    name="H100", peak=dict.fromkeys(_HALF, 989e12) | {torch.float32: 67e12, torch.float64: 67e12},
    bandwidth=3.35e12, memory=80e9,
)  # fmt: skip
H200 = Device(
    name="H200", peak=dict.fromkeys(_HALF, 989e12) | {torch.float32: 67e12, torch.float64: 67e12},
    bandwidth=4.8e12, memory=141e9,
)  # fmt: skip
NAMED = {d.name.lower(): d for d in (A100, H100, H200)}


def measure(seconds: float = 0.2) -> Device:
    """This machine's CPU as a Device, with torch's present number of threads: matrix products of
    each dtype, a copy that does not fit into a cache, an addition of one element. Each is repeated
    for ``seconds`` and the fastest counts; all take a few times that.

    >>> here = dt.devices.measure(seconds=0.001)
    >>> here.name, here.asynchronous, here.peak[torch.float32] > 0 < here.launch
    ('cpu', False, True)
    """
    arguments.positive("devices.measure: seconds", seconds, "a positive number of seconds")
    n, elements = 512, 1 << 23
    peak = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
        peak[dtype] = 2.0 * n**3 / _fastest(lambda a=a, b=b: a @ b, seconds)  # type: ignore[misc]
    source, target = torch.ones(elements), torch.empty(elements)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source), seconds)
    one = torch.ones(1)
    launch = _fastest(lambda: one + one, seconds)
    return Device(
        name="cpu", peak=peak, bandwidth=bandwidth, launch=launch, efficiency=1.0,
        asynchronous=False,
    )  # fmt: skip


def _fastest(run: Callable[[], object], seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    run()
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best
