"""DistributedDataParallel and FSDP take pieces of DistTensors for replicas, or cut them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from disttensor.tensor.dist_tensor import DistTensor


def refusing_in(place: int) -> Callable[[Any], Any]:
    """A wrapper of the function whose argument number ``place`` is the module to be wrapped."""

    def refusing(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if len(args) > place else kwargs.get("module")
            for module in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(module, torch.nn.Module):
                    _check(module, type(args[0]).__name__ if place else "fully_shard")
            return original(*args, **kwargs)

        return run

    return refusing


def _check(module: torch.nn.Module, who: str) -> None:
    for name, p in module.named_parameters():
        if isinstance(p, DistTensor):
            raise TypeError(
                f"{who} of a model of DistTensors ({name!r} is {p.spec!r}): its ranks are one "
                "program, and its gradients are reduced without a wrapper. Call the model as it "
                "is, on a batch that is split: dt.shard_tensor(batch, mesh, [dt.Shard(0)]). "
                "dt.shard_data_parallel(model, mesh, axis) shards its state and reduces during the "
                "backward. Trainers that wrap models have to find one process: docs/models.md"
            )
