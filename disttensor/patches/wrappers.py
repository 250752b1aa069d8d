"""Functions of torch that refuse DistTensors: DistributedDataParallel and FSDP take their pieces
for replicas, or cut them again; flex_attention compiles them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from disttensor.tensor.dist_tensor import DistTensor


def refusing_in(place: int) -> Callable[[Any], Any]:
    """Wraps a function whose argument number ``place`` is a module: DistTensors raise an error."""

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


def refusing_flex_attention(original: Any) -> Any:
    """Wraps the check of flex_attention's query, key and value."""

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, DistTensor):
                raise TypeError(
                    f"flex_attention of {x.spec!r}: torch compiles it together with its mask and "
                    "score functions, and cannot compile DistTensors. Run it on the pieces, split "
                    "over heads or rows of the batch: dt.local_map(lambda q, k, v: "
                    "flex_attention(q, k, v, block_mask=mask), in_placements=[[dt.Shard(1)]] * 3, "
                    "out_placements=[dt.Shard(1)])(q, k, v); its functions then count the heads "
                    "and rows of a piece. scaled_dot_product_attention takes DistTensors"
                )
        return original(*args, **kwargs)

    return run


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
