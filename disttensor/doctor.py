"""Reports what disttensor finds on this machine: ``python -m disttensor.doctor``.

The output is text for a bug report. The exit status is 1 if something is wrong; the last lines say
what is wrong, and what to do.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from disttensor import versions
from disttensor.api.create import ones
from disttensor.core.init_mesh import init_mesh
from disttensor.core.placement import Shard
from disttensor.dispatch import native
from disttensor.launching.launch import launch

PACKAGES = (
    "numpy", "safetensors", "transformers", "accelerate", "peft", "timm", "torchvision",
    "matplotlib", "tqdm", "ipykernel",
)  # fmt: skip
SHOWN = (
    "CUDA_", "DISTTENSOR_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "PYTHONHASHSEED", "RANK", "TORCH",
    "WORLD_SIZE",
)  # fmt: skip
SECONDS = 120.0  # time limit of the all-reduce

Finding = tuple[str, str, str]  # name, text, and what to do if it is wrong


def main() -> int:
    """Prints all findings. Returns the exit status."""
    wrong = []
    for check in (software, machine, network, devices, ranks):
        for name, text, advice in check():
            print(f"{name + ':':<18}{text}", flush=True)
            wrong += [f"{name}: {advice}"] if advice else []
    print("\n".join(["", *(f"WRONG  {line}" for line in wrong)]) if wrong else "\nall is well")
    return int(bool(wrong))


def software() -> Iterator[Finding]:
    tested = f"tested: {versions.dotted(versions.OLDEST)} to {versions.dotted(versions.NEWEST)}"
    yield "disttensor", f"{versions.__version__} in {Path(__file__).parent}", ""
    yield "torch", f"{torch.__version__} ({tested})", ""
    yield "python", f"{platform.python_version()} in {sys.prefix}", ""
    is_stale = "another native.c" in native.why
    yield "calls run in", native.active(), native.why if is_stale else ""
    found = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    yield "packages", ", ".join(found), ""
    values = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(SHOWN)]
    yield "environment", " ".join(values) or "nothing set", ""


def machine() -> Iterator[Finding]:
    yield "system", platform.platform(), ""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    yield "processors", f"{len(affinity(0))}, torch uses {torch.get_num_threads()} threads", ""
    yield "processes", f"start by {', '.join(multiprocessing.get_all_start_methods())}", ""
    hashing = os.environ.get("PYTHONHASHSEED", "random; dt.launch and disttensor.run set 0")
    yield "hash seed", hashing, ""
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free >> 20
        small = "workers of a DataLoader need more; in Docker: --shm-size=8g or --ipc=host"
        yield "shared memory", f"{free} MiB free in /dev/shm", small if free < 64 else ""
    with contextlib.suppress(ImportError):  # on Windows
        limit, most = (int(n) for n in _open_files())
        few = f"each rank needs some for each other rank; allow more: ulimit -n {min(most, 65536)}"
        yield "open files", f"at most {limit} ({most})", few if 0 <= limit < 256 else ""


def _open_files() -> tuple[int, int]:
    resource = importlib.import_module("resource")
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def network() -> Iterator[Finding]:
    yield "interfaces", ", ".join(name for _, name in socket.if_nameindex()), ""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        yield "loopback", "127.0.0.1 can be reached", ""
    except OSError as error:
        yield "loopback", f"{error}", "processes cannot connect on 127.0.0.1: look at the firewall"
    try:
        yield "host name", f"is found as {socket.gethostbyname(socket.gethostname())}", ""
    except OSError as error:  # only gloo under torchrun needs it
        yield "host name", f"{error}; under torchrun set GLOO_SOCKET_IFNAME=lo", ""


def devices() -> Iterator[Finding]:
    there = [n for n in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{n}_available")()]
    yield "backends", ", ".join(there), "" if "gloo" in there else "torch was built without gloo"
    if torch.version.cuda is None:
        yield "CUDA", "torch was built without it", ""
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    text = f"{torch.version.cuda}, {len(names)} devices: {', '.join(names)}"
    yield "CUDA", text if names else f"{torch.version.cuda}, no device", ""
    if "nccl" in there:
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())), ""


def ranks() -> Iterator[Finding]:
    start = time.monotonic()
    try:
        values = launch(total, 2, timeout=SECONDS)
    except Exception as error:
        yield "two ranks", f"{type(error).__name__}: {error}", "the all-reduce failed, see above"
        return
    text = f"all-reduce gives {values} in {time.monotonic() - start:.1f} s"
    yield "two ranks", text, "" if values == [3.0, 3.0] else "[3.0, 3.0] is expected"


def total() -> float:
    """Returns a sum over two ranks."""
    x = ones(3, mesh=init_mesh((2,), ("dp",)), placements=[Shard(0)])
    return float(x.sum().item())


if __name__ == "__main__":
    sys.exit(main())
