"""Random numbers restart, fork and come back by torch's own functions, as in one plain process: the
same state gives the same numbers, on ranks inside and outside the mesh."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from disttensor.random import counter
from disttensor.torch_private import read_embedded
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = [(R, S0), (S1, R)]

# What draws. Each gets a tensor of ones, or a DistTensor of them, and gives the numbers.
DRAWS: dict[str, Callable[[Any], Any]] = {
    "randn_like": torch.randn_like,
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout invariant": lambda x: invariantly(lambda: F.dropout(x, 0.5)),
    "normal_": lambda x: x.clone().normal_(),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x.clone()),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x.clone()),
    "sparse_": lambda x: nn.init.sparse_(x.clone(), 0.5),
    "fallback": lambda x: torch.binomial(x * 9, x * 0.5),
}


def invariantly(call: Callable[[], Any]) -> Any:
    with dt.random.rng("invariant"):
        return call()


# Programs: each gives two values that are the same in one plain process ---------------------------
Draw = Callable[[], Any]


def seeded_again(draw: Draw) -> Iterator[Any]:
    torch.manual_seed(5)
    yield draw()
    draw()
    torch.manual_seed(5)
    yield draw()


def seeded_by_torch_random(draw: Draw) -> Iterator[Any]:
    torch.random.manual_seed(-3)
    yield draw()
    torch.random.manual_seed(-3)
    yield draw()


def seeded_with_its_own_seed(draw: Draw) -> Iterator[Any]:
    torch.manual_seed(8)
    yield draw()
    torch.manual_seed(torch.initial_seed())
    yield draw()


def seeded_by_the_generator(draw: Draw) -> Iterator[Any]:
    torch.default_generator.manual_seed(11)
    yield draw()
    torch.default_generator.manual_seed(11)
    yield draw()


def forked_by_the_generator(draw: Draw) -> Iterator[Any]:
    torch.manual_seed(6)
    draw()
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(1)
    draw()
    torch.default_generator.set_state(state)
    yield draw()
    torch.manual_seed(6)
    draw()
    yield draw()


def forked(draw: Draw) -> Iterator[Any]:
    torch.manual_seed(6)
    draw()
    with torch.random.fork_rng(devices=[]):
        yield draw()
        draw()
    yield draw()


def forked_and_seeded(draw: Draw) -> Iterator[Any]:
    torch.manual_seed(6)
    draw()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        draw()
    yield draw()
    torch.manual_seed(6)
    draw()
    yield draw()


def restored(draw: Draw) -> Iterator[Any]:
    draw()
    state = torch.get_rng_state()
    yield draw()
    draw()
    torch.manual_seed(99)
    torch.set_rng_state(state)
    yield draw()


def restored_by_torch_random(draw: Draw) -> Iterator[Any]:
    state = torch.random.get_rng_state()
    yield draw()
    torch.random.set_rng_state(state)
    yield draw()


def restored_from_a_file(draw: Draw) -> Iterator[Any]:
    file = io.BytesIO()
    torch.save({"rng": torch.get_rng_state()}, file)
    yield draw()
    file.seek(0)
    torch.set_rng_state(copy.deepcopy(torch.load(file)["rng"].clone()))
    yield draw()


def restored_in_the_middle_of_plain_draws(draw: Draw) -> Iterator[Any]:
    state = torch.get_rng_state()
    yield draw()
    torch.rand(700)
    draw()
    torch.set_rng_state(state)
    yield draw()


def restored_from_another_generator(draw: Draw) -> Iterator[Any]:
    g = torch.Generator().manual_seed(4)
    torch.set_rng_state(g.get_state())
    yield draw()
    torch.set_rng_state(g.clone_state().get_state())
    yield draw()


REPEAT = [
    seeded_again, seeded_by_torch_random, seeded_with_its_own_seed, seeded_by_the_generator,
    forked, forked_by_the_generator, forked_and_seeded, restored, restored_by_torch_random,
    restored_from_a_file, restored_in_the_middle_of_plain_draws, restored_from_another_generator,
]  # fmt: skip


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor(everywhere=True).clone() if isinstance(x, dt.DistTensor) else x


def meshes() -> list[ProcessMesh]:
    """A mesh of all ranks, and one that most ranks are outside of."""
    every = [[0, 1], [2, 3]] if dist.get_world_size() == 4 else [[0, 1]]
    return [ProcessMesh(every, ("x", "y")), ProcessMesh([[0]], ("x", "y"))]


def test_the_programs_repeat_numbers_in_one_plain_process() -> None:
    for program in REPEAT:
        for name, case in DRAWS.items():
            first, second = program(lambda case=case: case(torch.ones(5, 6)))
            assert torch.equal(first, second), (program.__name__, name)


def same_everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def repeats(programs: list[Any], draws: list[str]) -> None:
    ones = torch.ones(5, 6)
    for mesh in meshes():
        seen: dict[str, Tensor] = {}
        for placements in LAYOUTS:
            x = dt.shard_tensor(ones, mesh, placements)
            for program in programs:
                for name in draws:
                    first, second = map(whole, program(lambda x=x, name=name: DRAWS[name](x)))
                    where = mesh, placements, program.__name__, name
                    assert torch.equal(first, second), where
                    if program is seeded_again and name not in ("dropout", "rrelu"):  # by place
                        assert torch.equal(seen.setdefault(name, first), first), where
        counts, values = zip(*same_everywhere((counter.get_state(), seen)), strict=True)
        assert len(set(counts)) == 1
        assert all(torch.equal(v[k], values[0][k]) for v in values for k in values[0])


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@on_ranks(2)
def test_torch_ways_to_set_read_fork_and_restore_repeat_numbers() -> None:
    repeats(REPEAT, ["randn_like", "dropout"])


@pytest.mark.parametrize("world", [2, 4])
def test_all_that_draws_restarts_with_the_seed(world: int) -> None:
    on_ranks(world)(_all_that_draws)()


def _all_that_draws() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dt.errors.FallbackWarning)
        repeats([seeded_again, restored], list(DRAWS))


@on_ranks(2)
def test_factories_and_plain_tensors_restart_with_the_seed() -> None:
    for mesh in meshes():
        for make in (
            lambda mesh=mesh: dt.rand(7, mesh=mesh, placements=[R, S0]),
            lambda mesh=mesh: dt.randn(7, 3, mesh=mesh, placements=[S1, S0]),
            lambda mesh=mesh: dt.randperm(9, mesh=mesh),
            lambda: torch.rand(3),
        ):
            for program in (seeded_again, forked, restored):
                first, second = map(whole, program(make))
                assert torch.equal(first, second)


GENERATED: dict[str, Callable[[Any, torch.Generator], Any]] = {
    "normal_": lambda x, g: x.clone().normal_(generator=g),
    "multinomial": lambda x, g: torch.multinomial(x, 2, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x / 2, generator=g),
    "normal": lambda x, g: torch.normal(x, x, generator=g),
    "trunc_normal_": lambda x, g: nn.init.trunc_normal_(x.clone(), generator=g),
    "kaiming_normal_": lambda x, g: nn.init.kaiming_normal_(x.clone(), generator=g),
    "fallback": lambda x, g: torch.binomial(x * 9, x * 0.5, generator=g),
    "by position": lambda x, g: torch.binomial(x * 9, x * 0.5, g),
    "poisson": lambda x, g: torch.poisson(x * 9, generator=g),
    "poisson by position": lambda x, g: torch.poisson(x * 9, g),
}


@on_ranks(2)
def test_a_generator_sets_reads_and_restores_its_own_numbers() -> None:
    """The default generator, given as an argument, is as none."""
    warnings.simplefilter("ignore", dt.errors.FallbackWarning)
    for mesh in meshes():
        x = dt.shard_tensor(torch.ones(5, 6), mesh, [R, S0])
        for name, case in GENERATED.items():
            g = torch.Generator().manual_seed(3)
            before = counter.get_state()
            numbers = [whole(case(x, g)) for _ in range(2)]
            state, other = g.get_state(), g.clone_state()
            numbers.append(whole(case(x, g)))
            again = [whole(case(x, other))]
            g.set_state(state)
            again.append(whole(case(x, g)))
            g.manual_seed(g.initial_seed())
            again.append(whole(case(x, g)))
            assert torch.equal(again[0], numbers[2]) and torch.equal(again[1], numbers[2]), name
            assert torch.equal(again[2], numbers[0]), name
            assert not torch.equal(numbers[0], numbers[1]), name
            assert counter.get_state() == before, name
            states = same_everywhere(g.get_state().tolist())
            assert states[0] == states[1], (name, "a rank outside draws less")
            torch.manual_seed(2)
            default = whole(case(x, torch.default_generator))
            torch.manual_seed(2)
            assert torch.equal(default, whole(case(x, None))), name  # type: ignore[arg-type]


@pytest.mark.parametrize("preserve", [True, False])
@on_ranks(2)
def test_a_recomputation_draws_what_its_forward_drew_and_leaves_the_count(preserve: bool) -> None:
    mesh = ProcessMesh([[0, 1]], ("x", "y"))

    def region(x: Any) -> Any:
        kept = F.dropout(x.sin(), 0.5)
        scale = torch.rand(()) if preserve else 0.5  # a plain number, as in LayerDrop
        with torch.random.fork_rng():
            torch.manual_seed(4)
            kept = kept * torch.randn_like(kept)
        return (kept * scale * torch.rand_like(kept)).exp()

    found = []
    for run in (region, lambda x: checkpoint(
        region, x, use_reentrant=False, preserve_rng_state=preserve
    )):  # fmt: skip
        torch.manual_seed(3)
        x = dt.randn(5, 4, mesh=mesh, placements=[R, S0]).requires_grad_()
        y = run(x)
        torch.manual_seed(8)
        after = whole(torch.rand_like(x))
        y.sum().backward()
        found.append((whole(y), whole(x.grad), after, whole(torch.rand_like(x)), torch.rand(3)))
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_a_skipped_module_that_seeds_restarts_the_numbers_on_all_ranks() -> None:
    class Seeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            torch.manual_seed(5)
            return F.dropout(x * self.w, 0.5)

    class Draws(Seeds):
        def forward(self, x: Any) -> Any:
            return F.dropout(x * self.w, 0.5)

    mesh = ProcessMesh([0], ("x",))
    for kind, expected in ((Seeds, [(5, 1)] * 4), (Draws, [(6, n) for n in range(1, 5)])):
        model = dt.shard_module(kind(), mesh, {})
        x = dt.shard_tensor(torch.ones(3, 4), mesh, [R])
        torch.manual_seed(6)
        counts = []
        for _ in range(4):
            model(x)
            counts.append(counter.get_state())
        assert counts == expected, kind


@on_ranks(2)
def test_a_generator_goes_on_alike_where_sparse_fills_a_tensor_of_another_stage() -> None:
    mesh = dt.init_mesh((2,), ("x",))
    generator = torch.Generator().manual_seed(3)
    nn.init.sparse_(dt.zeros(6, 4, mesh=ProcessMesh([0], ("s",))), 0.5, generator=generator)
    x = dt.zeros(3, mesh=mesh).normal_(generator=generator)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, x.to_local().tolist())
    assert everyone[0] == everyone[1]


def test_the_count_is_where_torch_reads_nothing() -> None:
    torch.manual_seed(1)
    with_it, plain = torch.get_rng_state(), torch.default_generator.get_state()
    seed, calls = counter.get_state()
    assert read_embedded(with_it, 2)[0] == (seed, calls) and read_embedded(plain, 2)[0] is None
    wanted = torch.randn(1000)
    for state in (with_it, plain):
        torch.default_generator.set_state(state)
        assert torch.equal(torch.randn(1000), wanted)
    assert torch.equal(torch.default_generator.get_state(), _moved(plain))


def _moved(state: Tensor) -> Tensor:
    g = torch.Generator()
    g.set_state(state)
    torch.randn(1000, generator=g)
    return g.get_state()
