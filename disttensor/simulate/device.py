"""What a device can do: a roofline.

A kernel takes the longer of two times, that of its arithmetic and that of its memory traffic:
Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

from disttensor.checks import (
    argument_error,
    check_bool,
    check_dtype,
    check_duration,
    check_positive,
    check_shape,
    check_type,
)
from disttensor.simulate.events import Op

_KERNELS = "a dict {(name of an operator, dtype): factor}"


@dataclass(frozen=True, kw_only=True)
class Device:
    """``peak``: floating-point operations per second, by dtype, of which matrix products reach
    ``efficiency``. ``bandwidth``: bytes per second of its memory, of which there are ``memory``
    bytes (None: not known). ``launch``: seconds that the host spends on a kernel, beside the device
    where it is ``asynchronous``, before each kernel where not. ``sharing``: so many ranks share it,
    as four do on two cores: one computes at full speed while the others wait, and all of them at
    half of it. ``visit``: seconds that the host spends on each forward and backward of a
    micro-batch in a pipeline run, besides its kernels, and ``post`` on a collective and on a
    message, when it sends and when it asks for one, and ``gradient`` on each parameter in shards in
    each backward: on its gradient, and on gathering it. ``tiles``: so many queries and keys are an
    attention's kernel at a time: of a causal one those above the diagonal are left out.
    ``kernels``: those that take so many times as long as the roofline says, by the name of their
    operator and the dtype.

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
    visit: float = 2e-4
    post: float = 5e-5
    gradient: float = 3e-5
    tiles: tuple[int, int] = (128, 128)
    kernels: Mapping[tuple[str, torch.dtype], float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_type("Device: name", self.name, str, "a text")
        check_type("Device: peak", self.peak, Mapping, "a dict {dtype: FLOP per second}")
        for dtype, flops in self.peak.items():
            check_dtype("Device: peak", dtype)
            check_positive(f"Device: peak of {dtype}", flops, "FLOP per second")
        check_positive("Device: bandwidth", self.bandwidth, "bytes per second")
        check_positive("Device: efficiency", self.efficiency, "a share of the peak, up to 1")
        check_positive("Device: sharing", self.sharing, "a number of ranks")
        if self.memory is not None:
            check_positive("Device: memory", self.memory, "a number of bytes")
        for name in ("launch", "visit", "post", "gradient"):
            check_duration(f"Device: {name}", getattr(self, name))
        check_bool("Device: asynchronous", self.asynchronous)
        if len(check_shape("Device: tiles", self.tiles, 1)) != 2:
            raise argument_error("Device: tiles", self.tiles, "a pair of sizes", ValueError)
        check_type("Device: kernels", self.kernels, Mapping, _KERNELS)
        for kernel, times in self.kernels.items():
            check_type("Device: kernels: key", kernel, tuple, _KERNELS)
            check_positive(f"Device: kernels of {kernel}", times, _KERNELS)

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

    def kernel(self, op: Op, share: float = 1.0) -> float:
        """How long the kernel of a recorded operator runs, or of one that has a ``share`` of its
        work to do."""
        flops = op.flops * share * (_computed(*op.causal, *self.tiles) if op.causal else 1.0)
        seconds = self.seconds(flops, op.nbytes * share, op.dtype)
        return seconds * self.kernels.get((op.name, op.dtype), 1.0) if self.kernels else seconds


@cache
def _computed(queries: int, keys: int, rows: int, columns: int) -> float:
    """The part of the tiles of an attention that are not wholly above its diagonal."""
    ends = range(rows, queries + rows, rows)  # of rows of tiles
    done = sum(min(-(-end // columns) * columns, keys) * rows for end in ends)
    return min(1.0, done / (len(ends) * rows * keys))
