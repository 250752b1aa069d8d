"""Programs of fixed seeds on real ranks. ``tests.fuzz.main`` runs others, and makes failures small."""

from __future__ import annotations

import math

import pytest

from tests import fuzz, pool

PART = 50  # programs in one test


SHAPES = {(2, 2): 150, (2,): 100}  # programs on meshes of these shapes


@pytest.mark.parametrize(
    ("shape", "first"), [(s, first) for s, n in SHAPES.items() for first in range(0, n, PART)]
)
def test_programs_match_plain_torch(shape, first):
    programs = [fuzz.make(seed, len(shape)) for seed in range(first, first + PART)]
    reports = pool.run_on_ranks(math.prod(shape), fuzz.run, programs, shape)[0]
    assert not reports, "\n" + "\n".join(reports)


def test_a_wrong_number_is_found():
    program = fuzz.make(0, 1)
    reports = pool.run_on_ranks(2, broken, program)
    assert all("off by" in text for text in reports), reports


def broken(program):
    """The report of a program in a world whose leaves are not those of the plain run."""
    place = fuzz.oracle.place
    fuzz.oracle.place = lambda full, mesh, where: place(full + 0.1, mesh, where)
    try:
        return "\n".join(fuzz.run([program], (2,)))
    finally:
        fuzz.oracle.place = place
