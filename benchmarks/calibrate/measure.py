"""Measures this machine's CPU as a Device, and the connection of its gloo ranks as a Network.

Kernels are timed in CPU seconds, so that other processes do not count. Collectives are timed by the
mean of many: the steps of ranks that share cores consist of mean times, not of the fastest ones.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from dataclasses import fields, replace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from disttensor.checks import check_bool, check_positive
from disttensor.comm import collectives
from disttensor.comm.groups import world_group
from disttensor.errors import CommError
from disttensor.simulate.devices import Device, Link, Network

from .kernel_times import slower
from .reference_pipeline import of_collective, of_micro_batch
from .reference_step import of_gradient, of_kernel

_N = 512  # rows and columns of matrices: they do not fit into a first cache
_COPIED = 1 << 23  # elements: they do not fit into any
_TILES = 64, 512  # of torch's attention for the CPU
_SMALL, _LARGE = (1, 100), (1 << 18, 20)  # elements of a collective, and how often


def measure(seconds: float = 0.2, together: bool = False) -> Device:
    """Measures this machine's CPU, with torch's present number of threads. The ranks of this
    machine share its cores (``Device.sharing``).

    Peaks are those of the three matrix products of a linear layer in a training step, the bandwidth
    that of a copy larger than the caches. The other fields are measured by training steps on
    DistTensors.

    Args:
        seconds: the time to repeat each product and the copy; the fastest repetition counts.
        together: whether all ranks of the running world measure at the same time. Each of them has
            to call this function, and all return the same values for the host. Otherwise this
            process measures as if it were alone.
    """
    check_positive("measure: seconds", seconds, "a positive number of seconds")
    check_bool("measure: together", together)
    peak = {
        dtype: 6.0 * _N**3 / _fastest(_products(dtype), seconds)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    }
    source, target = torch.ones(_COPIED), torch.empty(_COPIED)
    bandwidth = 2 * source.nbytes / _fastest(lambda: target.copy_(source), seconds)
    found = Device(
        name="cpu", peak=peak, bandwidth=bandwidth, efficiency=1.0, type="cpu",
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
    """Returns a clock of this thread's CPU seconds, or of elapsed seconds if torch uses several
    threads."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _products(dtype: torch.dtype) -> Callable[[], object]:
    """Returns the three products of a linear layer: its forward, the gradient of its input, and the
    gradient of its weight. Their matrices have three different layouts."""
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
    """Returns the mean over all ranks if they measure ``together``."""
    if not together or not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    return float(collectives.all_reduce(found, "avg", world_group()))


# Networks -----------------------------------------------------------------------------------------


def _ranks_here() -> int:
    """Returns the number of ranks on this machine."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def measure_network() -> Network:
    """Measures the connection of the ranks of this world over gloo, in a few seconds. Every rank
    has to call this function, and all return the same Network.

    ``latency`` comes from the mean of small collectives, ``bandwidth`` from that of large ones, and
    ``processor`` from the CPU seconds of the threads that do not wait. Raises CommError in a world
    of one rank, or of another backend than gloo."""
    group = world_group()
    if group.size == 1 or "gloo" not in dist.get_backend(group.pg):
        raise CommError(
            f"measure_network: there are {group.size} ranks, by "
            f"{dist.get_backend() if dist.is_initialized() else 'no backend'}: two or more by gloo "
            "are needed. Start the program under torchrun with "
            "torch.distributed.init_process_group('gloo'), or give a dt.simulate.devices.Network"
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
    """Returns the seconds of a call: elapsed, CPU seconds of this process, and of this thread."""
    x, clocks = torch.ones(elements), (time.perf_counter, time.process_time, time.thread_time)
    run(x)
    begin = [now() for now in clocks]
    for _ in range(times):
        run(x)
    passed, process, thread = (
        (now() - start) / times for now, start in zip(clocks, begin, strict=True)
    )
    return passed, process, thread


# The command --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="gloo processes (1)")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each matrix product (0.3)")
    args = parser.parse_args()
    if args.ranks == 1:
        print(code(device=measure(args.seconds)))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (args.ranks, port, args.seconds), nprocs=args.ranks)


def _rank(rank: int, ranks: int, port: int, seconds: float) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo")
    device, network = measure(seconds, together=True), measure_network()
    if rank == 0:
        print(code(device=device, network=network))
    dist.destroy_process_group()


def code(**values: Device | Network) -> str:
    """Returns Python code that defines these values."""
    lines = ["import torch", "", "import disttensor as dt", ""]
    for name, value in values.items():
        given = ", ".join(f"{f.name}={getattr(value, f.name)!r}" for f in fields(value))
        call = f"dt.simulate.devices.{type(value).__name__}({given})".replace(
            "=Link(", "=dt.simulate.devices.Link("
        )
        lines.append(f"{name} = {call}")
    return "\n".join(lines)
