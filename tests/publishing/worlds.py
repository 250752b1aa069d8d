"""Worlds that publish and receive: ``python -m tests.publishing.worlds CASE ...`` prints, as JSON
by case and world, the exit status, the seconds and the stderr of each rank.

Each world is a launch of its own. All of a case run at once, forked as in tests/comm/deaths.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import time

import torch
from torch import nn

import disttensor as dt
from disttensor.publishing.exchange import PieceExchange
from tests.comm.deaths import run_worlds
from tests.support.ports import free_port

STEPS = 3
STRATEGIES = {
    "dp": {"dp": 4},
    "stage1": {"sharding": 4, "zero_stage": 1},
    "stage2": {"dp": 2, "sharding": 2, "zero_stage": 2},
    "stage3": {"sharding": 4, "zero_stage": 3},
    "tp": {"tp": 2, "dp": 2},
    "pp": {"pp": 2, "tp": 2},
    "pp3": {"pp": 2, "sharding": 2, "zero_stage": 3},
}
PLAN = {"0.*": {"tp": dt.Shard(0)}, "2.weight": {"tp": dt.Shard(1)}}
COLUMNS, ROWS = ({"*.weight": [dt.Shard(dim)]} for dim in (1, 0))
LAYERS = ["0", "1", "2", "3", "4"]


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    )  # fmt: skip
    model[0].register_buffer("count", torch.arange(3))
    return model


class Fused(nn.Module):
    """The weights of ``mlp`` under other names: two layers are one tensor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.rest = nn.Parameter(torch.zeros(8))  # the biases of two layers
        self.rows = nn.Parameter(torch.zeros(2, 7))  # of the weight of the second


NAMES = {
    "first.weight": "0.weight", "first.bias": "0.bias", "rest": ["2.bias", "4.bias"],
    "rows": ("2.weight", slice(1, 3)),
}  # fmt: skip


def train(model, optimizer, x):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def expected():
    """The weights after each step, in one process."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out = []
    for _ in range(STEPS + 1):
        out.append({name: x.detach().clone() for name, x in model.state_dict().items()})
        train(model, optimizer, torch.arange(24.0).view(4, 6) / 24)
    return out


def check(model, step, dtype=torch.float32):
    whole = model.state_dict()
    want = expected()[step]
    if isinstance(model, Fused):
        rest, rows = torch.cat((want["2.bias"], want["4.bias"])), want["2.weight"][1:3]
        want = {"rest": rest, "rows": rows, "first.weight": want["0.weight"]}
        want["first.bias"] = expected()[step]["0.bias"]
    for name, x in want.items():
        got = whole[name]
        got = got.full_tensor() if isinstance(got, dt.DistTensor) else got
        close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(got, x, **close)
        if dtype is torch.bfloat16 and x.is_floating_point():
            assert torch.equal(got, got.bfloat16().float())


def trainer(rank, address, strategy, dtype, receivers):
    """Publishes the first weights and those of each step, when all receivers have joined."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = dt.Strategy(**STRATEGIES[strategy])
    stages, places = strategy.stages(), strategy.batch(sequence=None)
    model, optimizer = strategy.apply(model, optimizer, PLAN, layers=LAYERS)
    publisher = dt.publish(model, address, dtype=dtype, timeout=20)
    publisher.send(0)
    while not rank and publisher._line.store.add("ready", 0) < receivers:
        time.sleep(0.01)
    for step in range(1, STEPS + 1):
        x = dt.shard_tensor(torch.arange(24.0).view(4, 6) / 24, stages[0], places)
        train(model, optimizer, x)
        publisher.send(step)
    publisher.close()
    print("sent", publisher.nbytes, file=sys.stderr)


def receiver(rank, address, kind, dtype):
    model = Fused() if kind == "fused" else mlp()
    for x in model.state_dict().values():
        x.zero_()
    world = int(os.environ["WORLD_SIZE"])
    if kind == "tp":
        dt.shard_module(model, dt.init_mesh((world,), ("tp",)), COLUMNS)
    elif kind == "stage3":
        dt.shard_data_parallel(model, dt.init_mesh((world,), ("dp",)), "dp", stage=3)
    names, strict = (NAMES, False) if kind == "fused" else (None, True)
    joined = dt.receive(model, address, names=names, strict=strict, timeout=20)
    versions, nbytes = [], 0
    for x in model.state_dict().values():
        local = x.to_local() if isinstance(x, dt.DistTensor) else x
        itemsize = 2 if dtype and x.is_floating_point() else x.itemsize
        nbytes += local.numel() * itemsize
    while (step := joined.update()) is not None:
        versions.append(step)
        check(model, step, dtype or torch.float32)
        assert joined.nbytes == nbytes * len(versions), (joined.nbytes, nbytes, versions)
        if len(versions) == 1:
            joined._line.store.add("ready", rank == 0)
    print("received", joined.nbytes, file=sys.stderr)
    assert versions == sorted({*versions}) and versions[-1] == STEPS, versions


