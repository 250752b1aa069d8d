"""Worlds that publish and receive: ``python -m tests.publishing.worlds CASE ...`` prints, as JSON by
case and world, the exit status, the seconds and the stderr of each rank.

Each world is a launch of its own. All of a case run at once, forked as in tests/comm/deaths.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import sys
import time

import torch
from torch import nn

import disttensor as dt
from disttensor.publishing import lifeline
from disttensor.publishing.exchange import Exchange
from tests.comm.deaths import run_worlds

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
COLUMNS = {"*.weight": [dt.Shard(1)]}
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


# Deaths -------------------------------------------------------------------------------------------


def die(how):
    if how == "end":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_messages(how, after):
    """Dies when it has started its messages of one version more than ``after``."""
    wait, count = Exchange._wait, itertools.count()

    def dying(self):
        if next(count) == after:
            die(how)
        return wait(self)

    Exchange._wait = dying


def publishing(rank, address, where, how, dying):
    """Publishes until a receiver is lost, and then to another one."""
    mesh = dt.init_mesh((2,), ("dp",))
    model = dt.shard_module(mlp(), mesh, {"*.weight": [dt.Shard(0)]})
    publisher = dt.publish(model, address, timeout=10)
    if (where, rank) == ("send", dying):
        die_in_messages(how, 1)
    step = 0
    while True:
        publisher.send(step)
        step += 1
        with torch.no_grad():
            for p in model.parameters():
                p += 1
        time.sleep(0.05)
        if (where, rank) == ("idle", dying) and step > 20:
            die(how)


def lost_receiver(rank, address, dying, words):
    try:
        publishing(rank, address, "", "", None)
    except dt.errors.CommError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def receiving(rank, address, where, how, dying, size):
    model = mlp()
    if size > 1:
        mesh = dt.init_mesh((size,), ("tp",))
        dt.shard_module(model, mesh, COLUMNS)
    joined = dt.receive(model, address, timeout=10)
    if (where, rank) == ("receive", dying):
        die_in_messages(how, 1)
    while True:
        try:
            joined.update()
        except dt.errors.CommError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            break
        if (where, rank) == ("between", dying):
            die(how)
    values = [dt.full if False else x for x in model.parameters()]
    base = mlp()
    for x, b in zip(values, base.parameters(), strict=True):
        local = x.to_local() if isinstance(x, dt.DistTensor) else x
        if isinstance(x, dt.DistTensor):
            b = dt.shard_tensor(b.detach(), x.process_mesh, x.placements, check=False).to_local()
        added = (local - b).round()
        assert (added == joined.step).all(), (added, joined.step)


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def worlds_of(case):
    address = free_address()
    if case in STRATEGIES:
        return strategies(case, address)
    raise KeyError(case)


def main() -> None:
    lifeline.SILENCE = 4.0
    out = {}
    for case in sys.argv[1:]:
        worlds = worlds_of(case)
        out[case] = run_worlds(worlds, len(worlds))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
