"""What a step is, which ranks do something of their own, and what a report says of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor.errors import SimulationError
from disttensor.simulate import devices, plan_strategy, simulate
from disttensor.simulate.run import simulate_program
from disttensor.simulate.run_rank import of_script

HEAD = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
import disttensor as dt
strategy = dt.Strategy(dp=4)
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
strategy.apply(model)

def backward(model=model):
    x = dt.shard_tensor(torch.ones(256, 512), strategy.stages()[0], strategy.batch(sequence=None))
    model(x).square().mean().backward()
"""
MUON = """
muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
adam = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])
for it in range(5):
    backward()
    muon.step(); adam.step()
    muon.zero_grad(); adam.zero_grad()
"""
GAN = """
critic = nn.Linear(512, 512)
strategy.apply(critic)
optimizers = [torch.optim.Adam(critic.parameters()), torch.optim.SGD(model.parameters())]
for it in range(5):
    for part, optimizer in zip((critic, model), optimizers):
        backward(part); optimizer.step(); optimizer.zero_grad()
"""
ONE = "optimizer = torch.optim.SGD(model.parameters())\n"
TWICE = f"{ONE}backward(); optimizer.step(); optimizer.step(); optimizer.step()"
EXIT = f"{ONE}backward(); optimizer.step()\nsys.exit(3)"
ENDS = f"{ONE}backward(); optimizer.step()"
STARTS = f"""
import torch.distributed as dist
dist.init_process_group("gloo", world_size=4)
from torch.distributed import init_process_group
{HEAD}
{ONE}
for it in range(2):
    backward(); optimizer.step()
dist.destroy_process_group()
init_process_group()
"""
OTHER = "import torch.distributed as dist\ndist.init_process_group('nccl', world_size=3)"


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Any]:
    def run(text: str) -> Any:
        path = tmp_path / "train.py"
        path.write_text(text)
        return simulate_program(of_script(str(path), []), 4)

    return run


def test_a_step_goes_from_one_update_of_the_first_optimizer_to_the_next(script: Any) -> None:
    whole = 5 * 2 * 64 * 512 * 512  # two products forward, three backward
    report = script(HEAD + MUON)
    assert report.updates == {"AdamW": 1, "Muon": 1}
    assert report.kinds[0].model_flops == whole
    assert "updates of optimizers in the step: 1 of AdamW and 1 of Muon" in str(report)
    report = script(HEAD + GAN)
    assert report.updates == {"SGD": 1, "Adam": 1}
    assert report.kinds[0].model_flops == whole + 2 * 2 * 64 * 512 * 512  # and of the critic


def test_scripts_that_start_the_world_or_end_early(script: Any) -> None:
    assert script(STARTS).kinds[0].flops
    wrong = [
        (HEAD + TWICE, "the step from update 1 to update 2 of the first optimizer .* no forward"),
        (HEAD + EXIT, r"called sys.exit\(3\) at .*train.py:\d+, after 1 updates"),
        (HEAD + ENDS, "ended after 1 updates of its first optimizer"),
        (OTHER, r"init_process_group at .*train.py:2: world_size=3, and the simulated .* is 4"),
    ]
    for text, message in wrong:
        with pytest.raises(SimulationError, match=message):
            script(text)


# Ranks --------------------------------------------------------------------------------------------


def training(of_rank: Callable[[int], Any], world: int = 4) -> Callable[[], Any]:
    """A ``build`` that calls ``of_rank(rank)`` in each step and keeps the result."""

    def build() -> Callable[[], Any]:
        mesh = dt.init_mesh((world,), ("dp",))
        model = dt.shard_module(nn.Linear(64, 64), mesh)
        kept: list[Any] = []

        def step() -> None:
            kept[:] = [of_rank(dist.get_rank())]
            x = dt.shard_tensor(torch.ones(64, 64), mesh, [dt.Shard(0)])
            model(x).sum().backward()

        return step

    return build


@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_that_computes_or_keeps_more_is_a_kind(who: int) -> None:
    more = torch.Size([1 << 21])

    def of_rank(rank: int) -> Any:
        if rank == who:
            torch.ones(512, 512) @ torch.ones(512, 512)
            return torch.zeros(more)
        return None

    report = simulate(training(of_rank), 4)
    others = tuple(r for r in range(4) if r != who)
    assert {k.ranks for k in report.kinds} == {(who,), others}
    mine, its = report.kind_of(who), report.kind_of(others[0])
    assert mine.flops - its.flops == 2 * 512**3
    assert mine.peak_memory - its.peak_memory >= 4 * more.numel()
    assert not report.warnings or "compute up to" in report.warnings[0]


def test_of_many_ranks_that_read_their_rank_some_are_compared() -> None:
    def of_rank(rank: int) -> Any:
        return torch.zeros(1 << 21) if rank == 63 else None

    report = simulate(training(of_rank, 64), 64)
    assert [k.ranks for k in report.kinds] == [tuple(range(63)), (63,)]
    (said,) = [w for w in report.warnings if "reads its rank" in w]
    assert "of ranks 0-63 only 0-1, 8, 63 were run and compared" in said
    assert "test_steps_and_ranks.py:" in said
    quiet = simulate(training(lambda _: None, 64), 64)  # the program itself reads it
    assert any("reads its rank" in w for w in quiet.warnings) and len(quiet.kinds) == 1


