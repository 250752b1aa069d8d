"""What belongs to a world ends with it: nothing of earlier rounds is alive, and nothing grows."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
import ops
from disttensor import cache, run, runtime
from disttensor.autograd import grad_types
from disttensor.comm import p2p
from disttensor.dispatch import dispatch
from disttensor.dispatch.call_plan import CallPlan
from disttensor.graphs import traced_comm
from tests.support import forked
from tests.support.pool import fake_world
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[1]


def use(mesh: dt.ProcessMesh) -> list[Any]:
    """A bit of everything that is remembered; what must not outlive the world of ``mesh``."""
    first, last = mesh.dim_names[0], mesh.dim_names[-1]
    rows = [dt.Shard(0) if name == first else dt.Replicate() for name in mesh.dim_names]
    columns = [dt.Shard(1) if name == last else dt.Replicate() for name in mesh.dim_names]
    x = dt.ones(8, 4, mesh=mesh, placements=rows, requires_grad=True)
    y = dt.reshard(x, mesh, columns).relu() @ dt.randn(4, 4, mesh=mesh)
    y.mean().backward()
    layer = dt.shard_module(nn.Linear(4, 4), mesh, {})
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(x.detach()).sum().backward()
    optimizer.step()
    dt.local_map(torch.sin, out_placements=rows, out_shapes=(8, 4))(x.detach())
    corner = dt.ProcessMesh([0], ("one",))
    dt.reshard(x.detach(), corner)
    p2p.next_tag()
    plan = next(plan for plan in dispatch.PLANS.values() if isinstance(plan, CallPlan))
    return [mesh, x.spec, y.spec, corner, plan, mesh.group((0,)), runtime.current_runtime()]


@pytest.mark.parametrize("world", [1, 4])
def test_nothing_of_earlier_worlds_is_alive(world: int) -> None:
    before: list[weakref.ref[Any]] = []
    for _ in range(3):
        with fake_world(world):
            mesh = dt.init_mesh((world, 1), ("dp", "tp"))
            assert runtime.current_runtime().tags == {}
            gc.collect()
            alive = [value for value in (ref() for ref in before) if value is not None]
            assert not alive, alive
            before = [weakref.ref(value) for value in use(mesh)]
            del mesh
    p2p.next_tag()  # without a process group there is a world, too
    gc.collect()
    assert [ref() for ref in before if ref() is not None] == []


def test_a_mesh_goes_when_nobody_has_it() -> None:
    """Plans in caches, which are bounded, hold it for a while."""
    with fake_world(4):
        held = []
        for i in range(3):
            held += map(weakref.ref, use(dt.init_mesh((4, 1), (f"dp{i}", "tp")))[:5])
        again = held[0]()
        assert again is None or again is dt.init_mesh((4, 1), ("dp0", "tp"))
        del again
        cache.clear_caches()
        gc.collect()
        assert [ref() for ref in held if ref() is not None] == []


def test_without_a_process_group_meshes_stay() -> None:
    mesh = dt.ProcessMesh([0], ("dp",))
    x = dt.ones(3, mesh=mesh)
    with fake_world(2):
        assert dt.ProcessMesh([0], ("dp",)) is not mesh
    assert dt.ProcessMesh([0], ("dp",)) is mesh and (x + dt.ones(3, mesh=mesh)).shape == (3,)


def rounds() -> None:
    """200 worlds of one, in a process of their own: what grows between the 50th and the last?"""
    import resource
    import threading

    from disttensor import cache

    def state() -> dict[str, int]:
        gc.collect()
        return {
            "threads": threading.active_count(),
            "system threads": len(list(Path("/proc/self/task").iterdir())),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "caches": len(cache._dicts) + len(cache._functions),
            "entries": sum(map(len, cache._dicts.values())),
            "meshes": sum(type(o) is dt.ProcessMesh for o in gc.get_objects()),
            "specs": sum(type(o) is ops.DistSpec for o in gc.get_objects()),
        }

    for number in range(200):
        use(dt.init_mesh((1, 1), ("dp", "tp")))
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__  # torch adds to it in each round
        if number == 49:
            early, size = state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    late, grown = state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size
    assert late == early, (early, late)
    assert grown < 8 << 10, f"{grown} KiB"


def test_two_hundred_worlds_leave_nothing_behind() -> None:
    code = "from tests.test_runtime import rounds; rounds()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]


WORLDS = """
import sys
import torch
import torch.distributed as dist
import disttensor as dt
from disttensor.comm import failure_watch, rendezvous
from disttensor.comm.reports import Topic
from disttensor.runtime import current_runtime
from tests.support import forked
from tests.support.pool import fake_world

