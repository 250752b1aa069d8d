"""Programs of the fuzzer, whose lines are put into functions under ``dt.replay``: the bits of the
calls one by one.

More seeds than the tests run, on 4 ranks as 2 x 2::

    python -c "from tests.fuzz.fuzz_replay import main; main(0, 300, 2, 2)"
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import disttensor as dt
from disttensor import DistTensor, ProcessMesh
from disttensor.tensor import views
from tests.fuzz import fuzz_programs
from tests.fuzz.fuzz_world import Program, World, execute
from tests.support import oracle, pool

MOST = 4  # lines in one function
MADE = ("leaf(", "data(", "index(", "plain(", "newleaf(", "hook(", "keep(", "loss")
COUNT = [0, 0]  # replays, functions that were never replayed


@dataclass
class Replayed(World):
    """A world with functions of its own."""

    functions: dict[str, Any] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        return super().names() | self.functions


def in_functions(
    program: Program, mesh: ProcessMesh, through: Callable[[Any], Any] = dt.replay,
    most: int = MOST, made: Sequence[str] = MADE,
) -> tuple[Program, dict[str, Any]]:  # fmt: skip
    """The program with runs of at most ``most`` lines as calls of functions, each as ``through``
    gives it, and these functions. Lines with a word of ``made`` stay outside."""
    lines: list[str] = []
    functions: dict[str, Any] = {}
    for run in _runs(program.lines, most, made):
        if any(word in run[0] for word in made):
            lines += run
            continue
        tree = ast.parse("\n".join(run))
        assigned = list(dict.fromkeys(n.id for n in _names(tree) if isinstance(n.ctx, ast.Store)))
        read = list(
            dict.fromkeys(n.id for n in _names(tree) if n.id[0] == "v" and n.id[1:].isdigit())
        )
        given = [n for n in read if n not in assigned or _read_first(tree, n)]
        name = f"replay{len(functions)}"
        body = "\n".join(f"    {line}" for line in run)
        back = "".join(f"{m}, " for m in assigned)
        text = f"def {name}({', '.join(given)}):\n{body}\n    return ({back})\n"
        scope = World(mesh).names()
        exec(text, scope)
        functions[name] = through(scope[name])
        call = f"{name}({', '.join(given)})"
        lines.append(f"({back}) = {call}" if assigned else call)
    return Program(tuple(lines), program.end, program.name), functions


def _runs(lines: tuple[str, ...], most: int, made: Sequence[str]) -> Iterator[list[str]]:
    run: list[str] = []
    for line in lines:
        alone = any(word in line for word in made)
        if run and (alone or len(run) == most):
            yield run
            run = []
        if alone:
            yield [line]
        else:
            run.append(line)
    if run:
        yield run


def _names(tree: ast.AST) -> list[ast.Name]:
    inner = {a.arg for n in ast.walk(tree) if isinstance(n, ast.Lambda) for a in n.args.args}
    return [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id not in inner]


def _read_first(tree: ast.Module, name: str) -> bool:
    """Is the name read before the lines assign to it?"""
    for line in tree.body:
        uses = [n for n in _names(line) if n.id == name]
        if uses:
            return isinstance(line, ast.AugAssign) or any(isinstance(n.ctx, ast.Load) for n in uses)
    return False


def described(x: DistTensor) -> Any:
    """All that is compared of a tensor; of a copy whose source was written to, that it is one."""
    if isinstance(x.local, views.StaleView):
        return "stale"
    return repr(x.spec), x.local.detach(), x.requires_grad, x.is_leaf


def same_bits(name: str, a: Any, b: Any) -> bool:
    return fuzz_programs.same_bits(a, b)


def differing(program: Program, mesh: ProcessMesh) -> list[str]:
    """What differs in any bit from the calls one by one, when recorded and when replayed;
    collective."""
    other, functions = in_functions(program, mesh)
    return beside_the_calls(program, other, functions, mesh, same_bits)


def beside_the_calls(
    program: Program, other: Program, functions: dict[str, Any], mesh: ProcessMesh,
    same: Callable[[str, Any, Any], bool], describe: Callable[[DistTensor], Any] = described,
) -> list[str]:  # fmt: skip
    """What differs between a program and three runs of ``other``, which calls the functions, by
    ``same(name, value, value call by call)`` of values as ``describe`` gives them; collective."""
    runs: list[tuple[Program, Callable[[], World]]] = [(program, lambda: World(mesh))]
    runs += [(other, lambda: Replayed(mesh, functions=functions))] * 3
    answers: list[Any] = []
    for text, world in runs:
        dt.manual_seed(1)
        with oracle.fallbacks(), dt.debugging.record_comms() as log:
            try:
                values, grads = execute(text, world())
            except Exception as error:
                answers.append({"error": f"{type(error).__name__}: {str(error)[:200]}"})
                continue
        answers.append({
            k: describe(v)
            if isinstance(v, DistTensor) else v
            for k, v in [*values.items(), *grads.items()]
        } | {"sent": Counter((r.kind, r.axis, r.bytes, r.phase) for r in log)})  # fmt: skip
    COUNT[0] += sum(f.replays for f in functions.values())
    COUNT[1] += sum(not f.replays for f in functions.values())
    eager, *others = answers
    found = [
        f"run {i}: {k}: {answer.get(k)}, call by call {eager.get(k)}"
        for i, answer in enumerate(others)
        for k in (["error"] if "error" in answer else {**eager, **answer})
        if not same(k, answer.get(k), eager.get(k))
    ]
    return fuzz_programs.everyone(found)


def run(
    programs: Any, shape: Any, problems: Callable[[Program, ProcessMesh], list[str]] = differing
) -> tuple[list[str], list[int]]:
    """Reports, and how many calls were replays and how many functions were not recorded; on every
    rank."""
    COUNT[:] = [0, 0]
    reports = fuzz_programs.run(programs, shape, problems=problems)
    return reports, list(COUNT)


def main(
    first: int, last: int, *shape: int,
    problems: Callable[[Program, ProcessMesh], list[str]] = differing,
) -> None:  # fmt: skip
    programs = [fuzz_programs.make(seed, len(shape)) for seed in range(first, last)]
    world = math.prod(shape)
    reports, count = pool.run_on_ranks(world, run, programs, shape, problems, timeout=3000.0)[0]
    print("\n".join(reports))
    print(f"{len(programs)} programs, {len(reports)} differ; {count[0]} replays, {count[1]} never")
