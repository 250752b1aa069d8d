"""How long collectives and messages take: latency and bandwidth, within and between nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from disttensor.checks import check_int, check_positive, check_type


@dataclass(frozen=True)
class Link:
    """``bandwidth``: bytes per second that one rank sends while it receives as much; ``latency``:
    seconds until the first byte is there."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        check_positive("Link: bandwidth", self.bandwidth, "bytes per second")
        check_positive("Link: latency", self.latency, "seconds")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Rank r is on node ``r // ranks_per_node``. By default as in a DGX H100: NVLink within a node,
    one adapter of 400 Gb/s for each rank between nodes. ``processor``: where no adapter carries
    bytes but the rank's own processor, as with gloo on CPUs, the seconds that it works on each
    transfer, and the bytes that it moves in a second; None: nothing. Ranks that share a device
    (``Device.sharing``) compute less meanwhile.

    >>> network = dt.devices.Network(ranks_per_node=4)
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
        """Are they on several nodes?"""
        return len({self.node(r) for r in ranks}) > 1

    def collective(self, kind: str, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective in which each rank puts ``nbytes`` on the wire: rings for the
        bytes, and of rings and trees the one with the smaller latency.

        Between nodes all ranks of the group on one node send at once: Thakur, Rabenseifner and
        Gropp, "Optimization of collective communication operations in MPICH", 2005.
        """
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
        """Seconds for which a collective or a message keeps the processor of a rank busy."""
        own = self.processor
        return own.latency + nbytes / own.bandwidth if own is not None else 0.0

    def message(self, nbytes: float, sender: int, receiver: int) -> float:
        """Seconds from one rank to another."""
        link = self.between if self.crosses((sender, receiver)) else self.within
        return link.latency + nbytes / link.bandwidth
