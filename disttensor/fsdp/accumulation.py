"""Gradient accumulation over several backwards: segments whose reduction waits for the last one.

Micro-batches may reach different parameters. A segment that the last backward does not reach is
reduced when its ``accumulate`` ends, on all ranks in the order of definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from disttensor.autograd.accumulation import BackwardContext
from disttensor.checks import check_bool
from disttensor.fsdp.backward import ReduceOrder
from disttensor.fsdp.reduce import Reduction
from disttensor.fsdp.segment import Segment
from disttensor.nn.shard_module import check_module
from disttensor.tensor.dist_tensor import DistTensor

ENGINE = "_data_parallel"  # the attribute of a module that holds its Engine


class Accumulation:
    """The state between the backwards of one accumulation.

    deferred  segments whose gradients wait for the last micro-batch; ``reduce`` reduces the
              gradients of one segment completely
    """

    def __init__(self, reduce: Callable[[Segment], list[Reduction]]) -> None:
        self.reduce = reduce
        self.deferred: set[Segment] = set()

    def after(self, backward: ReduceOrder, context: BackwardContext) -> None:
        """Updates the deferred segments after a backward."""
        if context.is_last:
            self.deferred.difference_update(backward.entered)
            return
        self.deferred.update(backward.entered)
        for param in [p for s in backward.entered for p in s.copied]:
            if param.collects:
                param.collect()

    def flush(self) -> None:
        """Reduces the deferred segments, when the accumulation ends or gradients are about to be
        read."""
        for segment in sorted(self.deferred, key=lambda s: s.index):
            for steps in self.reduce(segment):
                for work in steps:
                    work.wait()
            self.deferred.discard(segment)


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
    engines = [m.__dict__[ENGINE] for m in module.modules() if ENGINE in m.__dict__]
    if not engines and not any(isinstance(p, DistTensor) for p in module.parameters()):
        raise ValueError(
            f"accumulate: {type(module).__name__} holds no DistTensor: give the module that "
            "shard_data_parallel gave"
        )
    before = [engine.context for engine in engines]
    for engine in engines:
        engine.context = BackwardContext(last, reduce)
    try:
        yield
        for engine in engines if last else ():
            engine.flush()
    finally:
        for engine, context in zip(engines, before, strict=True):
            engine.context = context
