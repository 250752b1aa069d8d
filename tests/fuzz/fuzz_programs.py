"""Random small programs, run on plain tensors and on DistTensors: the same values, gradients and
bits.

A program is text: a few lines of ordinary torch over starting tensors with random placements.
``make(seed, mesh_ndim)`` writes one; ``problems(program, mesh)`` runs it both ways on the ranks of
the world and says what differs. More seeds than the tests run (from the first to before the last,
then the shape of the mesh), the failures made smaller::

    python -c "from tests.fuzz.fuzz_programs import main; main(0, 1000, 2, 2)"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import disttensor as dt
from disttensor import DistTensor, ProcessMesh
from disttensor.dispatch import native
from disttensor.random import counter
from tests.fuzz.command_line import shrunk
from tests.fuzz.fuzz_world import KINDS, TOLERANCE, Program, World, execute, steady
from tests.fuzz.fuzz_writer import make
from tests.support import oracle, pool

NAMES = ("a", "b", "c", "d")  # of mesh axes


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
        spec = f" ({v.spec!r})" if isinstance(v, DistTensor) else ""
        if isinstance(v, DistTensor) and tuple(v.to_local().shape) != tuple(v.spec.local_shape):
            found.append(f"{k}{spec}: local has shape {list(v.to_local().shape)}")
        if v.requires_grad != want.requires_grad:
            found.append(f"{k}{spec}: requires_grad {v.requires_grad}, plain {want.requires_grad}")
        found += difference(f"{k}{spec}", full_values[k], want.detach())
    for k, g in plain_grads.items():
        mine = full_grads[k]
        spec = f" ({grads[k].spec!r})" if isinstance(grads[k], DistTensor) else ""
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


def differing_codes(program: Program, mesh: ProcessMesh) -> list[str]:
    """What differs in any bit, in what is sent or in the random numbers drawn between the code in C
    and that in Python; collective. C runs it twice: the first call of a kind is Python's."""
    answers: list[Any] = []
    for in_c in (False, True, True):
        dt.manual_seed(1)
        with native.using(in_c), oracle.fallbacks(), dt.debugging.record_comms() as log:
            try:
                values, grads = execute(program, World(mesh))
            except Exception as error:
                answers.append({"error": f"{type(error).__name__}: {error}"})
                continue
        answers.append({
            k: (repr(v.spec), v.local.detach(), v.requires_grad, v.is_leaf)
            if isinstance(v, DistTensor) else v
            for k, v in [*values.items(), *grads.items()]
        } | {
            "sent": tuple((r.kind, r.axis, r.bytes, r.phase) for r in log),
            "random": counter.get_state(),
        })  # fmt: skip
    python, *others = answers
    found = [
        f"{k}: in C {other.get(k)}, in Python {python.get(k)}"
        for other in others
        for k in {**python, **other}
        if not same_bits(python.get(k), other.get(k))
    ]
    return everyone(found)


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype is b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and bits(a) == bits(b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(map(same_bits, a, b))
    return bool(a == b)


def bits(x: Tensor) -> bytes:
    return x.detach().contiguous().numpy(force=True).tobytes()


def whole(x: Any) -> Any:
    if x is None:
        return None
    x = x.detach()
    return x.full_tensor() if isinstance(x, DistTensor) else x


# Errors in place of wrong numbers, where a view of one process is a copy
REFUSALS = (
    "so a write would not reach",
    "has been written to since",
    "more than one element of the written-to tensor refers to a single memory location",
)


def refused(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in REFUSALS)


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


def mesh_for(shape: Sequence[int]) -> ProcessMesh:
    """All ranks of the world in this shape."""
    return ProcessMesh(torch.arange(dist.get_world_size()).reshape(*shape), NAMES[: len(shape)])


def run(
    programs: Sequence[Program], shape: Sequence[int], most: int = 1000, shrink: bool = False,
    problems: Callable[[Program, ProcessMesh], list[str]] = problems,
) -> list[str]:  # fmt: skip
    """Reports of the programs that fail; runs on every rank."""
    mesh = mesh_for(shape)
    reports: list[str] = []
    for program in programs:
        found = problems(program, mesh)
        if found:
            if shrink:
                program = shrunk(program, simpler, lambda p: steady(p) and bool(problems(p, mesh)))
                found = problems(program, mesh)
            reports.append("\n".join([str(program), *found, ""]))
            if shrink and dist.get_rank() == 0:
                print(reports[-1], flush=True)
            if len(reports) >= most:
                break
    return reports


def simpler_cases(is_legal: Callable[[Program], bool]) -> Callable[[Any], Iterator[Any]]:
    """Returns the function that yields a case, a dataclass, with each simpler program that is
    legal."""

    def cases(case: Any) -> Iterator[Any]:
        for program in filter(is_legal, simpler(case.program)):
            yield replace(case, program=program)

    return cases


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


def check(text: str, shape: Sequence[int], end: str = "backward") -> None:
    """A program given as text must be right on a mesh of this shape. Raises AssertionError. Runs on
    every rank."""
    lines = tuple(line.strip() for line in text.strip().splitlines() if line.strip())
    found = problems(Program(lines, end), mesh_for(shape))
    if found:
        raise AssertionError("\n".join([*lines, *found]))


def main(first: int, last: int, *shape: int) -> None:
    """Seeds from ``first`` to before ``last`` on a mesh of this shape."""
    failed = 0
    try:
        for at in range(first, last, 100):
            programs = [make(seed, len(shape)) for seed in range(at, min(at + 100, last))]
            world = math.prod(shape)
            failed += len(pool.run_on_ranks(world, run, programs, shape, 12, True, timeout=90.0)[0])
    finally:
        pool.stop()
    print(f"{last - first} programs on {shape}, {failed} fail")
