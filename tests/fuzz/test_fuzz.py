"""Programs of fixed seeds on real ranks. ``tests.fuzz.fuzz_programs.main`` runs others, and makes
failures small."""

from __future__ import annotations

import ast
import math
from functools import partial

import pytest

from disttensor.dispatch import native
from tests.fuzz import fuzz_compile, fuzz_programs, fuzz_replay
from tests.support import pool

PART = 50  # programs in one test


SHAPES = {(2, 2): 100, (2,): 50}  # programs on meshes of these shapes


@pytest.mark.parametrize(
    ("shape", "first"), [(s, first) for s, n in SHAPES.items() for first in range(0, n, PART)]
)
def test_programs_match_plain_torch(shape, first):
    programs = [fuzz_programs.make(seed, len(shape)) for seed in range(first, first + PART)]
    reports = pool.run_on_ranks(math.prod(shape), fuzz_programs.run, programs, shape)[0]
    assert not reports, "\n" + "\n".join(reports)


@pytest.mark.skipif(native.module is None, reason=f"no C code: {native.why}")
@pytest.mark.parametrize("shape", [(2, 2), (2,), (1,)])
def test_c_and_python_give_the_same_bits(shape):
    programs = [fuzz_programs.make(seed, len(shape)) for seed in range(500, 500 + PART // 2)]
    reports = pool.run_on_ranks(
        math.prod(shape), fuzz_programs.run, programs, shape, 1000, False,
        fuzz_programs.differing_codes, timeout=110.0,
    )[0]  # fmt: skip
    assert not reports, "\n" + "\n".join(reports)


def test_a_wrong_number_is_found():
    program = fuzz_programs.make(0, 1)
    reports = pool.run_on_ranks(2, broken, program)
    assert all("off by" in text for text in reports), reports


def broken(program):
    """The report of a program in a world whose leaves are not those of the plain run."""
    place = fuzz_programs.oracle.place
    fuzz_programs.oracle.place = lambda full, mesh, where: place(full + 0.1, mesh, where)
    try:
        return "\n".join(fuzz_programs.run([program], (2,)))
    finally:
        fuzz_programs.oracle.place = place


@pytest.mark.parametrize(("shape", "first"), [((2, 2), 700), ((2,), 800)])
def test_replay_gives_the_bits_of_the_calls(shape, first):
    programs = [fuzz_programs.make(seed, len(shape)) for seed in range(first, first + PART // 2)]
    reports, count = pool.run_on_ranks(
        math.prod(shape), fuzz_replay.run, programs, shape, timeout=110.0
    )[0]
    assert not reports, "\n" + "\n".join(reports)
    assert count[0] > len(programs), count


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.limit(200)
@pytest.mark.parametrize(
    ("shape", "backend", "most", "first"),
    [((2,), "aot_eager", 100, 0), ((2,), "eager", 4, 10), ((2, 2), "aot_eager", 4, 100)],
)
def test_compiled_programs_give_the_bits_of_the_calls(shape, backend, most, first):
    programs = [fuzz_programs.make(seed, len(shape)) for seed in range(first, first + 6)]
    problems = partial(fuzz_compile.differing, backend=backend, most=most)
    world = math.prod(shape)
    run = fuzz_replay.run
    reports, count = pool.run_on_ranks(world, run, programs, shape, problems, timeout=180.0)[0]
    assert not reports, "\n" + "\n".join(reports)
    assert count[0] >= 4, count


def test_a_variable_that_lines_write_to_is_given_to_their_function():
    tree = ast.parse("v7[0] *= 2.0\nv4 *= 0.5\nv5 = v7")
    assert [fuzz_replay._read_first(tree, f"v{i}") for i in (4, 5, 7)] == [True, False, True]
