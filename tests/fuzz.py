"""Random small programs, run on plain tensors and on DistTensors: the same values, gradients and bits.

A program is text: a few lines of ordinary torch over starting tensors with random placements. ``make(seed, mesh_ndim)``
writes one; ``problems(program, mesh)`` runs it both ways on the ranks of the world and says what differs. More seeds
than the tests run, the failures made smaller::

    python -c "from tests.fuzz import main; main(4, 0, 1000)"     # world, first seed, end
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttensor import DistTensor, ProcessMesh
from tests import oracle, pool
from tests.fuzz_world import KINDS, TOLERANCE, Program, World, execute, steady
from tests.fuzz_writer import make


def problems(program: Program, mesh: ProcessMesh) -> list[str]:
    """What differs; collective, the same on every rank."""
    plain_values, plain_grads = execute(program, World())
    found: list[str] = []
    try:
        with oracle.fallbacks():
            values, grads = execute(program, World(mesh))
            full_values = {k: whole(v) for k, v in values.items()}
            full_grads = {k: whole(g) for k, g in grads.items()}
    except Exception as error:
        if not refused(error):
            found.append(f"{type(error).__name__}: {str(error)[:600]}{where(error)}")
        return everyone(found)
    for k, want in plain_values.items():
        v = values[k]
        spec = f" ({v._spec!r})" if isinstance(v, DistTensor) else ""
        if isinstance(v, DistTensor) and tuple(v.to_local().shape) != tuple(v._spec.local_shape):
            found.append(f"{k}{spec}: local has shape {list(v.to_local().shape)}")
        if v.requires_grad != want.requires_grad:
            found.append(f"{k}{spec}: requires_grad {v.requires_grad}, plain {want.requires_grad}")
        found += difference(f"{k}{spec}", full_values[k], want.detach())
    for k, g in plain_grads.items():
        mine = full_grads[k]
        spec = f" ({grads[k]._spec!r})" if isinstance(grads[k], DistTensor) else ""
        if g is None or mine is None:
            if (g is not None and bool(g.any())) or (mine is not None and bool(mine.any())):
                found.append(f"gradient of {k}{spec}: {mine}, plain {g}")
        else:
            found += difference(f"gradient of {k}{spec}", mine, g)
    try:
        oracle.compare_replicas([*values.values(), *(g for g in grads.values() if g is not None)])
    except oracle.Problem as problem:
        found.append(str(problem))
    return everyone(found)


def whole(x: Any) -> Any:
    if x is None:
        return None
    x = x.detach()
    return x.full_tensor() if isinstance(x, DistTensor) else x


def refused(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and (
        "writing to it would not reach" in str(error) or "has been written to since" in str(error)
    )


def where(error: BaseException) -> str:
    tb, out = error.__traceback__, []
    while tb is not None:
        code = tb.tb_frame.f_code
        out.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{tb.tb_lineno} {code.co_name}")
        tb = tb.tb_next
    return "\n    at " + " < ".join(reversed(out[-7:]))


def difference(what: str, got: Tensor, want: Tensor) -> list[str]:
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{what}: {got.dtype} {list(got.shape)}, plain {want.dtype} {list(want.shape)}"]
    if torch.allclose(got.double(), want.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return []
    gap = (got.double() - want.double()).abs()
    return [
        f"{what}: off by up to {float(gap.max()):.3g}\n   got   {flat(got)}\n   plain {flat(want)}"
    ]


def flat(x: Tensor) -> str:
    return (
        "["
        + " ".join(f"{v:.4g}" for v in x.double().reshape(-1)[:16].tolist())
        + (" ..]" if x.numel() > 16 else "]")
    )


def everyone(found: list[str]) -> list[str]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    out: dict[str, list[int]] = {}
    for rank, texts in enumerate(answers):
        for text in texts:
            out.setdefault(text, []).append(rank)
    return [f"ranks {r}: {t}" for t, r in out.items()]


def mesh_for(axes: int) -> ProcessMesh:
    return oracle.grid() if axes == 2 else oracle.line()


def run(
    programs: Sequence[Program], axes: int, most: int = 1000, shrink: bool = False
) -> list[str]:
    """Reports of the programs that fail; runs on every rank."""
    mesh = mesh_for(axes)
    reports: list[str] = []
    for program in programs:
        found = problems(program, mesh)
        if found:
            if shrink:
                program = shrunk(program, mesh)
                found = problems(program, mesh)
            reports.append("\n".join([str(program), *found, ""]))
            if shrink and dist.get_rank() == 0:
                print(reports[-1], flush=True)
            if len(reports) >= most:
                break
    return reports


def shrunk(program: Program, mesh: ProcessMesh) -> Program:
    """The same failure in fewer lines with simpler placements, as far as one change at a time goes."""

    def fails(candidate: Program) -> bool:
        if not steady(candidate):
            return False
        return bool(problems(candidate, mesh))

    progress = True
    while progress:
        progress = False
        for candidate in simpler(program):
            if fails(candidate):
                program, progress = candidate, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    lines = program.lines
    for i in reversed(range(len(lines) - 1)):
        yield replace(program, lines=lines[:i] + lines[i + 1 :])
    if program.end != "backward":
        yield replace(program, end="backward")
    terms = lines[-1].removeprefix("loss = ").split(" + ")
    if len(terms) > 1:
        for i in range(len(terms)):
            yield replace(
                program, lines=(*lines[:-1], "loss = " + " + ".join(terms[:i] + terms[i + 1 :]))
            )
    for i, line in enumerate(lines):
        parts = line.split("'")
        if len(parts) >= 3 and (
            "leaf(" in line or "data(" in line or " to(" in line or "index(" in line
        ):
            words = parts[-2].split()
            for j, word in enumerate(words):
                if word != "R" and set(words) <= set(KINDS):
                    new = "'".join(
                        [*parts[:-2], " ".join([*words[:j], "R", *words[j + 1 :]]), parts[-1]]
                    )
                    yield replace(program, lines=(*lines[:i], new, *lines[i + 1 :]))
        if "leaf(" in line and "newleaf" not in line:
            yield replace(
                program, lines=(*lines[:i], line.replace("leaf(", "data("), *lines[i + 1 :])
            )


def check(text: str, axes: int, end: str = "backward", mesh: ProcessMesh | None = None) -> None:
    """A program given as text must be right. Raises AssertionError. Runs on every rank."""
    lines = tuple(line.strip() for line in text.strip().splitlines() if line.strip())
    found = problems(Program(lines, end), mesh or mesh_for(axes))
    if found:
        raise AssertionError("\n".join([*lines, *found]))


def main(world: int, first: int, last: int) -> None:
    axes = 2 if world == 4 else 1
    programs = [make(seed, axes) for seed in range(first, last)]
    try:
        reports = pool.run_on_ranks(
            world, run, programs, axes, 12, True, timeout=40.0 + 0.2 * len(programs)
        )[0]
    finally:
        pool.stop()
    print(f"{last - first} programs, {len(reports)} fail")
