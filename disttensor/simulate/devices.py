"""Devices and networks: of a few by their makers' data sheets, of this machine by measuring."""

from __future__ import annotations

import torch

from disttensor.simulate.device import Device as Device
from disttensor.simulate.measure import measure as measure
from disttensor.simulate.measure import measure_network as measure_network
from disttensor.simulate.network import Link as Link
from disttensor.simulate.network import Network as Network

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
