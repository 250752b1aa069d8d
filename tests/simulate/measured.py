"""What a real rank sends, computes and holds in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import disttensor as dt
from disttensor import cache, runtime
from disttensor.comm import collectives, send_queue
from disttensor.simulate.memory import Memory, summary
from disttensor.simulate.recorder import StepRecorder

# Kernels of the CPU, which torch's counter leaves out.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v),
}  # fmt: skip


def measured(
    build: Callable[[str], Callable[[], None]], options: str
) -> tuple[list[dt.debugging.CommRecord], int, Memory, int]:
    """On a rank of a running world: the collectives of a step of ``build(options)``, its FLOPs by
    torch's own counter, its memory, of real tensors, in the second step, and the most bytes that it
    held there for messages under way."""
    dtype = torch.get_default_dtype()
    cache.clear_caches()  # plans of earlier tests: a first step keeps more than those that follow
    try:
        recorder = _Paced()
        with recorder.running(), recorder.pacing():
            step = build(options)
            step()
            recorder.start()
            recorder.held = 0
            step()
            recorder.stop()
        with dt.debugging.record_comms() as comms:
            step()
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            step()
    finally:
        torch.set_default_dtype(dtype)
    memory = summary(*recorder.step())
    return list(comms), counter.get_total_flops(), memory, recorder.held


def _under_way() -> int:
    """Bytes of messages that may not be delivered yet, and of room for those that are asked for
    ahead. A simulated message is delivered at once, where its program receives it."""
    queue = send_queue.QUEUE
    with queue.lock:
        sent = sum(buffer.nbytes for _, buffer, *_ in queue.open)
    return sent + sum(
        pending.message.nbytes for pending in runtime.current_runtime().early.values()
    )


class _Paced(StepRecorder):
    """Records real tensors, and takes a collective in the background as completed when another one
    has been started, as a simulation does. Otherwise the moment differs from run to run, and so
    does the moment at which buffers are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.started = self.held = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.started += func.namespace == "c10d"
        self.held = max(self.held, _under_way())
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def pacing(self) -> Iterator[None]:
        usual = collectives.start

        def start(*args: Any, **kwargs: Any) -> Any:
            work = usual(*args, **kwargs)
            before = self.started
            work._done = lambda: self.started > before
            return work

        collectives.start = start
        try:
            yield
        finally:
            collectives.start = usual
