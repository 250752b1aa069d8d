"""Contexts for a module under shard_data_parallel: gradients add up over several backwards, or
parameters stay gathered between forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from disttensor.autograd.accumulation import BackwardContext
from disttensor.checks import check_bool
from disttensor.fsdp.engine import ENGINE, engines
from disttensor.nn.shard_module import check_module
from disttensor.tensor.dist_tensor import DistTensor


@contextmanager
def accumulate(module: nn.Module, last: bool, reduce: str = "scatter") -> Iterator[None]:
    """Accumulates gradients of several micro-batches until the backward with ``last``.

    ``reduce="scatter"``: each backward reduce-scatters over the shard axis and adds to the sharded
    sum; only the last reduces over all other axes, after adding. ``"none"``: only the last
    communicates, and unsharded gradients are kept; ``p.grad`` is their sum so far, Partial on the
    shard axis too. An optimizer's step and ``sync_gradients`` reduce it if no last backward comes.
    Without this context every backward reduces completely. Micro-batches may reach different
    parameters. A segment that the last one does not reach is reduced when the context ends.

    >>> model = dt.shard_data_parallel(torch.nn.Linear(4, 1), mesh, shard_axis="dp")
    >>> for i, batch in enumerate(torch.ones(2, 3, 4)):
    ...     with dt.accumulate(model, last=i == 1):
    ...         model(dt.shard_tensor(batch, mesh, [dt.Shard(0), dt.Replicate()])).sum().backward()
    >>> model.bias.grad.item()
    6.0
    """
    if reduce not in ("scatter", "none"):
        raise ValueError(
            f'accumulate: reduce={reduce!r}: "scatter" (to shards each time) or "none" (all at the '
            "last)"
        )
    check_module("accumulate: module", module)
    check_bool("accumulate: last", last)
    own = [m.__dict__[ENGINE] for m in module.modules() if ENGINE in m.__dict__]
    if not own:
        _params_of("accumulate", module)
    before = [engine.context for engine in own]
    for engine in own:
        engine.context = BackwardContext(last, reduce)
    try:
        yield
        for engine in own if last else ():
            engine.flush()
    finally:
        for engine, context in zip(own, before, strict=True):
            engine.context = context


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
    params = _params_of("unshard", module)
    found = [
        segment
        for engine in engines()
        for segment in engine.segments
        if any(id(p.sharded_param) in params for p in segment.params)
    ]
    pin = object()
    for segment in found:
        segment.pins.add(pin)
    try:
        for segment in found:
            segment.start_gather()
        for segment in found:
            segment.finish_gather()
        yield
    finally:
        for segment in found:
            segment.pins.discard(pin)
            if not segment.is_visible and not segment.busy:
                segment.free()


def _params_of(who: str, module: nn.Module) -> set[int]:
    """Returns the ids of the DistTensors among the parameters. Raises ValueError for none."""
    params = {id(p) for p in module.parameters() if isinstance(p, DistTensor)}
    if not params:
        raise ValueError(
            f"{who}: {type(module).__name__} holds no DistTensor: give the module that "
            "shard_data_parallel gave, or one in it"
        )
    return params
