"""Worlds in which a call raises on one rank whose process lives on: ``python -m
tests.comm.survivors NAME-RANK ...`` prints, as JSON by name, the exit status, the seconds and the
stderr of each rank. A rank that raises writes the error there, and lives until all have ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch

import disttensor as dt
from disttensor.comm import blocked_wait, failure_watch, lone_failure
from disttensor.comm.groups import new_group
from disttensor.comm.objects import gather_objects
from tests.comm.deaths import WORLD, run_worlds

AT_ONCE = 8  # worlds
STAYS = 6.0  # seconds


class Failure(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.fails:
            raise Failure("out of cheese")
        return g.clone(), None


def matrices(bad):
    """One for each rank; those of the ranks ``bad`` are not positive."""
    x = torch.stack([torch.eye(3)] * WORLD)
    x[bad] = -1
    return dt.shard_tensor(x, dt.init_mesh((WORLD,), ("dp",)), [dt.Shard(0)])


def cholesky(bad):
    return torch.linalg.cholesky(matrices(bad)).sum().item()


def call(rank, failing):
    cholesky([failing])


def known_call(rank, failing):
    for _ in range(3):
        cholesky([])
    cholesky([failing])


def in_the_background(rank, failing):
    """Another rank waits for a collective that it has started."""
    x, y = matrices([failing]), dt.reshard(matrices([]), placements=[dt.Replicate()])
    (torch.linalg.cholesky(x).reshape(9, WORLD).sum(1) @ y.reshape(9, WORLD)).sum().item()


def backward(rank, failing):
    x = matrices([]).requires_grad_()
    w = dt.ones(3, 3, mesh=x.process_mesh, requires_grad=True)
    model = dt.local_map(lambda x: Fails.apply(x, rank == failing), out_placements=[dt.Shard(0)])
    (model(x @ w)).sum().backward()
    w.grad.sum().item()


def schedule(rank, failing, name, where):
    """Three stages; fails at the third micro-batch of a stage."""
    dt.init_mesh((WORLD,), ("all",))
    meshes = [dt.ProcessMesh([r], ("x",)) for r in range(WORLD)]
    way = [*meshes, *reversed(meshes)] if name in ("zbv", "dualpipev") else meshes
    w = [dt.ones(4, 4, mesh=mesh, requires_grad=True) for mesh in meshes]
    count, now = iter(range(100)), [False]
    kept = {"out_placements": [dt.Replicate()], "out_shapes": [2, 4]}
    same = dt.local_map(lambda x: Fails.apply(x, now[0]), **kept)

    def step(x):
        for mesh in way:
            number = mesh.ranks[0]
            x = dt.reshard(x, mesh) @ w[number]
            fails = number == rank == failing and next(count) == 2
            if where == "forward" and fails:
                raise Failure("out of cheese")
            now[0] = fails and where == "backward"
            x = same(x)
        return x.sum()

    batches = [dt.ones(2, 4, mesh=meshes[0]) for _ in range(6)]
    dt.pipeline.run(step, batches, name, stages=way)


def alike(rank, failing):
    """All ranks raise; one of them stays away for some time."""
    for _ in range(3):
        for _ in range(2):
            try:
                cholesky(slice(None))
            except RuntimeError:
                time.sleep(STAYS / 3 * (rank == failing))
            else:
                raise AssertionError
        assert cholesky([]) == 3 * WORLD


def alike_in_a_run(rank, failing):
    dt.init_mesh((WORLD,), ("all",))
    meshes = [dt.ProcessMesh([r], ("x",)) for r in range(WORLD)]
    w = [dt.ones(4, 4, mesh=mesh, requires_grad=True) for mesh in meshes]
    for fails in (True, False):

        def step(x, fails=fails):
            for number, mesh in enumerate(meshes):
                x = dt.reshard(x, mesh) @ w[number]
            if fails:
                raise Failure("out of cheese")
            return x.sum()

        batches = [dt.ones(2, 4, mesh=meshes[0]) for _ in range(4)]
        try:
            dt.pipeline.run(step, batches, "1f1b", stages=meshes)
            assert not fails
        except Failure:
            assert fails
            time.sleep(STAYS / 3 * (rank == failing))


def read_on_one_rank(rank, failing):
    """Gradients have a communicator of their own: the ranks wait in two of the same ranks."""
    mesh = dt.init_mesh((WORLD,), ("dp",))
    net = dt.replicate(torch.nn.Linear(4, 1), mesh=mesh)
    for _ in range(2):
        loss = net(dt.ones(6, 4, mesh=mesh, placements=[dt.Shard(0)])).mean()
        loss.backward()
        if rank == failing:
            print(loss.item())


def two_reads(rank, failing):
    """The message of the first read meets that of the second."""
    x = matrices([])
    loss, norm = x.mean(), (x * 3).sum()
    if rank == failing:
        print(loss.item())
    print(norm.item())


def facts_and_read(rank, failing):
    """One rank exchanges facts of the pieces of a new tensor; the others read a value."""
    mesh, loss = dt.init_mesh((WORLD,), ("dp",)), matrices([]).mean()
    if rank == failing:
        dt.from_local(torch.ones(2), mesh, [dt.Shard(0)])
    else:
        loss.item()


def goes_on(rank, failing):
    """The rank that raised does without, and comes later."""
    lone_failure.QUIET = 3.0
    cholesky([])
    try:
        factor = torch.linalg.cholesky(matrices([failing]))
    except RuntimeError:
        factor = matrices([])
    time.sleep(STAYS / 2 * (rank == failing))
    full = factor.redistribute(placements=[dt.Replicate()]).to_local()
    assert full.sum().item() == 3 * WORLD


def caught(rank, failing):
    """The rank that raised goes on with the next batch; the others are still in the sum."""
    for x in [matrices([]), matrices([failing]), matrices([]), matrices([])]:
        with contextlib.suppress(torch.linalg.LinAlgError):
            torch.linalg.cholesky(x).sum().item()


def all_catch(rank, failing):
    """All ranks raise alike."""
    for x in [matrices([]), matrices(range(WORLD)), matrices([])]:
        with contextlib.suppress(torch.linalg.LinAlgError):
            assert torch.linalg.cholesky(x).sum().item() == 3 * WORLD


def in_a_thread(rank, failing):
    """The program of one rank is late, and its thread in time, as of a writer of checkpoints."""
    x, group = matrices([]), new_group(range(WORLD), ("world",), "writer")

    def write():
        time.sleep(STAYS * (rank != failing))
        gather_objects(rank, group)

    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(STAYS * (rank == failing))
    assert x.sum().item() == 3 * WORLD
    thread.join()


def another_call(rank, failing):
    """One rank calls a collective that the others do not call."""
    x = matrices([])
    x.sum().item()
    if rank == failing:
        x.redistribute(placements=[dt.Replicate()])
    (x * 2).sum().item()


PROGRAMS = {
    f.__name__: f
    for f in (
        call,
        known_call,
        backward,
        in_the_background,
        alike,
        alike_in_a_run,
        goes_on,
        caught,
        all_catch,
        in_a_thread,
        another_call,
        read_on_one_rank,
        two_reads,
        facts_and_read,
    )
}
for name in ("1f1b", "gpipe", "zero_bubble", "zbv", "dualpipev"):
    for where in ("forward", "backward"):
        PROGRAMS[f"{name} {where}"] = functools.partial(schedule, name=name, where=where)


def survives(rank, body, failing, folder):
    lone_failure.QUIET, blocked_wait.SLICE = 1.0, timedelta(seconds=0.4)
    failure_watch.PERIOD = 0.4
    code = 0
    try:
        body(rank, failing)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    ended = [folder / str(r) for r in range(WORLD)]
    ended[rank].touch()
    while not all(file.exists() for file in ended):
        time.sleep(0.05)
    os._exit(code)


def main() -> None:
    worlds = {}
    for name in sys.argv[1:]:
        where, failing = name.rsplit("-", 1)
        told = {"failing": int(failing), "folder": Path(tempfile.mkdtemp())}
        worlds[name] = functools.partial(survives, body=PROGRAMS[where], **told), WORLD
    print(json.dumps(run_worlds(worlds, AT_ONCE)))


if __name__ == "__main__":
    main()
