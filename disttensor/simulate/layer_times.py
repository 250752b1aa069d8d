"""How long the forward of each layer takes by the simulator's estimates of kernels: what
``balance="time"`` of ``pipeline.split`` goes by. A backward takes about as much longer for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from disttensor.pipeline.partition import BALANCES, Layers
from disttensor.pytree import find_tensors, replace_tensors
from disttensor.simulate import shapes
from disttensor.simulate.devices import H100, Device
from disttensor.tensor.base import MeshTensor
from disttensor.torch_private import TorchDispatchMode, fake_mode

Tensor = torch.Tensor
ROWS = 4096  # of a micro-batch, without a sample


def layer_times(
    layers: Layers, of: nn.Module | None = None, sample: Any = None, device: Device = H100
) -> list[float]:
    """Seconds of the forward of each of ``layers``. ``sample``: what the model ``of`` them is
    called with, a tuple, or a dict of named arguments; its tensors are read by shape and dtype
    only. Without it each layer is taken to multiply ROWS rows by its matrices, and to read and
    write them for its norms and embeddings."""
    if sample is None or of is None:
        return [_of_parameters(layer, device) for _, layer in layers]
    if isinstance(sample, Mapping):
        args, kwargs = (), dict(sample)
    elif isinstance(sample, tuple):
        args, kwargs = sample, {}
    else:
        raise TypeError(
            f"pipeline.split: sample={type(sample).__name__}: what the model is called with is "
            "expected: a tuple of its arguments, or a dict of named ones"
        )
    if any(isinstance(t, MeshTensor) for t in find_tensors((args, kwargs))):
        raise TypeError("pipeline.split: sample: plain tensors, of one micro-batch on one rank")
    timed = _Timed(device)
    with fake_mode(), torch.no_grad(), timed.layers(layers):
        state: dict[str, Tensor] = {}
        state.update(of.named_parameters(remove_duplicate=False))
        state.update(of.named_buffers(remove_duplicate=False))
        fakes = {id(t): _like(t) for t in state.values()}
        own = {name: fakes[id(t)] for name, t in state.items()}
        args, kwargs = replace_tensors((args, kwargs), lambda x: _like(x) if _is_plain(x) else x)
        try:
            with timed:
                functional_call(of, own, args, kwargs)
        except Exception as error:
            raise ValueError(
                "pipeline.split: balance='time': the model does not run on tensors without data "
                f"of the shapes in sample: {type(error).__name__}: {error}"
            ) from error
    return [max(timed.device_time[i], timed.host_time[i]) for i in range(len(layers))]


def _of_parameters(layer: nn.Module, device: Device) -> float:
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


class _Timed(TorchDispatchMode):
    """Adds up the kernels of the layer that runs."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.device_time: list[float] = []
        self.host_time: list[float] = []
        self._running: list[int] = []

    @contextmanager
    def layers(self, layers: Layers) -> Iterator[None]:
        self.device_time, self.host_time = [0.0] * len(layers), [0.0] * len(layers)
        hooks = []
        for i, (_, layer) in enumerate(layers):
            hooks += [
                layer.register_forward_pre_hook(lambda *_, i=i: self._running.append(i)),
                layer.register_forward_hook(lambda *_: self._ends(), always_call=True),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _ends(self) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._running:
            cost = shapes.cost(func, args, kwargs or {}, out)
            if not cost.views:
                i = self._running[-1]
                self.device_time[i] += self.device.seconds(cost.flops, cost.nbytes, cost.dtype)
                self.host_time[i] += self.device.launch
        return out


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor)


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")


BALANCES["time"] = layer_times