for number in range(6):
    mesh = dt.init_mesh((2,), ("dp",))
    rank = dist.get_rank()
    rendezvous.create_groups([(range(2), ("dp",), "another")], timeout=20)
    x = dt.shard_tensor(torch.arange(8.0) + number, mesh, [dt.Shard(0)])
    with dt.debugging.compare_ranks(seconds=20):
        assert x.sum().item() == 28 + 8 * number
    y = dt.reshard(x, dt.ProcessMesh([1], ("last",)), [dt.Replicate()])
    assert not y.is_initialized or y.sum().item() == 28 + 8 * number
    watcher = failure_watch.watcher_of(current_runtime())
    assert watcher.failed_rank() is None
    Topic("met").post(watcher, "")
    assert len(Topic("met").gather(watcher, range(2), 10)) == 2
    dist.destroy_process_group()
    if rank == 0 and number == 2:  # one rank alone counts no world of the others
        with fake_world(4):
            dt.ones(4, mesh=dt.init_mesh((4,), ("dp",))).sum()
print("all worlds")
"""


@pytest.mark.parametrize("agent", [True, False])
def test_worlds_of_one_program_follow_each_other(agent: bool, tmp_path: Path) -> None:
    """The store is the same in all of them, kept by the launcher or by rank 0."""
    script = tmp_path / "worlds.py"
    script.write_text(WORLDS)

    def program() -> int:
        if not agent:
            port = free_port()
            change = "import os; os.environ.update(TORCHELASTIC_USE_AGENT_STORE='False', "
            script.write_text(f"{change}MASTER_PORT='{port}')\n{WORLDS}")
        return run.main(["--nproc", "2", str(script)])

    code, out = forked.run(program)
    assert code == 0 and out.count("all worlds") == 2, out


OWN_WORLDS = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import disttensor as dt

rank, port = map(int, sys.argv[1:])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
sizes, slow = (3, 3, 2, 3), (0, 2, 1)
for number, size in enumerate(sizes):
    if rank < size:
        os.environ["WORLD_SIZE"] = str(size)
        limit = timedelta(seconds=30)
        if number % 2:
            dist.init_process_group("gloo", timeout=limit)
        else:
            place = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", place, limit, world_size=size, rank=rank)
        mesh = dt.init_mesh((size,))
        torch.manual_seed(0)
        net = dt.shard_module(torch.nn.Linear(4, 4), mesh)
        adam = torch.optim.Adam(net.parameters())
        for step in range(2):
            x = dt.shard_tensor(torch.ones(5, 4), mesh, [dt.Shard(0)])
            net(x).sum().backward()
            adam.step()
        dist.destroy_process_group()
        try:
            x.sum().item()
        except dt.errors.CommError as error:
            assert "a world that has ended" in str(error), error
        else:
            raise AssertionError("a mesh of the last world is used")
    if rank == slow[number % 3]:
        time.sleep(1.5)
print("all worlds")
"""


@pytest.mark.limit(120)
def test_a_program_starts_its_own_worlds_on_one_port(tmp_path: Path) -> None:
    """With ``init_process_group`` of its own, ranks that come late, and another number of ranks.
    The user's tensors of the last world still exist."""
    script = tmp_path / "worlds.py"
    script.write_text(OWN_WORLDS)
    port = free_port()
    command = [sys.executable, str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port)], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all("all worlds" in text for text in texts), "\n".join(texts)


def compiled_rounds() -> None:
    """Worlds of one, each with a compiled program: none outlives its world."""
    import warnings

    from disttensor.comm.groups import Group

    warnings.simplefilter("ignore")
    alive = []
    for _ in range(3):
        mesh = dt.init_mesh((1, 1), ("dp", "tp"))
        net = dt.shard_module(nn.Linear(4, 4), mesh, {"weight": [dt.Replicate(), dt.Shard(0)]})
        fast = dt.compile(net, backend="aot_eager")
        x = dt.ones(4, 4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
        fast(x).sum().backward()
        transition = grad_types.transition_between(x.spec, (), x.spec.replicated(), ())
        first = traced_comm.number_of(transition, object())
        traced_comm.numbered(first)
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__
        try:
            traced_comm.numbered(first)
        except RuntimeError as error:
            assert "a world that has ended" in str(error)
        else:
            raise AssertionError("an object of the last world has its number")
        del mesh, net, fast, x, transition
        gc.collect()
        kinds = (dt.ProcessMesh, ops.DistSpec, Group, grad_types.GradTransition)
        alive.append([sum(type(o) is kind for o in gc.get_objects()) for kind in kinds])
    assert alive[1] == alive[2], alive


def test_compiled_programs_end_with_their_world() -> None:
    code = "from tests.test_runtime import compiled_rounds; compiled_rounds()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
