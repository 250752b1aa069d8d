"""Devices and networks: the costs of kernels, collectives and messages.

The time of a kernel is the longer one of the times of its arithmetic and of its memory traffic:
Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 2009.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from disttensor.checks import (
    argument_error,
    check_dtype,
    check_duration,
    check_int,
    check_positive,
    check_shape,
    check_type,
)
from disttensor.simulate.events import Op

_KERNELS = "a dict {(name of an operator, dtype): factor}"


@dataclass(frozen=True, kw_only=True)
class Device:
    """The costs of a device and of its host. Times are in seconds.

    Args:
        name: for reports and errors
        peak: floating-point operations per second, by dtype
        bandwidth: bytes per second of its memory
        memory: bytes of its memory; None: not known
        launch: time of the host for a kernel
        efficiency: the part of the peak that matrix products reach
        type: "cuda", or "cpu", whose host waits for each kernel. Torch chooses kernels by it
        sharing: ranks per physical device. While k of them compute, each runs at 1/k speed
        visit: time of the host for a forward or backward of a micro-batch in a pipeline run
        post: time of the host for a collective, and for sending or receiving a message
        gradient: time of the host for a sharded parameter in each backward: gather and reduction
        tiles: queries and keys of a tile of an attention; a causal one skips the tiles above the
            diagonal
        kernels: real time / roofline of kernels that deviate, by name of the operator and dtype

    >>> a_card = dt.simulate.devices.Device(
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
    type: str = "cuda"
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
        if self.type not in ("cuda", "cpu"):
            raise argument_error("Device: type", self.type, '"cuda" or "cpu"', ValueError)
        if len(check_shape("Device: tiles", self.tiles, 1)) != 2:
            raise argument_error("Device: tiles", self.tiles, "a pair of sizes", ValueError)
        check_type("Device: kernels", self.kernels, Mapping, _KERNELS)
        for kernel, times in self.kernels.items():
            check_type("Device: kernels: key", kernel, tuple, _KERNELS)
            check_positive(f"Device: kernels of {kernel}", times, _KERNELS)

    @property
    def asynchronous(self) -> bool:
        """Whether the host runs ahead of the device."""
        return self.type != "cpu"

    @property
    def backend(self) -> str:
        """The backend of torch.distributed for tensors on this device."""
        return "nccl" if self.asynchronous else "gloo"

    def seconds(
        self, flops: float, nbytes: float, dtype: torch.dtype, where: str = "the program"
    ) -> float:
        """Returns the time of a kernel on the device. Raises ValueError for a dtype without a peak.
        ``where``: the kernel, in the error."""
        if not flops:
            return nbytes / self.bandwidth
        if dtype not in self.peak:
            known = ", ".join(map(str, self.peak))
            raise ValueError(
                f"the device {self.name!r} has no peak for {dtype}, in which {where} computes; "
                f"it has peaks for {known}. Add one: dataclasses.replace(device, "
                f"peak={{**device.peak, {dtype}: ...}}), or compute in another dtype"
            )
        return max(flops / (self.peak[dtype] * self.efficiency), nbytes / self.bandwidth)

    def kernel(self, op: Op, share: float = 1.0) -> float:
        """Returns the time of a recorded operator, or of one that does a ``share`` of its work."""
        flops = op.flops * share * (_computed(*op.causal, *self.tiles) if op.causal else 1.0)
        where = f"{op.name} at {op.where}"
        seconds = self.seconds(flops, op.nbytes * share, op.dtype, where)
        return seconds * self.kernels.get((op.name, op.dtype), 1.0) if self.kernels else seconds

    def seconds_of(self, ops: Sequence[Op], share: float = 1.0) -> tuple[float, float]:
        """Returns the time of operators one after the other, or of a ``share`` of their work, and
        for how long the host is idle meanwhile."""
        device, host = sum(self.kernel(op, share) for op in ops), len(ops) * self.launch
        if not self.asynchronous:
            return device + host, 0.0
        return max(device, host), max(device - host, 0.0)


@cache
def _computed(queries: int, keys: int, rows: int, columns: int) -> float:
    """Returns the part of the tiles of an attention that are not wholly above its diagonal."""
    ends = range(rows, queries + rows, rows)  # of rows of tiles
    done = sum(min(-(-end // columns) * columns, keys) * rows for end in ends)
    return min(1.0, done / (len(ends) * rows * keys))


@dataclass(frozen=True)
class Link:
    """A connection of two ranks. ``bandwidth``: bytes per second that a rank sends while it
    receives as many; ``latency``: seconds until the first byte arrives."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        check_positive("Link: bandwidth", self.bandwidth, "bytes per second")
        check_positive("Link: latency", self.latency, "seconds")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The costs of collectives and messages. Rank r is on node ``r // ranks_per_node``. The default
    is a DGX H100: NVLink within a node, one adapter of 400 Gb/s for each rank between nodes.

    Args:
        ranks_per_node: ranks of one node
        within: the link of two ranks of one node
        between: the link of two ranks of different nodes
        processor: if a rank's own processor copies the bytes, as with gloo on CPUs: the bytes that
            it copies per second, and its seconds for each transfer. Ranks that share a device
            (``Device.sharing``) compute less meanwhile

    >>> network = dt.simulate.devices.Network(ranks_per_node=4)
    >>> network.crosses([0, 1]), network.crosses([3, 4])
    (False, True)
    """

    ranks_per_node: int = 8
    within: Link = Link(450e9, 3e-6)
    between: Link = Link(50e9, 8e-6)
    processor: Link | None = None

    def __post_init__(self) -> None:
        check_int("Network: ranks_per_node", self.ranks_per_node, 1, "a number of ranks")
        for name in ("within", "between", "processor"):
            if (link := getattr(self, name)) is not None or name != "processor":
                check_type(f"Network: {name}", link, Link, "a Link")

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Returns True if the ranks are on several nodes."""
        return len({self.node(r) for r in ranks}) > 1

    def collective(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Returns the seconds of a collective in which each rank sends ``nbytes``, with the
        bandwidth of rings, and with the smaller latency of rings and trees.

        Between nodes all ranks of the group on one node send at once: Thakur, Rabenseifner and
        Gropp, "Optimization of collective communication operations in MPICH", 2005."""
        on = Counter(self.node(r) for r in ranks)
        nodes, local = len(on), max(on.values())
        ring = self.within.latency * (local - 1) + self.between.latency * (nodes - 1)
        tree = self.within.latency * math.ceil(math.log2(local)) + (
            self.between.latency * math.ceil(math.log2(nodes))
        )
        latency = min(ring, tree) * (2 if kind == "all_reduce" else 1)
        bandwidth = self.within.bandwidth
        if nodes > 1:
            across = self.between.bandwidth * min(on.values())
            bandwidth = across if local == 1 else min(bandwidth, across)
        return latency + nbytes / bandwidth

    def work(self, nbytes: float) -> float:
        """Returns the seconds for which a transfer occupies the processor of a rank."""
        own = self.processor
        return own.latency + nbytes / own.bandwidth if own is not None else 0.0

    def message(self, nbytes: float, sender: int, receiver: int) -> float:
        """Returns the seconds of a message."""
        link = self.between if self.crosses((sender, receiver)) else self.within
        return link.latency + nbytes / link.bandwidth


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
H200 = replace(H100, name="H200", bandwidth=4.8e12, memory=141e9)
NAMED = {d.name.lower(): d for d in (A100, H100, H200)}
