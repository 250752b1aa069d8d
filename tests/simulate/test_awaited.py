"""A reshard that is waited for where it is read runs beside what is computed meanwhile, as it does
on real ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

import disttensor as dt
from disttensor.simulate import simulate
from disttensor.simulate.devices import Link, Network
from disttensor.simulate.events import Collective, Op, Wait
from tests.support.blocking import Blocking


def build(around):
    mesh = dt.init_mesh((2,), ("tp",))
    x = dt.ones(2048, 1024, mesh=mesh, placements=[dt.Shard(1)], requires_grad=True)
    v = dt.ones(1024, 512, mesh=mesh, placements=[dt.Shard(0)], requires_grad=True)
    w = dt.ones(2048, 2048, mesh=mesh, requires_grad=True)

    def step():
        with around():  # a simulation hides the observers around it
            whole = dt.reshard(x @ v, mesh, [dt.Replicate()])
            other = torch.matmul(w, w)
            torch.matmul(other, whole).sum().backward()

    return step


def simulated(around):
    """What a rank does in the forward, less what is neither of a collective nor a product; and its
    seconds."""
    report = simulate(partial(build, around), world=2, network=Network(within=Link(20e9, 10e-6)))
    (kind,) = report.kinds
    names = {Collective: "begins", Wait: "waits"}
    of = [
        names.get(type(e)) or e.name
        for e in kind.events
        if not isinstance(e, Op) or (e.flops and e.phase == "forward")
    ]
    return of[: of.index("waits") + 2], kind.timeline.total("wait for ranks"), kind.timeline.end


def test_a_reshard_runs_beside_what_follows():
    later, waits, end = simulated(nullcontext)
    now, waits_now, end_now = simulated(Blocking)
    assert later == ["mm", "begins", "mm", "waits", "mm"]
    assert now == ["mm", "begins", "waits", "mm"]
    assert waits < waits_now and end < end_now
