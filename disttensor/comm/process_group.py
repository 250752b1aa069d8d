"""The default process group: who this process is, and how it joins the others."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from disttensor.torch_private import default_store

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world() -> tuple[int, int]:
    """(rank, size) of this process; (0, 1) where no process group was started."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def attempt() -> str:
    """Under ``torchrun --max-restarts`` the ranks that start again find the store of those that
    died, with addresses where nobody is any more: whatever is put there is named by this."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def world_store() -> Any:
    """The store of the default process group, for what is ours."""
    return dist.PrefixStore(f"disttensor/{attempt()}", default_store())


def join_world(
    device_type: str | None = None, backend: str | None = None, timeout: float = 600.0
) -> None:
    """Start the default process group unless it is there: from torchrun's environment, or as a
    world of one."""
    if dist.is_initialized():
        return
    there = [name for name in _TORCHRUN if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if there and missing:
        raise RuntimeError(
            f"the environment is half set for a distributed run: {', '.join(there)} is set, "
            f"{', '.join(missing)} is not. Start with torchrun, which sets all of them, or unset "
            "them to run as a world of one"
        )
    if there:
        _check_rank()
    cuda = device_type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    limit = timedelta(seconds=timeout)
    if there:
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        store = dist.PrefixStore(attempt(), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)


def _check_rank() -> None:
    """Raise for a rank that the world does not have: it would wait for ranks that never come."""
    texts = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if not all(t.isdecimal() for t in texts) or not int(texts[0]) < int(texts[1]):
        raise RuntimeError(
            "the environment does not describe a rank of a world: RANK={!r}, WORLD_SIZE={!r}, "
            "MASTER_PORT={!r}; RANK counts from 0 to WORLD_SIZE - 1. Start with torchrun, which "
            "sets all of them, or unset them to run as a world of one".format(*texts)
        )
