"""Programs of fixed seeds over several meshes, on real ranks. ``python -m tests.fuzz.fuzz_stages``
runs others."""

from __future__ import annotations

import pytest

from tests.fuzz import fuzz_pipeline, fuzz_stages
from tests.fuzz.fuzz_stages import StageProgram
from tests.support import pool
from tests.support.pool import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")

SEEDS = {2: 36, 4: 12}  # programs in a world of this size
PART = 12  # programs in one test


@pytest.mark.parametrize(
    ("world", "first"), [(w, first) for w, n in SEEDS.items() for first in range(0, n, PART)]
)
def test_programs_match_one_process(world, first):
    programs = [fuzz_stages.make(seed, world) for seed in range(first, first + PART)]
    reports = pool.run_on_ranks(world, fuzz_stages.run, programs)[0]
    assert not reports, "\n" + "\n".join(reports)


@pytest.mark.parametrize("seed", [2, 7, 11, 19])  # 2: a value skips a visit of its own mesh
@on_ranks(2)
def test_chains_under_schedules(seed):
    fuzz_pipeline.check(fuzz_pipeline.make(seed, 2))


@pytest.mark.parametrize("seed", [0, 1, 2])
@on_ranks(4)
def test_chains_of_more_stages(seed):
    fuzz_pipeline.check(fuzz_pipeline.make(seed, 4))


def program(meshes, *lines, end="backward"):
    return pytest.param(StageProgram(lines, end, "was wrong once", meshes), id=lines[-2][:40])


APART, OVER = ((0,), (1,)), ((0, 1), (1,))
REGION = "v2 = ckpt(lambda a: move((a * a.sum()).tanh(), '1: R').sin() * 2, v1)"

# Each was wrong once, or hung
WRONG_ONCE = [
    # one element of a stride other than 1 could not be sent
    program(APART, "v1 = leaf(1, (1,), '0: R')", "v2 = v1.expand(3)[::3]", "losses = [v2.sum()]"),
    # a rank in both meshes computed the region again before the others did
    program(OVER, "v1 = leaf(1, (4,), '0: S0')", REGION, "losses = [v2.sum()]"),
    # what is computed on running statistics had no gradient outside
    program(
        APART, "v1 = leaf(1, (5, 3), '0: R')",
        "m, s = data(2, (3,), '0: R'), data(3, (3,), '0: R') ** 2",
        "v2 = move(F.batch_norm(move(v1, '1: R'), move(m, '1: R'), move(s, '1: R'), "
        "training=True), '0: R')", "losses = [v2.sum()]",
    ),
    # the number in a 0-d index was asked for where it is not
    program(APART, "v1 = leaf(1, (5, 3), '0: R')", "v2 = v1[:, index(2, (), 3, '0: R')]",
        "losses = [v2.sum()]"),
    # a mask without dims was asked for its number where it is not
    program(APART, "v1 = leaf(1, (), '0: R')", "v2 = move(v1, '1: R')", "v3 = v2[v2 < 9].exp()",
        "v4 = move(v3, '0: R')", "losses = [v4.sum()]"),
    # a function that gives its argument back, but reduces it first
    program(APART, "v1 = leaf(1, (4,), '0: P')",
        "v2 = move(F.alpha_dropout(v1, 0.0, True), '1: R')", "losses = [v2.sum()]"),
    program(((0, 1), (1,)), "v1 = leaf(1, (4,), '1: P')",
        "v2 = move(F.alpha_dropout(v1, 0.0, True), '0: S0')", "losses = [v2.sum()]"),
    # no input of the backward on one rank
    program(APART, "v1 = leaf(1, (5, 3), '0: R')", "v2 = v1 * 2", "losses = [v2.sum()]",
        end="inputs"),
]  # fmt: skip
EACH = ((0,), (1,), (2,), (3,))
WRONG_ONCE_ON_FOUR = [
    # a leaf that crosses was a leaf still for ranks that it does not come to
    program(EACH, "v1 = leaf(1, (3,), '0: R')", "v2 = move(v1, '1: R')", "v2.mul_(0.5)",
        "losses = [v2.sum()]"),
    # a transfer in a region that is computed again, of other ranks
    program(
        EACH, "v1, v2 = leaf(1, (3,), '0: R'), leaf(2, (3,), '2: R')",
        "v3 = ckpt(lambda a, b: move(move(a.exp(), '1: R').sin(), '2: R') "
        "* b.exp(), v1, v2)", "losses = [v3.sum()]",
    ),
]  # fmt: skip


@pytest.mark.parametrize("example", WRONG_ONCE)
@on_ranks(2)
def test_what_was_wrong_once(example):
    found = fuzz_stages.problems(example)
    assert not found, "\n".join([str(example), *found])


@pytest.mark.parametrize("example", WRONG_ONCE_ON_FOUR)
@on_ranks(4)
def test_what_was_wrong_once_on_four(example):
    found = fuzz_stages.problems(example)
    assert not found, "\n".join([str(example), *found])


@on_ranks(2)
def test_what_only_some_ranks_would_send_back_is_found():
    """A token that is lost on one rank: found before anything hangs."""
    lost = "v2 = cut(move(v1, '1: R'))"
    example = StageProgram(
        ("v1 = leaf(1, (3,), '0: R')", lost, "losses = [v2.sum()]"), meshes=APART
    )
    original = fuzz_stages.StageWorld.names

    def names(self):
        def cut(x):
            return x.detach() if self.meshes and not x.is_initialized else x * 1

        return {**original(self), "cut": cut}

    fuzz_stages.StageWorld.names = names
    try:
        found = "\n".join(fuzz_stages.problems(example))
    finally:
        fuzz_stages.StageWorld.names = original
    assert "a backward of the transfer" in found and "only on ranks [1], without [0]" in found
    assert "requires_grad False, plain True" in found