def strategies(strategy, address):
    dtype = torch.bfloat16 if strategy in ("stage2", "pp") else None
    worlds = {"plain": 1, "tp": 2, "stage3": 3, "fused": 1}
    return {
        "trainer": (
            functools.partial(
                trainer, address=address, strategy=strategy, dtype=dtype, receivers=len(worlds)
            ),
            4,
        ),
        **{
            kind: (functools.partial(receiver, address=address, kind=kind, dtype=dtype), n)
            for kind, n in worlds.items()
        },
    }


# Losses -------------------------------------------------------------------------------------------


def die(how):
    if how == "end":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(method, how, is_ready):
    """Dies at the start of a version that this rank sends or receives, the third or a later one."""
    usual, count = getattr(PieceExchange, method), itertools.count(1)

    def dying(*args):
        if next(count) >= 3 and is_ready():
            die(how)
        return usual(*args)

    setattr(PieceExchange, method, dying)


def report(words):
    print(words, file=sys.stderr, flush=True)


def publishing(rank, address, where, how, dying):
    """Publishes until the receiver ``later`` has all that it wants."""
    model = dt.shard_module(mlp(), dt.init_mesh((2,), ("dp",)), ROWS)
    publisher = dt.publish(model, address, timeout=10)
    store = publisher._line.store
    if (where, rank) == ("send", dying):
        die_in("send", how, lambda: store.add("came", 0) == 3)
    for step in itertools.count():
        try:
            publisher.send(step)
        except dt.errors.CommError as error:
            report(f"at step {step}: {error}")
            store.set("lost", "")
        if (where, rank) == ("idle", dying) and store.add("came", 0) == 3:
            die(how)
        done = torch.tensor([store.add("done", 0)])
        torch.distributed.all_reduce(done)
        if done:
            break
        with torch.no_grad():
            for p in model.parameters():
                p += 1
        time.sleep(0.05)
    publisher.close()


def first(rank, address, where, how, dying):
    """A receiver of two ranks, whose pieces come from one rank each."""
    model = dt.shard_module(mlp(), dt.init_mesh((2,), ("dp",)), ROWS)
    receiver = dt.receive(model, address, timeout=10)
    if (where, rank) == ("receive", dying):
        die_in("receive", how, lambda: True)
    updates(model, receiver, 10**6, (where, rank) == ("between", dying) and how)


def later(rank, address, where, how, dying):
    """A receiver in one process that comes, leaves, and comes again after ``first`` is lost."""
    for last in (False, True):
        model = mlp()
        receiver = dt.receive(model, address, timeout=10)
        updates(model, receiver, 10**6 if where in ("send", "idle") else 3, False)
        receiver.close()
        store = receiver._line.store
        while not last and where not in ("send", "idle") and not store.check(["lost"]):
            time.sleep(0.05)
        if where in ("send", "idle"):
            return
    store.add("done", 1)


def updates(model, receiver, count, how):
    """Updates ``count`` times, or until an error. Each parameter has the version of the step."""
    for number in range(count):
        try:
            receiver.update()
        except dt.errors.CommError as error:
            report(f"{error}")
            break
        finally:
            for x, start in zip(model.parameters(), mlp().parameters(), strict=True):
                if isinstance(x, dt.DistTensor):
                    mesh, places = x.process_mesh, x.placements
                    start = dt.shard_tensor(start.detach(), mesh, places, check=False).to_local()
                    x = x.to_local()
                assert ((x - start).round() == (receiver.step or 0)).all()
        if number == 0:
            receiver._line.store.add("came", 1)
        if number == 2 and how:
            die(how)


def losses(case, address):
    where, how, dying = case.split("-")
    options = {"address": address, "where": where, "how": how, "dying": int(dying)}
    bodies = {"publishing": (publishing, 2), "first": (first, 2), "later": (later, 1)}
    return {name: (functools.partial(f, **options), n) for name, (f, n) in bodies.items()}


def main() -> None:
    out = {}
    for case in sys.argv[1:]:
        worlds = (strategies if case in STRATEGIES else losses)(case, f"127.0.0.1:{free_port()}")
        out[case] = run_worlds(worlds, len(worlds))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
