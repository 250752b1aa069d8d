"""The default process group: the rank of this process, and how it joins the other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from disttensor.errors import CommError
from disttensor.runtime import current_runtime
from disttensor.torch_private import backend_of, default_group, default_store, timeout_of

LOST = "The store of the world is gone, with rank 0 if that keeps it, or with the launcher"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world() -> tuple[int, int]:
    """Returns (rank, size) of this process; (0, 1) without a process group."""
    default = default_group()  # read directly: each transfer calls this several times
    return (0, 1) if default is None else (default.rank(), default.size())


def is_fake() -> bool:
    """Returns True if the world is PyTorch's ``fake`` process group. Only this rank runs then: no
    messages arrive, and exchanged values are this rank's own."""
    now = current_runtime()
    if now.is_fake is None:
        now.is_fake = now.default is not None and dist.get_backend(now.default) == "fake"
    return now.is_fake


def is_nccl() -> bool:
    """Returns True if messages of the world can use NCCL."""
    now = current_runtime()
    if now.is_nccl is None:
        now.is_nccl = now.default is not None and "nccl" in backends()
    return now.is_nccl


def backends() -> str:
    """Returns the backends of the default process group, as ``init_process_group`` takes them."""
    return str(dist.get_backend_config(default_group()))


def backend_name(group: Any, device: torch.device) -> str:
    """Returns the backend of a group, which decides how collectives run; for a fake group, the
    backend that it imitates."""
    name = backend_of(group, device).name()
    return current_runtime().stands_for if name == "fake" else name


def attempt() -> str:
    """Returns a prefix for keys of the store, different after each restart: under ``torchrun
    --max-restarts`` the store still contains the addresses of ranks that died."""
    return f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def world_name() -> str:
    """Returns a prefix for keys of the store that no other world has, equal on all ranks. A store
    may serve several worlds, one after another, so each rank counts its worlds in the store."""
    now = current_runtime()
    if not now.name:
        count = (
            0
            if is_fake()
            else default_store().add(f"disttensor/{attempt()}/worlds/{world()[0]}", 1)
        )
        now.name = f"{attempt()}/world{count}"
    return now.name


def world_store() -> Any:
    """Returns the store of the default process group, with a prefix for our keys."""
    return dist.PrefixStore(f"disttensor/{world_name()}", default_store())


def join_world(
    device_type: str | None = None, backend: str | None = None, timeout: float | None = None
) -> None:
    """Starts the default process group unless it exists: from torchrun's environment, or as a world
    of one. Raises ValueError if it exists with another backend or timeout."""
    default, cuda = default_group(), device_type == "cuda"
    if cuda and not torch.cuda.is_available() and (default is None or not is_fake()):
        raise RuntimeError(
            'init_mesh: device_type="cuda": torch finds no CUDA device. Install a build of '
            'torch with CUDA and check nvidia-smi, or use device_type="cpu"'
        )
    if default is not None:
        limit = timeout_of(default)
        has = limit and limit.total_seconds()
        for name, wanted, there in (("backend", backend, backends()), ("timeout", timeout, has)):
            same = wanted == there or wanted == dist.get_backend(default)
            if wanted is not None and there is not None and not same:
                raise ValueError(
                    f"init_mesh: {name}={wanted!r}: the process group is there already, with "
                    f"{there!r}. Leave {name} out, or give it to the call that starts the group"
                )
        return
    timeout = 600.0 if timeout is None else timeout
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
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    limit = timedelta(seconds=timeout)
    rank, size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if there else (0, 1)
    store = _join_store(rank, size, timeout) if there else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    current_runtime().store_lasts = there != []


