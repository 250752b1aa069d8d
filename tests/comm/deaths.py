"""Worlds in which one rank dies: ``python -m tests.comm.deaths WHERE-HOW-RANK ...`` prints, as JSON
by name, the exit status, the seconds and the stderr of each rank.

The ranks are forked from this process, which has imported everything and starts no thread: a death
costs a second where three interpreters would cost ten.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import disttensor as dt
from disttensor.comm import failure_watch
from disttensor.torch_private import timeout_of
from tests.support.ports import free_port

WORLD = 3  # hsdp: 4
LIMIT = 40.0
AT_ONCE = 4  # worlds: most of their time is waiting


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


def steps(model, mesh, places, each):
    """Two of them; ``each(step, "forward" or "backward")`` is called in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = dt.shard_tensor(torch.ones(6, 4), mesh, places)
        y = model(x)
        each(step, "forward")
        y.register_hook(lambda g, step=step: each(step, "backward"))
        loss = (y * 1.0).sum()
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()


def at(point, rank, how, dying):
    def each(step, where):
        if (step, where) == point and rank == dying:
            die(how)

    return each


def replicas(rank, how, dying):
    """Data parallel; before the gradients of the first step are reduced."""
    mesh = dt.init_mesh((WORLD,), ("dp",))
    model = dt.shard_data_parallel(torch.nn.Linear(4, 4), mesh, shard_axis=None)
    steps(model, mesh, [dt.Shard(0)], at((0, "backward"), rank, how, dying))


def hsdp(rank, how, dying):
    """Two replicas of two shards; in the backward of the second step."""
    mesh = dt.init_mesh((2, 2), ("dp", "fsdp"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    dt.shard_data_parallel(model, mesh, "fsdp", replicate_axis="dp", segments=["0", "1"])
    steps(model, mesh, [dt.Shard(0)] * 2, at((1, "backward"), rank, how, dying))


def tp(rank, how, dying):
    """Between the two layers of a Megatron MLP."""
    mesh = dt.init_mesh((WORLD,), ("tp",))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    plan = {"0.*": [dt.Shard(0)], "1.weight": [dt.Shard(1)]}
    dt.shard_module(model, mesh, plan)
    count = iter(range(10))

    def between(module, args):
        if next(count) == 1 and rank == dying:  # in the second step
            die(how)

    model[1].register_forward_pre_hook(between)
    steps(model, mesh, [dt.Replicate()], lambda *where: None)


def schedule(rank, how, dying):
    """1f1b over three stages; at the second micro-batch of its stage."""
    dt.init_mesh((WORLD,), ("all",))
    meshes = [dt.ProcessMesh([r], ("x",)) for r in range(WORLD)]
    w = [dt.ones(4, 4, mesh=mesh, requires_grad=True) for mesh in meshes]
    count = iter(range(10))

    def step(x):
        for number, mesh in enumerate(meshes):
            x = dt.reshard(x, mesh) @ w[number]
            if number == rank == dying and next(count) == 1:
                die(how)
        return x.sum()

    batches = [dt.ones(2, 4, mesh=meshes[0]) for _ in range(4)]
    dt.pipeline.run(step, batches, "1f1b", stages=meshes)


def groups(rank, how, dying):
    """While the groups of the axes are made."""
    mesh = dt.init_mesh((1, WORLD), ("a", "b"), timeout=10)
    if rank == dying:
        die(how)
    assert timeout_of(mesh.group((1,), "a lane").pg).total_seconds() == 10
    dt.ones(6, mesh=mesh, placements=[dt.Replicate(), dt.Shard(0)]).sum().item()


def late(rank, how, dying):
    """The rank that keeps the store has heard of it, and ends before another one misses it."""
    if rank == 1:
        failure_watch.PERIOD = 3.0
    dt.init_mesh((WORLD,), ("all",))
    meshes = [dt.ProcessMesh([r], ("x",)) for r in range(WORLD)]
    x = dt.ones(2, 4, mesh=meshes[dying])
    if rank == dying:
        die(how)
    time.sleep((1.5, 2.5, 0)[rank])
    for mesh in meshes:
        dt.reshard(x, mesh).sum()


def unheard(rank, how, dying):
    """As soon as there is a world, before any rank watches."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
    time.sleep(0.5)  # all have returned from it
    if rank == dying:
        die(how)
    time.sleep(0.5)
    mesh = dt.init_mesh((WORLD,), ("all",))
    dt.ones(6, mesh=mesh, placements=[dt.Shard(0)]).sum().item()


def early(rank, how, dying):
    """Before ``init_mesh``."""
    if rank == dying:
        die(how)
    dt.init_mesh((WORLD,), ("all",), timeout=4)


PROGRAMS = {
    f.__name__: f
    for f in (stages, backward, data, replicas, hsdp, tp, schedule, groups, late, unheard, early)
}


def forked(body, world):
    """(exit status or None, seconds, stderr) of each rank. Rank 0 keeps the store."""
    os.environ.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    folder, started = Path(tempfile.mkdtemp()), time.monotonic()
    left = {}
    for rank in range(world):
        pid = os.fork()
        if not pid:
            _child(rank, body, folder / str(rank))
        left[pid] = rank
    out = [(None, LIMIT, "")] * world
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


def run_worlds(worlds, at_once):
    """{name: what ``forked`` returns} for {name: its arguments}. So many worlds run at once, each
    started by a process of its own."""
    warm = torch.nn.Parameter(torch.ones(1))
    warm.grad = torch.ones(1)
    torch.optim.SGD([warm], lr=0.1).step()  # imports what each rank would import
    ended, names = {}, list(worlds)
    for first in range(0, len(names), at_once):
        pipes = {}
        for name in names[first : first + at_once]:
            out, into = os.pipe()
            if not os.fork():
                os.write(into, json.dumps(forked(*worlds[name])).encode())
                os._exit(0)
            os.close(into)
            pipes[name] = out
        for name, out in pipes.items():
            with os.fdopen(out) as text:
                ended[name] = json.loads(text.read())
    return ended


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
    worlds = {}
    for name in sys.argv[1:]:
        where, how, dying = name.split("-")
        body = functools.partial(PROGRAMS[where], how=how, dying=int(dying))
        worlds[name] = body, 4 if where == "hsdp" else WORLD
    print(json.dumps(run_worlds(worlds, AT_ONCE)))


if __name__ == "__main__":
    main()
