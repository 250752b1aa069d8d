"""``simulate``: a training step as every rank of a large world would do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from disttensor.checks import (
    argument_error,
    check_callable,
    check_int,
    check_sequence,
    check_type,
    is_int,
)
from disttensor.comm.log import CommLog
from disttensor.simulate import devices
from disttensor.simulate.devices import Device
from disttensor.simulate.kind import Kind
from disttensor.simulate.kinds import representatives
from disttensor.simulate.network import Network
from disttensor.simulate.one_rank import Program, of_build
from disttensor.simulate.ranks import Ranks
from disttensor.simulate.recorder import Values, check_values
from disttensor.simulate.report import Report
from disttensor.simulate.timeline import timelines
from disttensor.simulate.world import frozen_garbage


def simulate(
    build: Callable[[], Callable[[], Any]],
    world: int,
    *,
    ranks: Iterable[int] | None = None,
    device: Device = devices.H100,
    network: Network = Network(),  # noqa: B008  (it is frozen)
    values: Values = 0.0,
) -> Report:
    """The Report of one training step on ``world`` ranks, found in this process, without memory for
    the model and without a kernel.

    ``build()`` is ordinary code that makes meshes, model and optimizer. It returns ``step``, a
    function of no arguments that does one training step; the report is of its second call. The
    program runs as one rank after the other, one for each kind of rank: ranks of one stage do the
    same, unless their pieces differ in size. ``ranks``: the ranks that the report is of, all
    without it. ``device`` and ``network`` say what kernels and messages cost; the program itself
    runs on tensors of the CPU, whatever they describe.

    Tensors hold no data. What the program reads of them (``item``, ``bool``, ``tolist``) is
    ``values``: a number, or a function of the line that reads, as ``"train.py:12"``. Afterwards the
    process is as it was. Raises SimulationError, with the line, where a shape depends on data and
    where ranks of one kind do not do the same, and what the program itself raises.

    >>> def build():
    ...     mesh = dt.init_mesh((2, 4), ("dp", "tp"))
    ...     plan = {"weight": [dt.Replicate(), dt.Shard(0)]}
    ...     model = dt.shard_module(torch.nn.Linear(8, 8), mesh, plan)
    ...     optimizer = torch.optim.SGD(model.parameters())
    ...     def step():
    ...         x = dt.ones(6, 8, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    ...         model(x).square().sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     return step
    >>> report = dt.simulate(build, world=8)
    >>> [kind.ranks for kind in report.kinds], report.kinds[0].comms.counts()
    ([(0, 1, 2, 3, 4, 5, 6, 7)], {'all_reduce': 2})
    """
    check_callable("simulate: build", build, "a function that returns a function")
    return simulate_program(
        of_build(build), world, ranks=ranks, device=device, network=network, values=values
    )


def simulate_program(
    program: Program,
    world: int,
    *,
    ranks: Iterable[int] | None = None,
    device: Device = devices.H100,
    network: Network = Network(),  # noqa: B008
    values: Values = 0.0,
) -> Report:
    """``simulate`` for what runs up to a step in its own way, as a script does."""
    check_int("simulate: world", world, 1, "a number of ranks")
    check_type("simulate: device", device, Device, "a dt.devices.Device")
    check_type("simulate: network", network, Network, "a dt.devices.Network")
    check_values("simulate", values)
    expected = f"a list of ranks from 0 to {world - 1}"
    wanted = None if ranks is None else check_sequence("simulate: ranks", ranks, expected)
    for rank in wanted or ():
        if not is_int(rank) or not 0 <= rank < world:
            raise argument_error("simulate: ranks: entry", rank, expected, ValueError)
    if wanted == ():
        raise argument_error("simulate: ranks", wanted, expected, ValueError)

    run = Ranks(program, world, values, network.ranks_per_node, device.backend)
    with frozen_garbage() as run.set_aside:
        found = representatives(world, wanted, run)
        if not run.check(*found[0]):  # micro-batches are not alike
            run.few = False
            found = representatives(world, wanted, run)
            run.check(*found[0])
    events = [(members, rank, one.events) for members, rank, one in found]
    rows = timelines(events, world, device, network)
    kinds = [
        Kind(tuple(members), rank, CommLog(one.comms), one.memory, one.events, row, one.stage)
        for (members, rank, one), row in zip(found, rows, strict=True)
    ]
    said = dict.fromkeys(w for _, _, one in found for w in one.warnings)
    return Report(world, kinds, device, network, list(said))
