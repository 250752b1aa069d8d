"""A part of PyTorch's own samples, and what the measurement must find."""

from __future__ import annotations

import functools
import os
import time

import pytest

from tests.opinfo import opinfo, opinfo_check, opinfo_compile
from tests.support import pool
from tests.support.part import part

PARTS = 24  # a run takes one of 24 on two ranks, one of 48 on four
COMPILED = 5  # functions of a run under dt.compile
PIECES = 2  # tests that this part comes in, so that they run side by side
ROOT = pool.ROOT


@pytest.mark.limit(300)
@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("world", [2, 4])
def test_functions_of_this_commits_part_match_plain_torch(world, piece):
    jobs = sorted(opinfo.jobs_of(opinfo.OPS, ["float32"]))
    jobs = part(jobs, len(jobs) * 2 // (PARTS * world), salt=world)[piece::PIECES]
    results = opinfo.measure(jobs, most=3, world=world)
    failed = [r for r in results if r.failures and r.name not in opinfo.KNOWN]
    assert not failed, "\n" + opinfo.table(failed, verbose=False)


@pytest.mark.limit(300)
def test_functions_of_this_commits_part_have_the_same_bits_compiled(monkeypatch):
    monkeypatch.setattr(pool, "warning_filters", ["ignore"])  # those of Dynamo
    jobs = sorted(opinfo.jobs_of(opinfo.OPS, ["float32"]))
    names = [name for name, _ in part(jobs, COMPILED, salt="compiled")]
    for start in range(0, len(names), 20):
        run = functools.partial(opinfo_compile.on_rank, names[start : start + 20], "aot_eager", 1)
        for reports, _, cases in pool.run_on_ranks(2, run, timeout=250):
            assert cases and not reports, "\n" + "\n".join(reports)


def test_known_failures_are_failures():
    results = opinfo.measure(opinfo.jobs_of(opinfo.KNOWN, ["float32"]))
    assert [r.name for r in results if not r.failures] == []


@pytest.mark.parametrize("what", ["value", "gradient"])
def test_a_wrong_number_is_found(what):
    results = pool.run_on_ranks(2, broken, what)[0]
    problems = [text for _, text in results.failures]
    assert problems
    assert all(text.startswith(what) for text in problems), problems


def broken(what):
    """The result of torch.mul where full values, or gradients, of DistTensors are off by a
    thousandth."""
    real = opinfo_check.Call.run

    def run(self, leaves, targets):
        got = real(self, leaves, targets)
        if any(type(x) is opinfo_check.DistTensor for x in leaves):
            if what == "value":
                got.fulls = [f * 1.001 for f in got.fulls]
            got.grads = [g if g is None or what == "value" else g * 1.001 for g in got.grads]
        return got

    opinfo_check.Call.run = run
    try:
        return opinfo_check.check("mul", "float32", 2, "broken " + what)
    finally:
        opinfo_check.Call.run = real


@pytest.mark.parametrize(
    ("how", "says"), [("raises", "out of step"), ("hangs", "Timeout"), ("dies", "exit code 7")]
)
def test_what_fails_on_a_rank_is_named_and_the_others_go_on(monkeypatch, how, says):
    monkeypatch.setattr(
        opinfo, "on_rank", {"raises": raising, "hangs": hanging, "dies": dying}[how]
    )
    results = opinfo.measure([(name, "float32") for name in ("add", "mul", "sub")], most=1)
    assert [bool(r.failures) for r in results] == [False, True, False]
    assert says in results[1].failures[0][1]


def raising(jobs, *rest):
    failing(jobs, rest, lambda: 1 / 0)


def hanging(jobs, *rest):
    failing(jobs, rest, lambda: time.sleep(60))


def dying(jobs, *rest):
    failing(jobs, rest, lambda: os._exit(7))


def failing(jobs, rest, what):
    """As opinfo_check.on_rank, but rank 1 does ``what`` in the first case of mul."""
    real = opinfo_check.agree

    def agree(key, problem, digests):
        if "/mul/" in key and opinfo_check.dist.get_rank() == 1:
            what()
        return real(key, problem, digests)

    opinfo_check.agree = agree
    for job in jobs:  # short limits only where they are to be reached
        limits = (4.0, 1.0) if job[0] == "mul" else (120.0, 60.0)
        opinfo_check.LIMIT, opinfo_check.PATIENCE = limits
        opinfo_check.on_rank([job], *rest)
