"""Gradients of several micro-batches add up: sharded, or whole, with reductions each time or at the
last one only."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor.comm import collectives
from disttensor.gradients.reduce import reductions
from tests.support.micro import STEPS, batch_of, meshes, net, shard, step_of, values
from tests.support.part import part
from tests.support.pool import on_ranks

MODES = ["scatter", "none", None]


def train(mesh: Any, reduce: Any, **options: Any) -> list[Tensor]:
    """Losses, gradients and parameters of some steps."""
    model = net()
    if mesh is not None:
        model = shard(model, mesh, **options)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    out: list[Any] = []
    for step in range(STEPS):
        adam.zero_grad(set_to_none=step % 2 == 0)
        out += values(step_of(model, mesh, step, reduce))
        out += values([p.grad for p in model.parameters()])
        adam.step()
        out += values(list(model.parameters()))
    return out


def check(**options: Any) -> None:
    plain = train(None, None)
    for mesh in meshes().values():
        for reduce in MODES:
            got = train(mesh, reduce, **options)
            for i, (a, b) in enumerate(zip(got, plain, strict=True)):
                torch.testing.assert_close(
                    a,
                    b,
                    rtol=1e-11,
                    atol=1e-12,
                    msg=lambda m, i=i, r=reduce, n=mesh: f"{n} {r} {i}: {m}",
                )


OPTIONS = [
    {"stage": 3},
    {"stage": 3, "reshard_after_forward": False},
    {"stage": 2},
    {"stage": 1},
    {"shard_axis": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2)
def test_two_ranks_train_as_one(options: dict[str, Any]) -> None:
    check(**options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(4)
def test_four_ranks_train_as_one(options: dict[str, Any]) -> None:
    check(**options)


# What is communicated -----------------------------------------------------------------------------


def expected(
    options: dict[str, Any], reduce: Any, m: int, k: int, replicas: bool
) -> dict[str, int]:
    """Collectives of a step: M blocks, each a segment, and the segment of the root; K
    micro-batches.

    all_gather      stage 3: (2M + 1) K (the root's is kept from the forward to the end of the
                    backward; FSDP2: 2(M + 1) K),
                    without reshard_after_forward (M + 1) K, as FSDP2
                    stages 1, 2: M + 1, whatever K is: the parameters change once per step
    reduce_scatter  (M + 1) K, with reduce="none" M + 1: as FSDP2
    all_reduce      over the replicas (M + 1) K, with accumulate in either way M + 1: as FSDP2
    stage 1         has one all-reduce over all axes in place of the last two; so has
                    shard_axis=None, which gathers nothing
    """
    all_segments = m + 1
    stage = options.get("stage", 3)
    cut = options.get("shard_axis", "fsdp") is not None
    kept = not options.get("reshard_after_forward", True)
    gathers = all_segments if stage < 3 else all_segments * k if kept else (2 * m + 1) * k
    scatters = all_segments * (1 if reduce == "none" else k)
    reduces = all_segments * (1 if reduce else k)
    if not cut:
        counts = {"all_reduce": reduces}
    elif stage == 1:
        counts = {"all_gather": gathers, "all_reduce": reduces}
    else:
        counts = {
            "all_gather": gathers,
            "reduce_scatter": scatters,
            "all_reduce": reduces * replicas,
        }
    return {kind: n for kind, n in counts.items() if n}


def communicated(blocks: int, micro: int, mesh: Any, reduce: Any, options: Any) -> dict[str, int]:
    model = shard(net(blocks=blocks), mesh, **options)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):  # the first learns in which order segments are used
        with dt.debugging.record_comms() as log:
            step_of(model, mesh, step, reduce, micro)
            sgd.step()
        sgd.zero_grad()
    return log.counts()


def check_counts(options: dict[str, Any], m: int, k: int) -> None:
    for mesh in meshes().values():
        for reduce in MODES:
            want = expected(options, reduce, m, k, mesh.ndim == 2)
            got = communicated(m, k, mesh, reduce, options)
            assert got == want, (mesh, reduce, m, k, got, want)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2)
def test_collectives_of_a_step(options: dict[str, Any]) -> None:
    check_counts(options, 2, 3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(4)
def test_collectives_of_a_step_with_replicas(options: dict[str, Any]) -> None:
    check_counts(options, 3, 2)


# Between micro-batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_gradients_wait_for_the_replicas_until_the_last(stage: int) -> None:
    mesh = meshes()["dp x fsdp"]
    model = shard(net(), mesh, stage=stage)
    seen: list[Any] = []
    look = lambda _: seen.append([p.grad.partial_status for p in model.parameters()])  # noqa: E731
    step_of(model, mesh, 0, "scatter", each=look)
    count = len(list(model.parameters()))
    assert seen == [[{0: "sum"}] * count] * 2 + [[{}] * count], seen
    assert all(p.grad.placements[1] == dt.Shard(0) for p in model.parameters())


def all_of(params: list[Any]) -> list[Any]:
    return [p.grad for p in params]


def grads(params: list[Any]) -> list[Any]:
    return [g for g in all_of(params) if g is not None]


def anew(params: list[Any]) -> None:
    for p in params:
        p.grad = p.grad * 0.5


def augmented(params: list[Any]) -> None:
    for p in params:
        p.grad *= 0.5


# what programs do to gradients between micro-batches
EDITS: dict[str, Callable[[list[Any]], Any]] = {
    "in place": lambda params: [g.mul_(0.5) for g in grads(params)],
    "past autograd": lambda params: [g.data.mul_(0.5) for g in grads(params)],
    "a list": lambda params: torch._foreach_mul_(grads(params), 0.5),
    "not linear": lambda params: [g.clamp_(-0.01, 0.01) for g in grads(params)],
    "anew": anew,
    "augmented": augmented,
    "dropped": lambda params: [setattr(p, "grad", None) for p in params[::2]],
    "zero": lambda params: [g.zero_() for g in grads(params)],
    "read": lambda params: [g.norm().item() for g in grads(params)],
    "by value": lambda params: torch.nn.utils.clip_grad_value_(params, 0.01),
    "by value, in a loop": lambda params: torch.nn.utils.clip_grad_value_(params, 0.01, False),
    "by norm": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1),
}


@on_ranks(4)
def test_gradients_that_wait_can_be_read_and_changed() -> None:
    """As those of one process, after each micro-batch."""
    mesh = meshes()["dp x fsdp"]
    ways = ({"stage": 3}, {"stage": 1}, {"stage": 2}, {"stage": 3, "param_dtype": torch.float32})
    for (name, edit), options in zip(EDITS.items(), itertools.cycle(ways)):
        close = 1e-5 if "param_dtype" in options else 1e-11
        want: list[Any] = []
        for reduce in (None, "scatter", "none"):
            model = net(blocks=1) if reduce is None else shard(net(blocks=1), mesh, **options)
            params, found = list(model.parameters()), []

            def look(i: int, params: Any = params, found: Any = found, edit: Any = edit) -> None:
                assert len(grads(params)) == len(params)
                edit(params)
                found.append([g if g is None else values([g])[0] for g in all_of(params)])

            step_of(model, None if reduce is None else mesh, 0, reduce, each=look)
            want = want or found
            where = f"{name} {reduce} {options}"
            torch.testing.assert_close(
                found, want, rtol=close, atol=close / 10, msg=lambda m, w=where: f"{w}: {m}"
            )


@on_ranks(2)
def test_a_gradient_that_waits_stays_one_object() -> None:
    """Whoever holds it has the sum so far, and the reduced gradient in the end."""
    mesh = meshes()["fsdp"]
    model = shard(net(), mesh)
    held: list[Any] = []

    def look(i: int) -> None:
        now = grads(list(model.parameters()))
        held.extend(now if i == 0 else ())
        assert all(a is b for a, b in zip(held, now, strict=True))
        assert [dict(g.partial_status) for g in now] == [{} if i == 2 else {0: "sum"}] * len(now)

    with dt.debugging.record_comms() as log:
        step_of(model, mesh, 0, "none", each=look)
    assert log.counts()["reduce_scatter"] == 4


@pytest.mark.parametrize("reduce", ["scatter", "none"])
@on_ranks(4)
def test_sums_of_replicas_are_taken_after_adding(reduce: str) -> None:
    """Every rank ends with 1/n of all it is given, of both micro-batches: 1/4 here, for 2 x 2
    ranks. Had the first been added after the all-reduce of the second, its part would be 1/2, and
    that of this rank's own replica only."""
    mesh = meshes()["dp x fsdp"]
    model: Any = torch.nn.Linear(1, 4, bias=False).double()
    model = dt.shard_data_parallel(model, mesh, replicate_axis="dp")
    batches = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]]).double()
    for i, batch in enumerate(batches):
        with dt.accumulate(model, last=i == 1, reduce=reduce):
            x = dt.shard_tensor(batch.view(4, 1), mesh, [dt.Shard(0), dt.Shard(0)])
            (model(x).sum() / 4).backward()
    whole = model.weight.grad.full_tensor()
    assert whole.tolist() == [[255 / 4]] * 4, whole


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2)
def test_zero_grad_drops_what_was_collected(options: dict[str, Any], none: bool) -> None:
    mesh = meshes()["fsdp"]
    for zero_of in ("module", "optimizer"):
        for reduce in ("scatter", "none"):
            model, plain = shard(net(), mesh, **options), net()
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(2):  # the second time gradients are there from the first
                with dt.accumulate(model, last=False, reduce=reduce):
                    model(batch_of(mesh, 7)).sum().backward()
                (model if zero_of == "module" else sgd).zero_grad(set_to_none=none)
                plain.zero_grad()
                step_of(model, mesh, 0, reduce)
                step_of(plain, None, 0, None)
                got, want = (values([p.grad for p in m.parameters()]) for m in (model, plain))
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(4)
def test_a_step_without_a_last_micro_batch(options: dict[str, Any]) -> None:
    """The optimizer, and sync_gradients, read complete gradients."""
    for mesh in meshes().values():
        for reduce in ("scatter", "none"):
            for how in ("step", "sync"):
                model, plain = shard(net(), mesh, **options), net()
                for m in (model, plain):
                    for i in range(2):
                        with dt.accumulate(model, last=False, reduce=reduce):
                            m(batch_of(mesh if m is model else None, i)).sum().backward()
                if how == "sync":
                    dt.sync_gradients(model)
                    assert not any(p.grad.partial_status for p in model.parameters())
                    got, want = (values([p.grad for p in m.parameters()]) for m in (model, plain))
                else:
                    for m in (model, plain):
                        torch.optim.SGD(m.parameters(), lr=0.1).step()
                    got, want = (values(list(m.parameters())) for m in (model, plain))
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduce", ["scatter", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2)
def test_a_micro_batch_that_is_not_split(options: dict[str, Any], reduce: str) -> None:
    """Its gradients are complete where they arise; those of the others are pending."""
    for mesh, whole in itertools.product(meshes().values(), range(3)):
        model, plain = shard(net(), mesh, **options), net()
        for i in range(3):
            x = batch_of(None, i)
            plain(x).sum().backward()
            places = [dt.Replicate() if i == whole else dt.Shard(0)] * mesh.ndim
            with dt.accumulate(model, last=i == 2, reduce=reduce):
                model(dt.shard_tensor(x, mesh, places)).sum().backward()
        got, want = (values([p.grad for p in m.parameters()]) for m in (model, plain))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