@pytest.mark.parametrize("read", ["coordinate", "get_coordinate", "get_local_rank", "environment"])
def test_every_way_to_read_the_rank_is_seen(read: str) -> None:
    def build() -> Callable[[], Any]:
        import os

        mesh = dt.init_mesh((3,), ("dp",))
        ways: dict[str, Callable[[], Any]] = {
            "coordinate": lambda: mesh.coordinate[0],  # type: ignore[index]
            "get_coordinate": lambda: mesh.get_coordinate()[0],  # type: ignore[index]
            "get_local_rank": mesh.get_local_rank,
            "environment": lambda: int(os.environ.get("LOCAL_RANK", "0")),
        }
        rows = 512 if ways[read]() == 1 else 1
        return lambda: torch.ones(rows, 64) @ torch.ones(64, 64)

    assert [k.ranks for k in simulate(build, 3).kinds] == [(0, 2), (1,)]


def test_a_program_that_does_not_read_its_rank_runs_on_few() -> None:
    def build() -> Callable[[], Any]:
        mesh = dt.init_mesh((64,), ("dp",))
        model = dt.shard_module(nn.Linear(8, 8), mesh)
        assert os_environ_of_rank() in ("0", "63")
        return lambda: model(dt.ones(64, 8, mesh=mesh, placements=[dt.Shard(0)])).sum().backward()

    assert simulate(build, 64).warnings == []


def os_environ_of_rank() -> str:
    """The rank, not by Python's environment."""
    with open("/proc/self/environ"):
        pass
    import ctypes

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    return libc.getenv(b"RANK").decode()


def test_ranks_that_exchange_sizes_of_their_own_are_refused() -> None:
    def build() -> Callable[[], Any]:
        mesh = dt.init_mesh((4,), ("dp",))
        model = dt.shard_module(nn.Linear(64, 64), mesh)

        def step() -> None:
            rows = [4, 80, 80, 4][dist.get_rank()]
            model(dt.from_local(torch.ones(rows, 64), mesh, [dt.Shard(0)])).sum().backward()

        return step

    with pytest.raises(SimulationError, match=r"give shape= to from_local"):
        simulate(build, 4)


def test_an_uneven_sequence_makes_two_kinds_of_ranks() -> None:
    """Seven ranks have two of 15 positions, and the last has one."""

    def build() -> Callable[[], Any]:
        strategy = dt.Strategy(cp=8)
        mesh = strategy.stages()[0]
        model = nn.MultiheadAttention(32, 8, batch_first=True)
        strategy.apply(model)

        def step() -> None:
            x = dt.shard_tensor(torch.ones(2, 15, 32), mesh, strategy.batch())
            q = x.view(2, 15, 8, 4).transpose(1, 2)
            nn.functional.scaled_dot_product_attention(q, q, q).sum().item()

        return step

    report = simulate(build, 8)
    assert [k.ranks for k in report.kinds] == [tuple(range(7)), (7,)]


# Figures ------------------------------------------------------------------------------------------


def frozen(case: str) -> Callable[[], Any]:
    def build() -> Callable[[], Any]:
        strategy = dt.Strategy(dp=2)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 16))
        strategy.apply(model)
        if case != "all":
            model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])

        def step() -> None:
            x = dt.shard_tensor(torch.ones(4, 1024), strategy.stages()[0], strategy.batch(None))
            if case == "no grad":
                with torch.no_grad():
                    model(x)
                return
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@pytest.mark.parametrize("case", ["all", "frozen", "no grad"])
def test_frozen_weights_are_parameters(case: str) -> None:
    report = simulate(frozen(case), 2)
    weights = 4 * (1024 * 1025 + 1025 * 16)
    assert report.kinds[0].memory.at_peak["parameters"] == weights
    small = dataclasses.replace(devices.H100, memory=weights / 2)
    assert not any("recompute" in w for w in report.on(device=small).warnings)


def test_an_evaluation_and_a_recomputation_do_not_add_to_the_work_of_a_model() -> None:
    def build() -> Callable[[], Any]:
        strategy = dt.Strategy(dp=2, recompute=("0",))
        model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64))
        strategy.apply(model)

        def step() -> None:
            x = dt.shard_tensor(torch.ones(4, 64), strategy.stages()[0], strategy.batch(None))
            model(x).sum().backward()
            with torch.no_grad():
                model(x)

        return step

    kind = simulate(build, 2).kinds[0]
    product = 2 * 2 * 64 * 64
    assert kind.model_flops == 7 * product  # two forwards of two, three gradients
    assert kind.flops == 8 * product


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, KeyError])
def test_a_strategy_under_which_the_program_raises_loses(error: type[Exception]) -> None:
    def build_with(strategy: dt.Strategy) -> Callable[[], Any]:
        model = nn.Linear(64, 64)
        strategy.apply(model, plan={"weight": {"tp": dt.Shard(0)}})
        if strategy.tp == 2:
            raise error("shape '[3, -1]' is invalid")

        def step() -> None:
            mesh, places = strategy.stages()[0], strategy.batch(None)
            model(dt.shard_tensor(torch.ones(64, 64), mesh, places)).sum().backward()

        return step

    table = plan_strategy(build_with, 4, [dt.Strategy(dp=4), dt.Strategy(tp=2)])
    assert table.best.dp == 4 and error.__name__ in table.candidates[1].reason
