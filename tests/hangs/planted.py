"""Programs whose ranks wait for each other for ever: ``python -m tests.hangs.planted NAME ...``
prints, as JSON by name, what the ranks print about it.

Each program has the words that name its cause. Most use torch alone.
"""

from __future__ import annotations

import datetime
import fcntl
import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import disttensor as dt
from tests.comm.deaths import run_worlds

WORLD = 3
AT_ONCE = 4  # worlds
SECONDS = 1.0  # that a rank waits before it asks
LASTS = 15.0  # seconds of a world
BAD = 1  # the rank that differs
PROGRAMS = {}


def hang(cause, world=WORLD):
    """Registers a program. ``cause``: words of the diagnosis."""

    def register(fn):
        PROGRAMS[fn.__name__] = fn, cause, world
        return fn

    return register


def ones(n=8):
    return torch.ones(n)


def forever():
    for _ in range(40):  # a worker of a loader outlives its rank
        time.sleep(0.5)


# Collectives of torch.distributed -----------------------------------------------------------------


@hang("rank 1 has not started all_reduce of [8] float (#4 of ranks 0 to 2)")
def missing_call(rank):
    for _ in range(2):
        dist.all_reduce(ones())
    if rank == BAD:
        forever()
    dist.all_reduce(ones())


@hang("ranks 0, 2 all_reduce of [8] float at")
def another_kind(rank):
    dist.broadcast(ones(), 0) if rank == BAD else dist.all_reduce(ones())
    dist.barrier()


@hang("rank 1 has not started all_reduce of [8] float (#6 of ranks 0 to 2)")
def fewer_batches(rank):
    for _ in range(4 if rank == BAD else 5):
        dist.all_reduce(ones())
    if rank == BAD:
        forever()


@hang("rank 1 has not started all_reduce of [1] float (#3 of ranks 0 to 2)")
def branch_on_data(rank):
    loss = torch.tensor([float(rank == BAD)])
    dist.all_reduce(ones())
    if loss.item() < 0.5:
        dist.all_reduce(loss)
    forever()


@hang("rank 1 barrier at")
def barrier_on_one(rank):
    if rank == BAD:
        dist.barrier()
    dist.all_reduce(ones())
    dist.all_reduce(ones())


@hang("rank 1 broadcast of [1] long at")
def object_list_on_one(rank):
    if rank == BAD:
        dist.broadcast_object_list(["x"], 0)
    dist.all_reduce(ones())


@hang("rank 1 all_gather")
def gather_objects_on_one(rank):
    if rank == BAD:
        dist.all_gather_object([None] * WORLD, "x")
    dist.all_reduce(ones())


@hang("rank 1 has not started all_reduce of [8] float (#1 of ranks 0, 1)")
def order_of_groups(rank):
    pair = dist.new_group([0, 1])
    for group in (pair, None) if rank == 0 else (None, pair):
        if group is None or rank < 2:
            dist.all_reduce(ones(), group=group)


@hang("it waits in all_reduce of [8] float (#1 of ranks")
def ring_of_groups(rank):
    groups = [dist.new_group(sorted((r, (r + 1) % WORLD))) for r in range(WORLD)]
    dist.all_reduce(ones(), group=groups[rank])


@hang("rank 1 has not started all_reduce of [8] float (#1 of ranks 0, 1)")
def member_left_out(rank):
    pair = dist.new_group([0, 1])
    if rank != BAD:
        dist.all_reduce(ones(), group=pair) if rank == 0 else None
    dist.barrier()


@hang("rank 0 has not started all_reduce of [8] float (#3 of ranks 0 to 2)")
def first_rank_alone(rank):
    dist.all_reduce(ones())
    if rank == 0:
        forever()  # it writes a checkpoint
    dist.all_reduce(ones())


@hang("rank 1 has not started all_reduce of [8] float (#2 of ranks 0 to 2)")
def async_never_waited(rank):
    if rank != BAD:
        dist.all_reduce(ones(), async_op=True).wait()
    forever()


@hang("rank 1 reduce of [8] float at")
def reduce_or_all_reduce(rank):
    dist.reduce(ones(), 0) if rank == BAD else dist.all_reduce(ones())
    dist.barrier()