# Micro-batches that reach different parameters ----------------------------------------------------


class Branches(torch.nn.Module):
    """A micro-batch goes through some of the branches; ``scale`` and ``shift`` are in the segment
    of the root, and each has its own uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
        self.one, self.two = (torch.nn.Linear(5, 5) for _ in range(2))
        self.unused = torch.nn.Linear(5, 5)

    def forward(self, x: Any, reach: str, recompute: bool) -> Any:
        if "scale" in reach:
            x = x * self.scale
        for name in ("one", "two", "one"):
            if name in reach:
                branch = getattr(self, name)
                x = x + (checkpoint(branch, x, use_reentrant=False) if recompute else branch(x))
        return x + self.shift if "shift" in reach else x


REACHES = [
    ["one", "two"],
    ["one", "two", "scale"],
    ["one two scale", "shift"],
    ["shift", "one two shift scale"],
    ["two", "one two", ""],
    ["one", "", "two"],
    ["scale one", "shift one", "one two", "two"],
    ["shift", "scale", "one"],
    ["one two", "one", "one two scale"],
]


def reach_each(
    model: Any, mesh: Any, reaches: list[str], reduce: str | None, rows: int, variant: str
) -> list[Any]:
    """The gradients after some micro-batches, and, for the variant "read", between them."""
    out: list[Any] = []
    for i, reach in enumerate(reaches):
        scope: Any = contextlib.nullcontext()
        if reduce is not None:
            last = i == len(reaches) - 1 and variant != "no last"
            scope = dt.accumulate(model, last=last, reduce=reduce)
        with scope:
            x = batch_of(None, i, rows)
            if mesh is not None:
                place = dt.Replicate() if variant == "whole" and i % 2 else dt.Shard(0)
                x = dt.shard_tensor(x, mesh, [place] * mesh.ndim)
            x.requires_grad_(not reach)
            model(x, reach, variant == "recompute").square().sum().backward()
        if variant == "read":
            out += [p.grad if p.grad is None else values([p.grad])[0] for p in model.parameters()]
    if reduce is not None and variant != "no last":
        assert not any(p.grad is not None and p.grad.partial_status for p in model.parameters())
    return out + [p.grad if p.grad is None else values([p.grad])[0] for p in model.parameters()]


def check_reaches(mesh: Any, options: dict[str, Any], case: tuple[Any, ...]) -> None:
    variant, reduce, rows, segments, reaches = case
    torch.manual_seed(0)
    plain = Branches().double()
    model = copy.deepcopy(plain)
    replicas = "dp" if mesh.ndim == 2 else None
    dt.shard_data_parallel(model, mesh, segments=segments, replicate_axis=replicas, **options)
    for these in (reaches, reaches[::-1]):
        found = [
            reach_each(m, on, these, way, rows, variant)
            for m, on, way in ((model, mesh, reduce), (plain, None, None))
        ]
        torch.testing.assert_close(
            *found, rtol=1e-10, atol=1e-11, msg=lambda m: f"{mesh} {options} {case}: {m}"
        )
        if variant == "no last":
            dt.sync_gradients(model)
            assert not any(p.grad is not None and p.grad.partial_status for p in model.parameters())
        model.zero_grad()
        plain.zero_grad()


CASES = list(
    itertools.product(
        ["plain", "read", "whole", "recompute", "no last"], ["scatter", "none", None], (5, 1),
        (["one", "two", "unused"], None), REACHES,
    )
)  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2, timeout=500)
def test_micro_batches_reach_different_parameters(options: dict[str, Any]) -> None:
    for case in part(CASES, 6, str(options)):
        check_reaches(meshes()["fsdp"], options, case)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(4, timeout=900)
def test_micro_batches_reach_different_parameters_with_replicas(options: dict[str, Any]) -> None:
    for case in part(CASES, 4, str(options)):
        check_reaches(meshes()["dp x fsdp"], options, case)


@pytest.mark.parametrize("reduce", ["scatter", "none"])
@on_ranks(2)
def test_a_micro_batch_of_several_backwards(reduce: str) -> None:
    """The head's loss in chunks, whose gradient then goes through the body. The hooks of a
    parameter see its reduced gradient once it is complete."""
    mesh = meshes()["fsdp"]
    for options in OPTIONS:
        torch.manual_seed(0)
        body, head = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 3).double()
        plain = torch.nn.ModuleDict({"body": body, "head": head})
        model = dt.shard_data_parallel(
            copy.deepcopy(plain), mesh, segments=["body", "head"], **options
        )
        hooked: list[Any] = []
        model["body"].weight.register_post_accumulate_grad_hook(
            lambda p, hooked=hooked: hooked.append(dict(p.grad.partial_status))
        )
        for m in (plain, model):
            for i in range(2):
                scope: Any = contextlib.nullcontext()
                if m is model:
                    scope = dt.accumulate(model, last=i == 1, reduce=reduce)
                with scope:
                    hidden = m["body"](batch_of(mesh if m is model else None, i))
                    leaf = hidden.detach().requires_grad_()
                    for columns in (slice(0, 2), slice(2, 5)):
                        (m["head"](leaf * 1.0)[:, :2].square().sum() * columns.stop).backward()
                    hidden.backward(leaf.grad)
        assert hooked[-1] == {}, hooked
        found = [values([p.grad for p in m.parameters()]) for m in (model, plain)]
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)


# Mistakes -----------------------------------------------------------------------------------------


def test_arguments_that_have_no_meaning(mesh_of_one: Any) -> None:
    model = dt.shard_data_parallel(torch.nn.Linear(2, 2), mesh_of_one)
    with (
        pytest.raises(ValueError, match=r"reduce='x'.*scatter.*none"),
        dt.accumulate(model, True, "x"),
    ):
        pass
    plain = dt.accumulate(torch.nn.Linear(2, 2), True)
    with pytest.raises(ValueError, match="Linear holds no DistTensor"), plain:
        pass


@pytest.fixture
def mesh_of_one() -> Any:
    return dt.ProcessMesh([0], ("fsdp",))


@on_ranks(2)
def test_the_window_ends_with_the_context() -> None:
    """Also where an error leaves it: the next backward reduces completely."""
    mesh = meshes()["fsdp"]
    model = shard(net(), mesh, shard_axis=None)
    with pytest.raises(ZeroDivisionError), dt.accumulate(model, last=False):
        _ = 1 / 0
    model(batch_of(mesh, 0)).sum().backward()
    assert not any(p.grad.partial_status for p in model.parameters())


# 4 x 8, simulated: the reductions of 32 ranks, step by step ---------------------------------------

REPLICAS, SHARDS = 4, 8


class Waiting(NamedTuple):
    """A collective that one rank has come to."""

    given: Tensor
    taken: Tensor
    ranks: tuple[int, ...]


class Alone:
    """What a reduction needs of a parameter: gradients of 16 elements, an element pair per
    shard."""

    name, axis, divisible = "w", 1, True

    def __init__(self, rank: int) -> None:
        r, s = self.at = divmod(rank, SHARDS)
        columns = tuple(range(s, REPLICAS * SHARDS, SHARDS))
        rows = tuple(range(r * SHARDS, (r + 1) * SHARDS))
        mesh = SimpleNamespace(
            shape=(REPLICAS, SHARDS),
            ndim=2,
            coordinate=self.at,
            group=lambda axes, _: rows if axes == (1,) else columns,
        )
        self.spec = SimpleNamespace(mesh=mesh, local_shape=(16,), dtype=torch.float64)
        self.sharded_param = SimpleNamespace(dtype=torch.float64, device="cpu", requires_grad=True)
        self.reduce_dtype, self.rows_shape = torch.float64, (16,)
        self.pending: Tensor | None = None
        self.partial: Tensor | None = None
        self.complete: Tensor | None = None

    def pending_axes(self) -> tuple[int, ...]:
        return 0, 1

    def rows(self, x: Tensor) -> Tensor:
        return x

    from_rows = rows

    def pop_grads(self) -> tuple[Tensor | None, None]:
        return self.pending, None

    def pop_partial(self, axes: Any) -> Tensor | None:
        assert axes == (0,)
        earlier, self.partial = self.partial, None
        return earlier

    def accumulate_grad(self, grad: Tensor, axes: Any) -> None:
        if axes:
            self.partial = grad if self.partial is None else self.partial + grad
        else:
            self.complete = grad if self.complete is None else self.complete + grad


def advance(runs: list[Any]) -> None:
    """All ranks to the end: each round is one collective, over groups that agree."""
    while True:
        waits = [next(run, None) for run in runs]
        if waits[0] is None:
            assert waits == [None] * len(runs)
            return
        sent = [w.given.clone() for w in waits]
        for rank, w in enumerate(waits):
            total = torch.stack([sent[other] for other in w.ranks]).sum(0)
            if len(total) != len(w.taken):  # reduce-scatter
                total = total.view(len(w.ranks), -1)[w.ranks.index(rank)]
            w.taken.copy_(total)


def test_the_mean_over_four_times_eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After micro-batches 1 and 2 every rank holds (1/32) sum(g1 + g2) of its shard. Added after
    the all-reduce, the first would count with the ranks of one replica only: (1/8) of them, were
    each sum divided by what it was over."""
    monkeypatch.setattr(
        collectives, "reduce_scatter", lambda x, op, ranks, out, **_: Waiting(x, out, ranks)
    )
    monkeypatch.setattr(collectives, "all_reduce", lambda x, op, ranks, **_: Waiting(x, x, ranks))
    world = [Alone(rank) for rank in range(REPLICAS * SHARDS)]
    g = torch.randn(2, len(world), 16, generator=torch.Generator().manual_seed(0)).double()
    for micro in range(2):
        for param, grad in zip(world, g[micro] / len(world), strict=True):  # the loss divides
            param.pending = grad
        params: list[Any] = [[one] for one in world]
        last = micro == 1
        steps = [reductions(p, scatter=True, last=last)[0] for p in params]
        advance(steps)
        if micro == 0:
            assert all(t.complete is None and t.partial is not None for t in world)
    mean = (g[0] + g[1]).sum(0) / len(world)
    wrong = g[0].view(REPLICAS, SHARDS, 16).sum(1) / SHARDS + g[1].sum(0) / len(world)
    for param in world:
        r, s = param.at
        shard = slice(2 * s, 2 * s + 2)
        torch.testing.assert_close(param.complete, mean[shard], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(param.complete, wrong[r, shard], rtol=1e-3)


class Paths(torch.nn.Module):
    """Micro-batches reach ``a`` or ``b``, and ``c``; ``fails``: in the backward, before a and b."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Any, branch: str, fails: bool = False) -> Any:
        y = getattr(self, branch)(x)
        if fails:
            y.register_hook(self.fail)
        return self.c(y)

    def fail(self, grad: Any) -> None:
        raise ValueError("a hook of the user")


def sharded_paths(stage: int) -> Any:
    mesh = dt.init_mesh((2,), ("fsdp",))
    return dt.shard_data_parallel(Paths(), mesh, "fsdp", stage=stage, segments=["a", "b", "c"])


def micro_batch(model: Any, number: int) -> Any:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4) * (number + 1)
    if isinstance(model.a.weight, dt.DistTensor):
        x = dt.shard_tensor(x, model.a.weight.process_mesh, [dt.Shard(0)])
    return x


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("reduce", ["scatter", "none"])
@on_ranks(2)
def test_hooks_run_for_segments_that_the_last_backward_does_not_reach(reduce, stage):
    model, called = sharded_paths(stage), set()
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: called.add(name))
    for i, branch in enumerate("ab"):
        with dt.accumulate(model, last=i == 1, reduce=reduce):
            model(micro_batch(model, i), branch).sum().backward()
    assert called == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("reduce", ["scatter", "none"])
@on_ranks(2)
def test_gradients_of_earlier_micro_batches_outlive_an_error(reduce):
    """The program catches it, and goes on to accumulate; torch keeps all gradients, too."""
    found = []
    for model in (sharded_paths(3), Paths()):
        for i in range(3):
            around: Any = contextlib.nullcontext()
            if not found:
                around = dt.accumulate(model, last=i == 2, reduce=reduce)
            with contextlib.suppress(ValueError), around:
                model(micro_batch(model, i), "a", fails=i == 1).square().sum().backward()
        grads = [p.grad for p in (*model.a.parameters(), *model.c.parameters())]
        found.append(values(grads))
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-12)


@on_ranks(4)
def test_a_gradient_that_waits_is_there_when_it_is_first_read():
    mesh = dt.ProcessMesh([[0, 1], [2, 3]], ("dp", "fsdp"))
    model = dt.shard_data_parallel(torch.nn.Linear(4, 4), mesh, shard_axis="fsdp")
    x = dt.ones(4, 4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    with dt.accumulate(model, last=False, reduce="none"):
        model(x).sum().backward()
    assert [model.weight.grad is None for _ in range(2)] == [False, False]
    model.zero_grad(set_to_none=False)
    with dt.accumulate(model, last=True, reduce="none"):
        model(x).sum().backward()
    assert model.bias.grad.tolist() == [4.0] * 4
