"""This machine as a Device, and what is between its ranks as a Network, by measuring.

Kernels are timed by the seconds that their processor works, so that it does not matter who else is
on it, collectives by the mean of many: the steps of ranks that share cores are made of such times,
and not of the fastest ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from disttensor.checks import check_bool, check_positive
from disttensor.comm import collectives
from disttensor.errors import CommError
from disttensor.simulate.device import Device
from disttensor.simulate.kernel_times import slower
from disttensor.simulate.network import Link, Network
from disttensor.simulate.reference_pipeline import of_collective, of_micro_batch
from disttensor.simulate.reference_step import of_gradient, of_kernel

_N = 512  # rows and columns of matrices: they do not fit into a first cache
_COPIED = 1 << 23  # elements: they do not fit into any
_TILES = 64, 512  # of torch's attention for the CPU
_SMALL, _LARGE = (1, 100), (1 << 18, 20)  # elements of a collective, and how often


def measure(seconds: float = 0.2, together: bool = False) -> Device:
    """This machine's CPU as a Device, also where there is an accelerator, with torch's present
    number of threads: of each dtype the three matrix products of a linear layer in a training step,
    and a copy that does not fit into a cache. Each is repeated for ``seconds``, and the fastest
    counts. By training steps on DistTensors, of this process alone, or ``together`` with all ranks
    of the running world, each of which has to call it then: ``kernels``, those that take longer, or
    not as long; ``launch``, what one takes besides, in Python and in torch; ``post``, ``gradient``
    and ``visit``, what is the host's elsewhere. The ranks of this machine share its cores
    (``Device.sharing``).

    >>> here = dt.devices.measure(seconds=0.001)
    >>> here.name, here.asynchronous, here.peak[torch.float32] > 0 < here.launch
    ('cpu', False, True)
    """
    check_positive("devices.measure: seconds", seconds, "a positive number of seconds")
    check_bool("devices.measure: together", together)
    peak = {
        dtype: 6.0 * _N**3 / _fastest(_products(dtype), seconds)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    }
    source, target = torch.ones(_COPIED), torch.empty(_COPIED)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source), seconds)
    found = Device(
        name="cpu", peak=peak, bandwidth=bandwidth, efficiency=1.0, asynchronous=False,
        sharing=max(1.0, _ranks_here() * torch.get_num_threads() / len(os.sched_getaffinity(0))),
        tiles=_TILES,
    )  # fmt: skip
    now = clock()
    found = replace(found, kernels=slower(found, now, together))
    found = replace(found, post=of_collective(now, together))
    found = replace(found, launch=_of_all(of_kernel(found, now, together), together))
    found = replace(found, gradient=_of_all(of_gradient(found, now, together), together))
    return replace(found, visit=of_micro_batch(found, now, together))


def clock() -> Callable[[], float]:
    """Seconds that this thread computes, which other processes do not add to; of several threads
    those that pass."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _products(dtype: torch.dtype) -> Callable[[], object]:
    """A layer's forward, the gradient of its input, that of its weight: they read their matrices in
    three ways, which do not all take as long."""
    x, weight, grad = (torch.ones(_N, _N, dtype=dtype) for _ in range(3))
    return lambda: (x @ weight.t(), grad @ weight, grad.t() @ x)


def _fastest(run: Callable[[], object], seconds: float) -> float:
    now, best, end = clock(), float("inf"), time.perf_counter() + seconds
    run()
    while True:
        start = now()
        run()
        best = min(best, now() - start)
        if time.perf_counter() > end:
            return best


def _of_all(seconds: float, together: bool) -> float:
    """The mean of all ranks, where they measure ``together``."""
    if not together or not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    return float(collectives.all_reduce(found, "avg", collectives.world_group()))


# Networks -----------------------------------------------------------------------------------------


def _ranks_here() -> int:
    """Ranks on this machine."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def measure_network() -> Network:
    """What is between the ranks of this world, as gloo brings it; every rank calls it, and all get
    the same. Small and large collectives of all ranks are repeated: by the mean of the small ones
    ``latency``, by that of the large ones ``bandwidth``, and by what other threads of a rank than
    the one that waits work meanwhile ``processor``. It takes a few seconds. Raises CommError in a
    world of one rank, and of another backend than gloo."""
    group = collectives.world_group()
    if group.size == 1 or "gloo" not in dist.get_backend(group.pg):
        raise CommError(
            f"devices.measure_network: there are {group.size} ranks, by "
            f"{dist.get_backend() if dist.is_initialized() else 'no backend'}: two or more by gloo "
            "are needed. Start the program under torchrun with "
            "torch.distributed.init_process_group('gloo'), or give a dt.devices.Network"
        )
    kinds = {
        "all_gather": lambda x: collectives.all_gather(x, group),
        "all_reduce": lambda x: collectives.all_reduce(x, "sum", group),
    }
    hops = Network(ranks_per_node=group.size, within=Link(1e30, 1.0))
    latency = work = sent = moved = extra = 0.0
    for kind, run in kinds.items():
        small, small_work, host = _mean(run, *_SMALL)
        large, large_work, _ = _mean(run, *_LARGE)
        latency += (small - host) / hops.collective(kind, 0, group.ranks) / len(kinds)
        work += (small_work - host) / len(kinds)
        gathered = kind == "all_gather"
        sent += 4 * _LARGE[0] * (group.size - 1) * (1 if gathered else 2 / group.size)
        moved += large - small
        extra += large_work - small_work
    found = torch.tensor([latency, sent / moved, work, sent / extra], dtype=torch.float64)
    latency, bandwidth, work, own = collectives.all_reduce(found, "avg", group).tolist()
    link = Link(bandwidth, latency)
    return Network(
        ranks_per_node=_ranks_here(), within=link, between=link, processor=Link(own, work)
    )


def _mean(
    run: Callable[[torch.Tensor], object], elements: int, times: int
) -> tuple[float, float, float]:
    """Seconds that pass in a call, those that this process computes for, and this thread."""
    x, clocks = torch.ones(elements), (time.perf_counter, time.process_time, time.thread_time)
    run(x)
    begin = [now() for now in clocks]
    for _ in range(times):
        run(x)
    passed, process, thread = (
        (now() - start) / times for now, start in zip(clocks, begin, strict=True)
    )
    return passed, process, thread