@hang("rank 1 has not started scatter (#2 of ranks 0 to 2)")
def scatter_left_out(rank):
    if rank != BAD:
        dist.scatter(ones(), [ones()] * WORLD if rank == 0 else None, 0)
        dist.barrier()
    forever()


@hang("rank 1 has not started all_to_all (#2 of ranks 0 to 2)")
def all_to_all_left_out(rank):
    if rank == BAD:
        forever()
    dist.all_to_all_single(ones(3), ones(3))


@hang("rank 1 has not started all_reduce of [8] float (#2 of ranks 0 to 2)")
def from_a_thread(rank):
    if rank == BAD:
        forever()
    thread = threading.Thread(target=lambda: dist.all_reduce(ones()))
    thread.start()
    thread.join()


@hang("rank 1 has not started gather (#2 of ranks 0 to 2)")
def gather_left_out(rank):
    if rank == BAD:
        forever()
    dist.gather(ones(), [ones() for _ in range(WORLD)] if rank == 0 else None, 0)
    dist.barrier()


@hang("rank 1 has not started all_reduce of [3] float (#2 of ranks 0 to 2)")
def reduce_scatter_left_out(rank):
    if rank == BAD:
        forever()
    dist.reduce_scatter_tensor(ones(1), ones(3))  # of gloo: a sum of all


@hang("rank 1 has not started all_reduce of [8] float (#1 of ranks 0 to 2)")
def group_of_another_number(rank):
    """The groups have the same ranks, and are two."""
    pairs = [dist.new_group(range(WORLD)) for _ in range(2)]
    dist.all_reduce(ones(), group=pairs[rank == BAD])


# Messages -----------------------------------------------------------------------------------------


@hang("rank 0 waits for a message of rank 1, which waits for a message of rank 2")
def ring_of_receives(rank):
    dist.recv(ones(), (rank + 1) % WORLD)


@hang("rank 0 waits for a message of rank 2, which sleeps")
def wrong_peer(rank):
    if rank == 0:
        dist.recv(ones(), 2)
    if rank == 1:
        dist.send(ones(), 0)
    forever()


@hang("dist.irecv(ones(), 0).wait(): waits for other ranks")
def wait_of_a_receive(rank):
    if rank == BAD:
        dist.irecv(ones(), 0).wait()
    forever()


@hang("rank 0 waits for a message of rank 1, which waits in all_reduce of [8] float")
def receive_against_sum(rank):
    if rank == 0:
        dist.recv(ones(), 1)
    dist.all_reduce(ones())


@hang("rank 0 waits for a message of rank 1, which waits for a message of rank 0")
def large_sends(rank):
    if rank < 2:
        dist.recv(ones(2**22), 1 - rank)
        dist.send(ones(2**22), 1 - rank)
    forever()


@hang("rank 0 waits for a message of rank 1, which waits for a message of rank 0")
def tags_differ(rank):
    if rank == BAD:
        dist.send(ones(), 0, tag=1)
        forever()
    if rank == 0:
        dist.recv(ones(), 1, tag=2)
    forever()


@hang("rank 1 sleeps at")
def monitored_barrier_on_some(rank):
    if rank == BAD:
        forever()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))


