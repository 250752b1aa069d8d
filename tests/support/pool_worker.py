"""One rank of tests/support/pool.py: joins the process group, then runs what the pool sends, until
it ends. tests/support/fork_server.py starts it."""

from __future__ import annotations

import faulthandler
import os
import pickle
import pkgutil
import queue
import signal
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import pickling, pool


def main(rank: int, world: int, port: int, stack_file: str, fd: int) -> None:
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls), daemon=True).start()
    faulthandler.enable()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: pytest ends, and with it the ranks
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        connection.send(("ok", None))
        while True:
            connection.send(_answer(calls.get()))


def _read(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    """Take calls in; when the pool (or the process that held it) is gone, end this process."""
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _answer(message: bytes) -> tuple[str, Any]:
    try:
        fn, args, filters = pickle.loads(message)
        with warnings.catch_warnings():
            _filter_warnings(filters)
            pool.reset()
            result = pickling.dumps(fn(*args))
        if not dist.is_initialized():
            return "error", "the body destroyed the process group, which is the pool's"
        return "ok", result
    except pytest.skip.Exception as skip:
        return "skip", str(skip)
    except BaseException as error:
        return "error", _text(error)


def _filter_warnings(filters: list[str]) -> None:
    """pytest's filters, "action:message:category:module"; the last one that matches decides."""
    warnings.resetwarnings()
    for text in filters:
        action, message, category, module, *_ = [*text.split(":"), "", "", ""]
        kind = _class(category) if category else Warning
        warnings.filterwarnings(action, message, kind, module)  # type: ignore[arg-type]


def _class(name: str) -> Any:
    return pkgutil.resolve_name(name if "." in name else f"builtins.{name}")


def _text(error: BaseException) -> str:
    """The traceback, from the body on: the frames of this file are of no interest."""
    top = error.__traceback__
    while top is not None and top.tb_frame.f_code.co_filename in (__file__, pool.__file__):
        top = top.tb_next
    return "".join(traceback.format_exception(type(error), error, top))
