"""Estimates how long the forward of each layer takes, for ``balance="time"`` of
``pipeline.split``. The time of a backward is proportional."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call

from disttensor.pipeline.partition import BALANCES, Layers
from disttensor.pytree import find_tensors, replace_tensors
from disttensor.simulate.devices import H100, Device
from disttensor.simulate.events import Op
from disttensor.simulate.recorder import StepRecorder
from disttensor.tensor.base import MeshTensor
from disttensor.torch_private import fake_mode

Tensor = torch.Tensor
ROWS = 4096  # of a micro-batch, without a sample


def layer_times(
    layers: Layers, of: nn.Module | None = None, sample: Any = None, device: Device = H100
) -> list[float]:
    """Returns the seconds of the forward of each layer.

    Args:
        layers: names and modules.
        of: the model of the layers.
        sample: the arguments of the model, a tuple, or a dict of named arguments; only shapes and
            dtypes of its tensors are read. Default: each layer multiplies ROWS rows by its
            matrices, and reads and writes them for its norms and embeddings.
        device: the costs of kernels.
    """
    if sample is None or of is None:
        return [_time_of_parameters(layer, device) for _, layer in layers]
    if not isinstance(sample, Mapping | tuple):
        raise TypeError(
            f"pipeline.split: sample={type(sample).__name__}: the arguments of the model are "
            "expected: a tuple of its arguments, or a dict of named ones"
        )
    if any(isinstance(t, MeshTensor) for t in find_tensors(sample)):
        raise TypeError("pipeline.split: sample: regular tensors, of one micro-batch on one rank")
    with fake_mode(), torch.no_grad():
        parameters = of.named_parameters(remove_duplicate=False)
        state = dict(parameters) | dict(of.named_buffers(remove_duplicate=False))
        fakes = {id(t): _like(t) for t in state.values()}
        own = {name: fakes[id(t)] for name, t in state.items()}
        sample = replace_tensors(sample, _like)
        args, kwargs = ((), dict(sample)) if isinstance(sample, Mapping) else (sample, {})
        recorder = StepRecorder(_refuse_to_read)
        recorder.layers.watch(module for _, module in layers)
        try:
            with recorder.running():
                recorder.start()
                functional_call(of, own, args, kwargs)
        except Exception as error:
            raise ValueError(
                "pipeline.split: balance='time': the model does not run on tensors without data "
                f"of the shapes in sample: {type(error).__name__}: {error}"
            ) from error
    ops: defaultdict[nn.Module, list[Op]] = defaultdict(list)
    for module, start, end, *_ in recorder.layers.calls:
        ops[module] += [e for e in recorder.log[start:end] if isinstance(e, Op)]
    return [device.seconds_of(ops[layer])[0] for _, layer in layers]


def _refuse_to_read(line: str) -> NoReturn:
    raise ValueError(f"{line} reads data")


def _time_of_parameters(layer: nn.Module, device: Device) -> float:
    total = 0.0
    for part in layer.modules():
        own = [p for p in part.parameters(recurse=False) if p.is_floating_point()]
        matrices = [p for p in own if p.ndim > 1]
        for p in matrices or own:
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                flops, elements = 0, 2 * ROWS * p.shape[-1]
            elif p.ndim > 1:
                flops = 2 * ROWS * p.numel()
                elements = p.numel() + ROWS * (p.shape[0] + p.shape[1])
            else:
                flops, elements = 0, 2 * ROWS * p.numel()
            total += device.seconds(flops, elements * p.itemsize, p.dtype)
    return total


def _like(x: Tensor) -> Tensor:
    """Returns an empty tensor on the CPU with the shape and strides of ``x``."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


BALANCES["time"] = layer_times