@contextlib.contextmanager
def environment_set(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets variables of the environment within the block, and removes variables for None."""
    before = {name: os.environ.pop(name, None) for name in values}
    try:
        os.environ.update({name: value for name, value in values.items() if value is not None})
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def keeps_store() -> bool:
    """Returns True if the store of the world ends with this process: rank 0 keeps it, unless
    torchrun does."""
    return world()[0] == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _join_store(rank: int, size: int, timeout: float) -> Any:
    """Returns the store when all ranks have joined it. Raises CommError that names the missing."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=timeout)
    try:
        whole = _connect(host, port, rank == 0 and not agent, size, limit, os.getpid())
    except RuntimeError as error:
        keeper = "torchrun" if agent else "rank 0"
        raise CommError(
            f"init_mesh: rank {rank} cannot reach the store of the world at {host}:{port} within "
            f"{timeout:g} s. {keeper} keeps it, and has ended or was never started. {error}"
        ) from error
    joined = whole.add(f"{attempt()}/joined/{rank}", 1)  # worlds that this rank has joined
    store = dist.PrefixStore(f"{attempt()}/joined{joined}", whole)
    hashing = str(hash("disttensor"))
    if store.compare_set("hashing", "", hashing).decode() != hashing:
        store.set("hashing differs", "")
    missing = missing_ranks(store, "came", rank, range(size), timeout)
    if missing:
        late = f"rank {rank} came later. Start all ranks together, or give a longer timeout"
        lost = "They ended before, or were never started; look for their own errors"
        raise CommError(
            f"init_mesh: ranks {missing} did not come within {timeout:g} s; "
            + (late if rank in missing else f"rank {rank} waits for them. {lost}")
        )
    if rank == 0 and store.check(["hashing differs"]):
        warnings.warn(
            "init_mesh: the ranks hash texts differently, so that a model which goes through a set "
            "of names differs between ranks. Start with PYTHONHASHSEED=0 in the environment",
            stacklevel=4,
        )
    return store


def open_store(
    host: str, port: int, keeps: bool, size: int | None = None,
    limit: timedelta = timedelta(seconds=300),
) -> Any:  # fmt: skip
    """Returns a connection to the TCPStore at ``host`` and ``port`` (0: a free port). ``keeps``:
    this process runs the store. If ``host`` is the loopback, the store listens on the loopback
    only: a TCPStore listens on all interfaces otherwise, and obeys every client."""
    listener = None
    if keeps and (host in ("localhost", "::1") or host.startswith("127.")):
        with contextlib.suppress(OSError):  # this process runs it already: multi_tenant finds it
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = socket.create_server(address[:2], family=family)
            port, listener = bound.getsockname()[1], bound.detach()
    return dist.TCPStore(
        host, port, size, keeps, limit, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener,
    )  # fmt: skip


@cache
def _connect(
    host: str, port: int, keeps: bool, size: int, limit: timedelta, process: int
) -> Any:  # fmt: skip
    """Returns the connection of this process to the store of its worlds. It lasts until the process
    ends: another rank may still be in the last world while this rank joins the next."""
    return open_store(host, port, keeps, size, limit)


def read_key(store: Any, key: str) -> str | None:
    """Returns the text under a key of a store; None if there is none. One operation: ``get`` waits
    for a key that another rank deletes after a ``check``."""
    text = store.compare_set(key, "\0", "\0").decode()
    return None if text == "\0" else text


def missing_ranks(
    store: Any, place: str, rank: int, ranks: Sequence[int], seconds: float,
    ends: Callable[[], bool] = lambda: False,
) -> list[int]:  # fmt: skip
    """Waits until all ``ranks`` have made this call with the same ``place``, a prefix of keys.
    Returns the ranks that have not done so within ``seconds``, or when ``ends()`` is true. The
    first rank whose time is over ends the wait of all, which get the same answer, also ranks that
    come later. Rank 0 may keep the store, so it returns last."""
    try:
        return _missing(store, place, rank, ranks, seconds, ends)
    except dist.DistNetworkError as error:
        raise CommError(
            f"rank {rank} waits for ranks {list(ranks)}. {LOST}. Backend error: {error}"
        ) from error


def _missing(
    store: Any, place: str, rank: int, ranks: Sequence[int], seconds: float,
    ends: Callable[[], bool],
) -> list[int]:  # fmt: skip
    answer = f"{place}/answer"
    store.set(f"{place}/{rank}", "")
    if store.add(f"{place}/count", 1) < len(ranks):
        wait_until(lambda: store.check([answer]) or ends(), seconds)
    absent = [r for r in ranks if not store.check([f"{place}/{r}"])]
    missing: list[int] = json.loads(store.compare_set(answer, "", json.dumps(absent)))
    if not missing:
        return []
    told, here = store.add(f"{place}/told", 1), len(ranks) - len(missing)
    if rank == 0 and told < here:
        wait_until(lambda: store.add(f"{place}/told", 0) >= here, 2.0)
    return missing


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until ``condition()`` is true. Returns False if it is not within ``seconds``."""
    end, pause = time.monotonic() + seconds, 0.001
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(0.2, pause * 2)
    return True


def _check_rank() -> None:
    """Raises for a rank outside the world, which would wait for ranks that never come."""
    texts = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if not all(t.isdecimal() for t in texts) or not int(texts[0]) < int(texts[1]):
        raise RuntimeError(
            "the environment does not describe a rank of a world: RANK={!r}, WORLD_SIZE={!r}, "
            "MASTER_PORT={!r}; RANK counts from 0 to WORLD_SIZE - 1. Start with torchrun, which "
            "sets all of them, or unset them to run as a world of one".format(*texts)
        )
