"""Worlds in which one rank dies: ``python -m tests.comm.deaths WHERE-HOW-RANK ...`` prints, as JSON
by name, the exit status, the seconds and the stderr of each rank.

The ranks are forked from this process, which has imported everything and starts no thread: a death
costs a second where three interpreters would cost ten.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch

import disttensor as dt
from disttensor.torch_private import timeout_of

WORLD = 3
LIMIT = 40.0


def die(how):
    if how == "raise":
        raise ValueError("out of cheese")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "_exit":
        os._exit(3)
    if how == "leave":
        sys.exit(0)
    time.sleep(LIMIT / 4)  # "slow"


def stages(rank, how, dying):
    """Three stages; the one that dies has received and not sent on."""
    dt.init_mesh((WORLD,), ("all",), timeout=3 if how == "slow" else 60)
    meshes = [dt.ProcessMesh([r], ("x",)) for r in range(WORLD)]
    w = [dt.ones(4, 4, mesh=mesh, requires_grad=True) for mesh in meshes]
    x = dt.ones(2, 4, mesh=meshes[0])
    for number, mesh in enumerate(meshes):
        x = dt.reshard(x, mesh) @ w[number]
        if number == rank == dying:
            die(how)
    x.sum().backward()


def backward(rank, how, dying):
    dt.init_mesh((WORLD,), ("all",))
    meshes = [dt.ProcessMesh([r], ("x",)) for r in range(WORLD)]
    x = dt.ones(2, 4, mesh=meshes[0], requires_grad=True)
    for number, mesh in enumerate(meshes):
        x = dt.reshard(x, mesh) * 2
        if number == rank == dying:
            x.register_hook(lambda g: die(how))
    x.sum().backward()


def data(rank, how, dying):
    """Data parallel, sharded; the second step lacks a rank."""
    mesh = dt.init_mesh((WORLD,), ("dp",), timeout=3 if how == "slow" else 60)
    model = dt.shard_data_parallel(torch.nn.Linear(4, 4), mesh, "dp", stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        if step and rank == dying:
            die(how)
        x = dt.shard_tensor(torch.ones(6, 4), mesh, [dt.Shard(0)])
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def groups(rank, how, dying):
    """While the groups of the axes are made."""
    mesh = dt.init_mesh((1, WORLD), ("a", "b"), timeout=10)
    if rank == dying:
        die(how)
    assert timeout_of(mesh.group((1,), "a lane").pg).total_seconds() == 10
    dt.ones(6, mesh=mesh, placements=[dt.Replicate(), dt.Shard(0)]).sum().item()


def early(rank, how, dying):
    """Before ``init_mesh``."""
    if rank == dying:
        die(how)
    dt.init_mesh((WORLD,), ("all",), timeout=4)


PROGRAMS = {"stages": stages, "backward": backward, "data": data, "groups": groups, "early": early}


def forked(body):
    """(exit status or None, seconds, stderr) of each rank. Rank 0 keeps the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    folder, started = Path(tempfile.mkdtemp()), time.monotonic()
    left = {}
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            _child(rank, body, folder / str(rank))
        left[pid] = rank
    out = [(None, LIMIT, "")] * WORLD
    while left and time.monotonic() - started < LIMIT:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, seconds = left.pop(pid), time.monotonic() - started
            text = (folder / str(rank)).read_text()
            out[rank] = os.waitstatus_to_exitcode(status), seconds, text
        else:
            time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return out


def _child(rank, body, file):
    """As an interpreter that runs ``body`` and ends."""
    os.environ["RANK"] = str(rank)
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), 2)
    code = 0
    try:
        body(rank)
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.last_value, code = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    warm = torch.nn.Parameter(torch.ones(1))
    warm.grad = torch.ones(1)
    torch.optim.SGD([warm], lr=0.1).step()  # imports more
    ended = {}
    for name in sys.argv[1:]:
        where, how, dying = name.split("-")
        ended[name] = forked(functools.partial(PROGRAMS[where], how=how, dying=int(dying)))
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
