"""Programs of the fuzzer in which one rank alone also does what a person does there (it prints, it
reads, it registers hooks): the values, gradients and messages of the program without it.

    python -m tests.fuzz.fuzz_one_rank --seeds 0:500 --world 4
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import DistTensor
from disttensor.random import counter
from disttensor.runtime import current_runtime
from tests.fuzz import fuzz_programs
from tests.fuzz.command_line import each_seed, fuzz, report_of, tell
from tests.fuzz.fuzz_programs import simpler_cases
from tests.fuzz.fuzz_replay import described
from tests.fuzz.fuzz_world import Program, World, execute, steady
from tests.fuzz.fuzz_writer import make as make_program
from tests.fuzz.one_rank import ACTS, Scene, own_tensor
from tests.support import oracle, pool

SECONDS = 30.0  # in which the other ranks start the same collective
SHAPES = {2: [(2,)], 4: [(4,), (2, 2)]}  # of meshes


@dataclass
class Acting(World):
    """A world whose acts run if there is a ``scene``."""

    scene: Scene | None = None

    def act(self, name: str, x: Any) -> None:
        if self.scene is not None:
            self.scene.do(name, x)


@dataclass(frozen=True)
class Case:
    """A program with acts, the rank that does them, the shape of the mesh."""

    program: Program
    rank: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.program}\n# acts of rank {self.rank}, mesh {self.shape}"


def make(seed: int, world: int) -> Case:
    draw = random.Random(f"acts of {seed} in {world}")
    shape = draw.choice(SHAPES[world])
    return Case(with_acts(make_program(seed, len(shape)), draw), draw.randrange(world), shape)


def with_acts(program: Program, draw: random.Random, names: Sequence[str] = ()) -> Program:
    """Returns the program with lines ``act(name, tensor)`` among its own, and acts in its hooks."""
    names = names or [*ACTS]
    lines: list[str] = []
    known: list[str] = []
    for line in program.lines:
        while known and draw.random() < 0.6:
            lines.append(f"act({draw.choice(names)!r}, {draw.choice(known[-4:])})")
        inside = f"lambda g: act({draw.choice(names)!r}, g) or g * 2"
        lines.append(line.replace("lambda g: g * 2", inside))
        target = line.removeprefix("with torch.no_grad(): ").split(" = ")[0]
        known += [v for v in re.findall(r"v\d+", target) if v not in known]
    lines.insert(-1, f"act({draw.choice(names)!r}, {draw.choice(known)})")
    return replace(program, lines=(*lines, "act('grad', loss)"))


def trained(program: Program, world: Acting) -> dict[str, Any]:
    """Returns all that is compared of the program, and of two steps of an optimizer after it."""
    values, grads = execute(program, world)
    found = {k: copied(x) for k, x in {**values, **grads}.items()}
    leaves = [x for x in world.leaves.values() if isinstance(x, DistTensor)]
    for number in range(2 if leaves else 0):
        for x in leaves:
            world.act(("grad kept", "grad")[number], x)
        torch.optim.SGD(leaves, 0.1).step()
        for x in leaves:
            world.act(("data", "print")[number], x)
        sum((x * x).sum() for x in leaves).backward()
    return found | {f"leaf {i} at the end": copied(x.detach()) for i, x in enumerate(leaves)}


def copied(x: Any) -> Any:
    """Returns a description of x that later steps do not change."""
    if isinstance(x, DistTensor):
        found = described(x)
        return found if isinstance(found, str) else (found[0], found[1].clone(), *found[2:])
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def differing(case: Case) -> list[str]:
    """Returns the differences between the program with the acts and without; collective."""
    mesh = fuzz_programs.mesh_for(case.shape)
    own = own_tensor(dist.get_rank(), dist.get_world_size())
    answers: list[dict[str, Any]] = []
    for acts in (False, True):
        scene = Scene(own) if acts and dist.get_rank() == case.rank else None
        answers.append(answer(case.program, Acting(mesh, scene=scene)))
    without, with_it = answers
    at = with_it.pop("at", ""), without.pop("at", "")
    found = [
        f"{k}: {with_it.get(k)}{at[0]}, without the acts {without.get(k)}{at[1]}"
        for k in (["error"] if "error" in with_it else {**without, **with_it})
        if not same(with_it.get(k), without.get(k))
    ]
    return fuzz_programs.everyone(found)


def same(a: Any, b: Any) -> bool:
    """Returns True if both are equal. Modes make torch round some gradients in another way."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, 1e-9, 1e-9, equal_nan=True)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def answer(program: Program, world: Acting) -> dict[str, Any]:
    """Returns the values, gradients and messages of a program, or its error."""
    steps: Any = current_runtime().steps
    if steps is not None:
        steps.error = ""  # of an earlier program
    dt.manual_seed(1)
    lasting = world.scene.lasting if world.scene is not None else Scene(None).lasting
    try:
        with (
            oracle.fallbacks(), lasting, dt.debugging.compare_ranks(SECONDS),
            dt.debugging.record_comms() as log,
        ):  # fmt: skip
            values = trained(program, world)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "at": fuzz_programs.where(error)}
    sent = tuple((r.kind, r.axis, r.bytes, r.phase) for r in log)
    return values | {"sent": sent, "random": counter.get_state()}


def run(cases: Sequence[Case], progress: str = "") -> list[str]:
    """Returns a report of the first case that fails, after which ranks may be out of step; runs on
    every rank. ``progress``: see ``tell``."""
    for i, case in enumerate(cases):
        tell(progress, i)
        found = differing(case)
        if found:
            return ["\n".join([str(case), *(text[:1500] for text in found), ""])]
    return []


def failure(case: Case) -> str:
    """Returns the report of a case in new processes, or "" if it is right."""
    world = math.prod(case.shape)
    report = report_of(world, run, case)
    if report:
        pool.stop(world)
    return report


def main(first: int, last: int, world: int) -> int:
    return each_seed(range(first, last), world, make, failure, simpler_cases(steady))


if __name__ == "__main__":
    from tests.fuzz import fuzz_one_rank  # not __main__: the ranks find its functions by name

    fuzz(__doc__, "programs", fuzz_one_rank.main)