@hang("waits for other ranks")
def batch_without_its_peer(rank):
    if rank == 0:
        ops = [dist.P2POp(dist.irecv, ones(), 1), dist.P2POp(dist.isend, ones(), 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    forever()


# What the rank that is missing does ---------------------------------------------------------------


def after_an_error(rank, fail, then):
    """One rank fails, and catches the error."""
    try:
        if rank == BAD:
            fail()
        dist.all_reduce(ones())
    except (RuntimeError, ValueError):
        then()


def bad_batch():
    raise ValueError("a bad batch")


@hang("rank 1 has not started all_reduce of [8] float (#2 of ranks 0 to 2), in which ranks 0, 2 "
      "wait: it handles ValueError: a bad batch")  # fmt: skip
def exception_handler(rank):
    after_an_error(rank, bad_batch, forever)


@hang("it handles RuntimeError: [enforce fail at")
def out_of_memory(rank):
    after_an_error(rank, lambda: torch.empty(2**60), forever)


@hang("rank 1 barrier at")
def clean_up_in_finally(rank):
    after_an_error(rank, bad_batch, dist.barrier)


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        forever()


@hang("it waits for data")
def loader_with_a_worker(rank):
    for _ in DataLoader(Slow(), num_workers=1) if rank == BAD else ():
        pass
    dist.all_reduce(ones())


@hang("it sleeps at")
def loader_without_workers(rank):
    for _ in DataLoader(Slow()) if rank == BAD else ():
        pass
    dist.all_reduce(ones())


@hang("it computes at")
def computes(rank):
    x = torch.eye(200)
    while rank == BAD:
        x = x @ x
    dist.all_reduce(ones())


@hang("it computes at")
def python_loop(rank):
    while rank == BAD:
        sum(range(1000))
    dist.all_reduce(ones())


@hang("it stands still at")
def lock_taken(rank):
    lock = threading.Lock()
    lock.acquire()
    if rank == BAD:
        lock.acquire()
    dist.all_reduce(ones())


@hang("it stands still at")
def pipe_without_writer(rank):
    out, _ = os.pipe()
    if rank == BAD:
        os.read(out, 1)
    dist.all_reduce(ones())


@hang("it stands still at")
def process_that_stays(rank):
    if rank == BAD:
        subprocess.run(["sleep", "20"], check=True)
    dist.all_reduce(ones())


@hang("it stands still at")
def queue_without_writer(rank):
    if rank == BAD:
        queue.SimpleQueue().get()
    dist.all_reduce(ones())


@hang("it stands still at")
def lock_of_a_file(rank):
    """The rank that holds it waits for the one that wants it."""
    with open(f"/tmp/lock-{os.getppid()}", "w") as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        if rank == BAD:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.all_reduce(ones())


@hang("it computes at")
def compiles_a_pattern(rank):
    """A regular expression that never ends, in C."""
    if rank == BAD:
        while True:
            re.match("(a+)+b", "a" * 22)
    dist.all_reduce(ones())


@hang("rank 1 is stopped")
def stopped(rank):
    dist.all_reduce(ones())
    time.sleep(1)
    if rank == BAD:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(ones())


@hang("rank 1 does not answer: it computes, in one call that keeps Python from running")
def holds_the_interpreter(rank):
    dist.all_reduce(ones())
    if rank == BAD:
        time.sleep(1)
        pow(7, 10**8)
    dist.all_reduce(ones())


@hang("it stands still at")
def store_without_a_key(rank):
    if rank == BAD:
        dist.distributed_c10d._get_default_store().get("never")
    dist.all_reduce(ones())


@hang("rank 1 has not started all_reduce of [8] float")
def group_on_one_rank(rank):
    dist.all_reduce(ones())
    if rank == BAD:
        dist.new_group([0, 1, 2])
    dist.all_reduce(ones())


# DDP, FSDP2, DTensor, pipelining, checkpoints ---------------------------------------------------


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@hang("rank 1 has not started all_reduce of [30] float")
def ddp_fewer_batches(rank):
    net = DistributedDataParallel(model())
    for _ in range(2 if rank == BAD else 3):
        net(torch.ones(2, 4)).sum().backward()
    forever()


@hang("rank 1 has not started all_reduce of [30] float")
def ddp_no_sync_on_one(rank):
    net = DistributedDataParallel(model())
    net(torch.ones(2, 4)).sum().backward()
    if rank == BAD:
        with net.no_sync():
            net(torch.ones(2, 4)).sum().backward()
        forever()
    net(torch.ones(2, 4)).sum().backward()


@hang("rank 1 has not started all_reduce of [30] float")
def ddp_skipped_loss(rank):
    net = DistributedDataParallel(model())
    for step in range(3):
        loss = net(torch.ones(2, 4)).sum()
        if not (rank == BAD and step == 1):
            loss.backward()
    forever()


@hang("rank 0 broadcast of")
def ddp_evaluates_on_one(rank):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net = DistributedDataParallel(net)
    net(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        net(torch.ones(2, 4))
    dist.all_reduce(ones())


def sharded():
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


@hang("rank 1 has not started")
def fsdp_fewer_batches(rank):
    net = sharded()
    for _ in range(1 if rank == BAD else 2):
        net(torch.ones(2, 4)).sum().backward()
    forever()


@hang("rank 0 all_gather")
def fsdp_saves_on_one(rank):
    net = sharded()
    net(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        {name: p.full_tensor() for name, p in net.state_dict().items()}
    dist.barrier()


@hang("rank 1 has not started")
def fsdp_norm_on_some(rank):
    net = sharded()
    net(torch.ones(2, 4)).sum().backward()
    if rank != BAD:
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        norm.full_tensor()
    forever()


def on_mesh():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])


@hang("rank 0 has not started all_reduce of [] float")
def dtensor_read_on_some(rank):
    x = on_mesh().sum()
    dist.barrier()
    if rank:
        assert isinstance(x, DTensor)
        x.full_tensor()
    forever()


@hang("rank 1 has not started all_gather")
def dtensor_redistributes_on_some(rank):
    x = on_mesh()
    if rank != BAD:
        x.redistribute(placements=[Replicate()]).to_local() + 1
    forever()


@hang("rank 1 has not started")
def tensor_parallel_on_some(rank):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("cpu", (WORLD,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), mesh, plan)
    net(torch.ones(2, 4)).sum().backward()
    if rank == BAD:
        forever()
    net(torch.ones(2, 4)).sum().backward()


@hang("rank 1 has not started")
def checkpoint_on_some(rank):
    import torch.distributed.checkpoint as dcp

    if rank != BAD:
        dcp.save({"x": ones()}, checkpoint_id=f"/tmp/never-{os.getppid()}")
    forever()


@hang("rank 0 waits for", world=2)
def pipeline_stage_missing(rank):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    layer = nn.Linear(4, 4)
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, t: (y - t).sum())
    if rank == 1:
        forever()
    schedule.step(torch.ones(4, 4))


# Ours ---------------------------------------------------------------------------------------------


def split():
    return dt.arange(12.0, mesh=dt.init_mesh((WORLD,), ("dp",)), placements=[dt.Shard(0)])


@hang("rank 1 has not started")
def our_sum_on_some(rank):
    x = split()
    if rank == BAD:
        forever()
    dt.reshard(x, placements=[dt.Replicate()])


@hang("rank 1 has not started")
def our_step_on_some(rank):
    net = dt.shard_data_parallel(model(), dt.init_mesh((WORLD,), ("dp",)), "dp", stage=3)
    x = dt.shard_tensor(torch.ones(6, 4), net[0].weight.process_mesh, [dt.Shard(0)])
    net(x).sum().backward()
    if rank == BAD:
        forever()
    net(x).sum().backward()


@hang("rank 0 sleeps at")
def our_stage_sleeps(rank):
    dt.init_mesh((WORLD,), ("all",))
    meshes = [dt.ProcessMesh([r], ("x",)) for r in range(WORLD)]
    x = dt.ones(2, 4, mesh=meshes[0])
    if rank == 0:
        forever()
    for mesh in meshes:
        x = dt.reshard(x, mesh) * 2


@hang("rank 1 sleeps at")
def our_checkpoint_on_some(rank):
    net = dt.shard_data_parallel(model(), dt.init_mesh((WORLD,), ("dp",)), "dp", stage=3)
    keeper = dt.Checkpointer(f"/tmp/never-ours-{os.getppid()}")
    if rank == BAD:
        forever()
    keeper.save(1, model=net)


def watched(rank, body):
    dt.watch(SECONDS)
    dist.init_process_group("gloo")
    dist.barrier()
    timer = threading.Timer(LASTS, os._exit, (0,))
    timer.daemon = True
    timer.start()
    body(rank)
    forever()


def main() -> None:
    names = sys.argv[1:] or list(PROGRAMS)
    worlds = {
        name: (functools.partial(watched, body=PROGRAMS[name][0]), PROGRAMS[name][2])
        for name in names
    }
    ended = run_worlds(worlds, AT_ONCE)
    print(json.dumps({name: "".join(text for *_, text in ranks) for name, ranks in ended.items()}))


if __name__ == "__main__":
    main()
