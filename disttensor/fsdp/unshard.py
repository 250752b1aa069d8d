"""unshard: keeps parameters gathered between forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from disttensor.fsdp.engine import engines
from disttensor.nn.shard_module import check_module
from disttensor.tensor.dist_tensor import DistTensor


@contextmanager
def unshard(module: nn.Module) -> Iterator[None]:
    """Gathers the parameters of ``module``, and keeps them gathered until the context ends.

    Forwards and backwards in it only gather after an optimizer's step or another write. Between
    forwards the module holds its shards, as always. ``module``: the module given to
    shard_data_parallel, a module in it, or one around several; parameters that share a segment with
    its parameters are gathered too. All ranks enter the context. Raises ValueError for a module
    without DistTensors.

    >>> model = dt.shard_data_parallel(torch.nn.Linear(4, 2), mesh, shard_axis="dp")
    >>> with dt.fsdp.unshard(model), dt.debugging.record_comms() as log:
    ...     results = [model(torch.ones(3, 4)) for _ in range(5)]
    >>> len(log)
    0
    """
    check_module("unshard: module", module)
    params = {id(p) for p in module.parameters() if isinstance(p, DistTensor)}
    if not params:
        raise ValueError(
            f"unshard: {type(module).__name__} holds no DistTensor: give the module that "
            "shard_data_parallel gave, or one in it"
        )
    found = [
        segment
        for engine in engines()
        for segment in engine.segments
        if any(id(p.sharded_param) in params for p in segment.params)
    ]
    for segment in found:
        segment.unsharded += 1
    try:
        for segment in found:
            segment.start_gather()
        for segment in found:
            segment.finish_gather()
        yield
    finally:
        for segment in found:
            segment.unsharded -= 1
            if not segment.is_visible and not segment.busy:
                segment.free()
