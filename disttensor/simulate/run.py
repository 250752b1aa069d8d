"""``simulate``: one training step as every rank of a large world does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from disttensor.checks import argument_error, check_callable, check_int, check_number, check_type
from disttensor.comm.log import CommLog
from disttensor.progress import bar
from disttensor.simulate import devices
from disttensor.simulate.child import Child
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.kind import Kind
from disttensor.simulate.kinds import Differences
from disttensor.simulate.measured import Measured, check_ranks
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.recorder import Values
from disttensor.simulate.report import Report
from disttensor.simulate.run_rank import Program, of_build, start_rank
from disttensor.simulate.runner import Runner
from disttensor.simulate.world import frozen_garbage


def simulate(
    build: Callable[[], Callable[[], Any]],
    world: int,
    *,
    ranks: Iterable[int] | None = None,
    device: Device = devices.H100,
    network: Network = Network(),  # noqa: B008  (it is frozen)
    values: Values = 0.0,
    measured: Measured | None = None,
) -> Report:
    """Simulates one training step on ``world`` ranks on this machine, without memory for the model
    and without running kernels.

    The program runs as one rank of each kind, each in a forked process: ranks of one stage do the
    same, unless their pieces differ in size. Tensors hold no data. The program changes nothing of
    this process and no files: they are written to a scratch folder.

    Args:
        build: ordinary code that makes meshes, model and optimizer. ``build()`` returns ``step``, a
            function of no arguments that does one training step. The report is of its second call.
        world: the number of ranks.
        ranks: the ranks that the report covers. Default: all.
        device: the costs of kernels. The program itself runs on tensors of the CPU.
        network: the costs of collectives and messages.
        values: the result of reading data (``item``, ``bool``, ``tolist``): a number, or a function
            of the line that reads, as ``"train.py:12"``.
        measured: the result of ``measure``: real times of some ranks, in place of those by
            ``device``, whose ``type`` is "cpu" then.

    Returns:
        A Report, with memory, communication, floating-point operations and time.

    Raises:
        SimulationError: if a shape depends on data, if ranks of one kind do not communicate alike,
            or if the program reaches the network or another program. The message names the line.
        Exception: any exception of the program.

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
    >>> report = dt.simulate.simulate(build, world=8)
    >>> [kind.ranks for kind in report.kinds], report.kinds[0].comms.counts()
    ([(0, 1, 2, 3, 4, 5, 6, 7)], {'all_reduce': 2})
    """
    check_callable("simulate: build", build, "a function that returns a function")
    return simulate_program(
        of_build(build), world, ranks=ranks, device=device, network=network, values=values,
        measured=measured,
    )  # fmt: skip


def simulate_program(
    program: Program, world: int, *, ranks: Iterable[int] | None = None,
    device: Device = devices.H100, network: Network = Network(), values: Values = 0.0,  # noqa: B008
    measured: Measured | None = None,
) -> Report:  # fmt: skip
    """Simulates a program that starts and stops the recorder itself, such as a script. See
    ``simulate`` for the arguments."""
    check_setting("simulate", world, device, network, values)
    wanted = None if ranks is None else check_ranks("simulate", ranks, world)
    if measured is not None:
        check_type("simulate: measured", measured, Measured, "a result of dt.simulate.measure")
        if device.asynchronous:
            expected = 'a Device(type="cpu", ...), because the measured ranks ran on a CPU'
            raise argument_error("simulate: device", device.name, expected, ValueError)

    with frozen_garbage() as collect_garbage, bar("simulating", unit="ranks") as advance:

        def start(rank: int, short: bool) -> Child[tuple[RankRun, Differences]]:
            advance(note=f"rank {rank} of {world}")
            return start_rank(program, rank, world, values, network.ranks_per_node, device, short)

        runner = Runner(start, collect_garbage)
        found = runner.kinds(world, wanted, network.ranks_per_node)
    kinds = [
        Kind(tuple(ranks), one.rank, CommLog(one.comms), one.memory, one.events, stage=one.stage)
        for ranks, one in found
    ]
    runs = [one for _, one in found]
    warnings = dict.fromkeys([*(w for one in runs for w in one.warnings), *runner.unknown])
    return Report(
        world, kinds, device, network, list(warnings), runs[0].updates, runner.files, measured
    ).on()


def check_setting(who: str, world: Any, device: Any, network: Any, values: Any) -> None:
    """Raises TypeError or ValueError for invalid arguments of a simulation."""
    check_int(f"{who}: world", world, 1, "a number of ranks")
    check_type(f"{who}: device", device, Device, "a dt.simulate.devices.Device")
    check_type(f"{who}: network", network, Network, "a dt.simulate.devices.Network")
    if not callable(values):
        check_number(f"{who}: values", values)
