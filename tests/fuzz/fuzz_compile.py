"""Programs of the fuzzer under ``dt.compile``, with a backend that keeps numbers: the bits of the
calls one by one.

More seeds than the tests run, on 4 ranks as 2 x 2::

    python -c "from tests.fuzz.fuzz_compile import main; main('aot_eager', 9, 0, 100, 2, 2)"
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

import disttensor as dt
from disttensor import DistTensor, ProcessMesh
from tests.fuzz import fuzz_programs, fuzz_replay
from tests.fuzz.fuzz_world import Program
from tests.support import pool

STARTS = re.compile(r"v\d+ = (leaf|data|plain)\(.*")
INSIDE = re.compile(r"(const|index)\((\d+), \([^)]*\)[^)]*\)")
OUTSIDE = ("leaf(", "data(", "plain(", "index(", "const(", "newleaf(", "hook(", "keep(")
ROUNDING = 1e-12


def starts_first(program: Program) -> Program:
    """The program with the lines that make its starting tensors in front of all others, without
    pending sums among them, which no program reads from outside."""
    starts: dict[str, None] = {}
    others = []

    def start(found: re.Match[str]) -> str:
        name = f"v{found[2]}00000"
        starts[f"{name} = {found[0]}"] = None
        return name

    for line in program.lines:
        if STARTS.fullmatch(line):
            starts[re.sub(r"\bP(avg|max)?\b(?=[^(]*$)", "R", line)] = None
        else:
            others.append(INSIDE.sub(start, line))
    end = "backward" if program.end == "double" else program.end  # torch raises an error
    return Program((*starts, *others), end, program.name)


def differing(program: Program, mesh: ProcessMesh, backend: str, most: int) -> list[str]:
    """What differs if ``backend`` runs functions of ``most`` lines; collective.

    AOTAutograd adds up the gradients of a function first, then those of other calls: if there are
    other calls, sums differ by rounding. It gives zeros in place of no gradient and sends them, and
    a gradient with such zeros in it may be a pending sum.
    """
    program = starts_first(program)
    through = partial(dt.compile, backend=backend)
    other, functions = fuzz_replay.in_functions(program, mesh, through, most, OUTSIDE)
    is_eager = backend == "eager"

    def same(name: str, a: Any, b: Any) -> bool:
        if name == "sent" and not is_eager:
            a, b = ({k: n for k, n in x.items() if k[-1] == "forward"} for x in (a, b))
            return Counter(a) <= Counter(b)
        if is_eager or not name.startswith(("leaf", "kept")):
            return fuzz_programs.same_bits(a, b)
        if a is None or b is None:
            return not _values(a).any() and not _values(b).any()
        if isinstance(a, tuple) and isinstance(b, tuple) and "P(" in a[0] != b[0]:
            return _close(a[-1], b[-1])
        if len(functions) == 1 and "loss" in other.lines[-1]:
            return fuzz_programs.same_bits(a, b)
        return _close(_values(a), _values(b))

    return fuzz_replay.beside_the_calls(program, other, functions, mesh, same, _described)


def _described(x: DistTensor) -> Any:
    """As ``fuzz_replay.described``, and the whole tensor; collective."""
    found = fuzz_replay.described(x)
    return found if isinstance(found, str) else (*found, fuzz_programs.whole(x))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, ROUNDING, ROUNDING)


def _values(x: Any) -> Tensor:
    """The numbers of a gradient as ``fuzz_replay.described`` gives it."""
    if isinstance(x, tuple):
        x = x[1]
    return x.detach() if isinstance(x, Tensor) else torch.zeros(0)


def main(backend: str, most: int, first: int, last: int, *shape: int) -> None:
    pool.warning_filters[:] = ["ignore"]  # those of Dynamo
    problems = partial(differing, backend=backend, most=most)
    fuzz_replay.main(first, last, *shape, problems=problems)
