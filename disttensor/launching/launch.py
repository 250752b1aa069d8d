"""launch: runs a function on processes of this machine, from a script or from a notebook."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from disttensor.checks import (
    argument_error,
    check_callable,
    check_int,
    check_positive,
    check_sequence,
)
from disttensor.comm.process_group import environment_set
from disttensor.launching.children import Children, Forked, check_alone
from disttensor.launching.rank import run_rank


def launch(
    fn: Callable[..., Any], nprocs: int, args: Sequence[Any] = (), *, timeout: float | None = None,
    start_method: str | None = None,
) -> list[Any]:  # fmt: skip
    """Runs ``fn(*args)`` on ``nprocs`` processes of this machine, and returns the results by rank.

    Each process is a rank of one world, as under torchrun: ``fn`` calls ``dt.init_mesh``. The call
    ends when all ranks have ended. Ctrl-C, an error of a rank and the end of this process end all
    ranks. Each rank computes with one thread (``torch.set_num_threads`` changes it).

    Args:
        fn: a function. With "fork" it may be defined anywhere, also in a notebook.
        nprocs: the number of ranks, at least 1.
        args: the arguments, the same on all ranks.
        timeout: seconds after which all ranks are ended; None: no limit.
        start_method: "fork", "spawn" (``fn`` and ``args`` are pickled), or None: "spawn" if this
            process has used CUDA or the system cannot fork, else "fork".

    Returns:
        The results of ``fn`` on rank 0, 1, ...: picklable values. Tensors are copied. Return
        ``x.full_tensor()`` or ``x.to_local()`` for a DistTensor ``x``.

    Raises:
        RankError: the first error of a rank, with its traceback.
        TimeoutError: ranks had not ended within ``timeout``.
        RuntimeError: this process is a rank already, or cannot start ranks this way.

    >>> def total(n):
    ...     mesh = dt.init_mesh((2,), ("dp",))
    ...     return dt.ones(n, mesh=mesh, placements=[dt.Shard(0)]).sum().item()
    >>> dt.launch(total, nprocs=2, args=(5,))  # doctest: +SKIP
    [5.0, 5.0]
    """
    check_callable("launch: fn", fn)
    size = check_int("launch: nprocs", nprocs, 1)
    args = check_sequence("launch: args", args, "a sequence of arguments")
    if timeout is not None:
        check_positive("launch: timeout", timeout, "a positive number of seconds")
    method = _start_method(fn, start_method)
    check_alone("launch")
    children, parent = Children("launch", size), os.getpid()
    spawn = multiprocessing.get_context("spawn").Process
    variables = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), "OMP_NUM_THREADS": "1"}

    def start(rank: int, there: Connection) -> Any:
        if method == "fork":
            return Forked()
        process = spawn(target=run_rank, args=(rank, size, parent, there, fn, args))
        with environment_set(variables):
            process.start()
        return process

    try:
        for rank in range(size):
            there = children.start(rank, functools.partial(start, rank))
            if there is not None:  # this process is the fork
                run_rank(rank, size, parent, there, fn, args)
        children.start_store()  # after the forks, which would lack its threads
        missing = children.receive(math.inf if timeout is None else timeout)
        children.check()
        if missing:
            raise TimeoutError(
                f"launch: ranks {missing} of {size} had not ended after {timeout:g} s, and all "
                "were ended. Give a longer timeout, or None for no limit"
            )
    finally:
        children.kill()
        children.store = None  # a traceback may refer to the children
    return [_loaded(rank, children.results[rank]) for rank in range(size)]


def _start_method(fn: Callable[..., Any], method: str | None) -> str:
    """Returns "fork" or "spawn", after checks."""
    known = multiprocessing.get_all_start_methods()
    in_use = torch.cuda.is_initialized()
    if method is None:
        method = "spawn" if in_use or "fork" not in known else "fork"
    if method not in ("fork", "spawn") or method not in known:
        raise argument_error("launch: start_method", method, '"fork", "spawn" or None', ValueError)
    if method == "fork" and in_use:
        raise RuntimeError(
            "launch: start_method='fork': this process has used CUDA, which a fork cannot use. Use "
            "'spawn', or call launch before the first use of CUDA"
        )
    main = sys.modules["__main__"]
    if method == "spawn" and fn.__module__ == "__main__" and not hasattr(main, "__file__"):
        raise RuntimeError(
            f"launch: {fn.__qualname__} is defined in a notebook or a shell, where spawned "
            "processes cannot import it. Put it into a file that is imported; or restart, and call "
            "launch before the first use of CUDA, where processes can be forked"
        )
    return method


def _loaded(rank: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        raise RuntimeError(
            f"launch: the result of rank {rank} cannot be read outside of its world. For a "
            "DistTensor x return x.full_tensor() or x.to_local()"
        ) from error
