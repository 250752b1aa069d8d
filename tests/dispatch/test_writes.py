"""What calls write to besides their results: out=, lists on two meshes, views that are copies,
pieces that are leaves of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import disttensor as dt
from tests.support.oracle import fallbacks
from tests.support.pool import on_ranks

R, S0, S1, P = dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()
OUT: dict[str, Callable[..., Any]] = {
    "add": lambda x, out: torch.add(x, x, out=out(5, 3)),
    "sum": lambda x, out: torch.sum(x, dim=0, out=out(3)),
    "matmul": lambda x, out: torch.matmul(x, x.T, out=out(5, 5)),
    "empty": lambda x, out: torch.mul(x, 2, out=out(0)),
    "max": lambda x, out: torch.max(x, 0, out=(out(3), out(3).long()))[0],
    "cast": lambda x, out: torch.mul(x, 2, out=out(5, 3).double()),
}


@pytest.mark.parametrize("name", OUT)
@on_ranks(2)
def test_a_plain_out_receives_the_whole_result(name: str) -> None:
    mesh = dt.init_mesh((2,), ("a",))
    whole = torch.arange(15.0).reshape(5, 3).cos()
    made: list[Tensor] = []

    def out(*shape: int) -> Tensor:
        made.append(torch.zeros(shape))
        return made[-1]

    want = OUT[name](whole, out)
    for placement in (R, S0, S1, P):
        given = OUT[name](dt.shard_tensor(whole, mesh, [placement]), out)
        assert type(given) is Tensor and given.dtype is want.dtype
        torch.testing.assert_close(given, want)
        assert name in ("max", "cast") or given is made[-1]
    with pytest.raises(RuntimeError, match=r"shape \[2\], the result \[5, 3\]"):
        torch.mul(dt.shard_tensor(whole, mesh), 2, out=torch.zeros(2))


STATISTICS: dict[str, Callable[..., Any]] = {
    "batch_norm": lambda x, *stats: torch.batch_norm(x, None, None, *stats, True, 0.1, 1e-5, True),
    "instance_norm": lambda x, *stats: torch.instance_norm(
        x, None, None, *stats, True, 0.1, 1e-5, True
    ),
    "native_batch_norm": lambda x, *stats: torch.native_batch_norm(
        x, None, None, running_mean=stats[0], running_var=stats[1], training=True, momentum=0.1,
        eps=1e-5,
    ),
    "batch_norm_update_stats": lambda x, *stats: torch.batch_norm_update_stats(x, *stats, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@on_ranks(2)
def test_statistics_that_a_function_writes_without_a_sign_keep_the_write(name: str) -> None:
    """torch counts no version, and neither the name nor the schema of the function says it."""
    mesh, call = dt.init_mesh((2,)), STATISTICS[name]
    x, want = torch.arange(30.0).reshape(2, 3, 5).cos(), (torch.zeros(3), torch.ones(3))
    call(x, *want)
    for placement in (R, S0):
        stats = [dt.shard_tensor(t, mesh, [placement]) for t in (torch.zeros(3), torch.ones(3))]
        copy = stats[0].reshape(1, 3).reshape(3)
        kept = stats[1].sum()
        call(dt.shard_tensor(x, mesh, [S1]), *stats)
        for ours, expected in zip(stats, want, strict=True):
            torch.testing.assert_close(ours.full_tensor(), expected)
        torch.testing.assert_close(stats[1].sum().full_tensor(), want[1].sum())
        assert kept.full_tensor() == 3
        if placement is R:  # a view
            torch.testing.assert_close(copy.full_tensor(), want[0])
    one = dt.ProcessMesh([1])
    stats = [dt.shard_tensor(t, one) for t in (torch.zeros(3), torch.ones(3))]
    plain = torch.zeros(3), torch.ones(3)
    with dt.values_everywhere():
        call(dt.shard_tensor(x, one), *plain)
        call(dt.shard_tensor(x, one), *stats)
    for ours, expected in zip((*plain, *map(dt.broadcast_value, stats)), want * 2, strict=True):
        torch.testing.assert_close(ours, expected)


@on_ranks(2)
def test_a_plain_tensor_on_a_rank_outside_refuses_a_value_of_the_mesh() -> None:
    mesh = dt.ProcessMesh([1])
    x = dt.ones(2, mesh=mesh)
    for grad in (True, False):
        for write in (
            lambda to: torch.mul(x, 2, out=to), lambda to: to.copy_(x), lambda to: to.add_(x),
            lambda to: to.__setitem__(0, x[0]), lambda to: torch._foreach_add_([to], [x]),
        ):  # fmt: skip
            to = torch.zeros(2)
            with torch.set_grad_enabled(grad):
                if mesh.coordinate is None:
                    with pytest.raises(RuntimeError, match="which this rank is not in"):
                        write(to)
                    assert not to.any()
                else:
                    write(to)
                    assert to[0] > 0


def sums(pairs: Any) -> list[float]:
    return [float(dt.broadcast_value(x).sum()) for x in pairs]


LISTS: dict[str, Callable[..., Any]] = {
    "the first list is plain": lambda a, b, p, q: torch._foreach_mul([p, q], [a, b]),
    "the first list is half plain": lambda a, b, p, q: torch._foreach_mul([p, b], [a, q]),
    "by name": lambda a, b, p, q: torch._foreach_add(self=[a, b], other=[a, q]),
    "a list of numbers": lambda a, b, p, q: torch._foreach_add((a, b), [1.0, 2.0]),
    "in place": lambda a, b, p, q: torch._foreach_addcmul_([a, b], [p, b], [a, q], 0.5),
    "norms": lambda a, b, p, q: torch._foreach_norm([a, b, p]),
}


@pytest.mark.parametrize("name", LISTS)
@on_ranks(2)
def test_lists_on_two_meshes_give_what_plain_lists_give(name: str) -> None:
    one, two = dt.ProcessMesh([0, 1]), dt.ProcessMesh([1])
    plain = [torch.full((3,), float(i + 1)) for i in range(4)]
    a = dt.shard_tensor(plain[0], one, [S0])
    b = dt.shard_tensor(plain[1], two)
    given = LISTS[name](a, b, plain[2], plain[3])
    want = LISTS[name](*(t.clone() for t in plain))
    assert sums(given) == pytest.approx(sums(want))


@on_ranks(2)
def test_a_fused_step_on_two_meshes_is_the_plain_step() -> None:
    one, two = dt.ProcessMesh([0, 1]), dt.ProcessMesh([1])
    options = {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8,
        "amsgrad": False, "maximize": False,
    }  # fmt: skip
    results = []
    for steps_on in (None, (one, two), (one, one), (two, two), (two, one)):
        lists = [[torch.full((3,), float(i + j)) for j in (1, 2)] for i in range(4)]
        steps: Any = [torch.tensor(1.0), torch.tensor(3.0)]
        if steps_on is not None:
            lists = [[dt.shard_tensor(x, one, [S0]), dt.shard_tensor(y, two)] for x, y in lists]
            steps = [dt.shard_tensor(x, mesh) for x, mesh in zip(steps, steps_on, strict=True)]
        torch._fused_adam_(*lists, [], steps, **options)
        results.append([sums(members) for members in (*lists, steps)])
    for given in results[1:]:
        assert given == [pytest.approx(plain) for plain in results[0]]


DRAWS = ("normal_", "uniform_", "exponential_", "random_", "bernoulli_", "log_normal_", "cauchy_")


@pytest.mark.parametrize("name", [*DRAWS, "geometric_"])
@on_ranks(2)
def test_numbers_drawn_into_a_view_are_in_what_it_views(name: str) -> None:
    mesh = dt.init_mesh((2,), ("a",))
    options = (0.5,) if name == "geometric_" else ()
    for placement in (R, S0, S1):
        for index in (0, slice(1, 4), (slice(None), 1)):
            x = dt.shard_tensor(torch.full((5, 3), -7.0), mesh, [placement])
            before = x * 1
            view = x[index]
            getattr(view, name)(*options)
            whole, drawn = x.full_tensor(), view.full_tensor()
            assert whole[index].equal(drawn) and not drawn.eq(-7).any()
            assert int(whole.eq(-7).sum()) == 15 - drawn.numel()
            assert before.full_tensor().eq(-7).all()


@on_ranks(2)
def test_numbers_drawn_into_a_leaf_are_refused_on_ranks_inside_and_outside() -> None:
    x = dt.ones(3, mesh=dt.ProcessMesh([1]), requires_grad=True)
    for name in (*DRAWS, "zero_"):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            getattr(x, name)()


@on_ranks(2)
def test_writes_to_from_local_of_a_leaf_are_those_of_one_process() -> None:
    mesh = dt.init_mesh((2,), ("a",))
    rank = mesh.coordinate[0]
    whole = torch.arange(15.0).reshape(5, 3) / 7 - 0.5

    def program(leaf: Tensor, factor: Tensor, name: str, how: str, wrap: Any) -> Any:
        """how: the write is recorded by autograd or not; the tensor was used before it or not"""
        y = wrap(leaf * 2 if "recorded" in how else leaf)
        before = (y * factor).sum() if "used" in how and "recorded" not in how else 0
        with torch.set_grad_enabled("recorded" in how):
            getattr(y, name)(*([3.0] if name == "fill_" else []))
        ((y * factor).sum() + y.sum()).backward()
        return y, before

    pieces = {R: whole, S0: whole.chunk(2)[rank], P: whole if rank == 0 else torch.zeros(5, 3)}
    for placement, piece in pieces.items():
        at = placement if placement is S0 else R
        for name in ("zero_", "fill_", "relu_"):
            for how in ("recorded", "used, recorded", "not", "used, not"):
                plain = nn.Parameter(whole.clone())
                want, then = program(plain, whole.cos(), name, how, lambda t: t.view_as(t))
                mine, factor = nn.Parameter(piece.clone()), dt.shard_tensor(whole.cos(), mesh, [at])
                got, now = program(
                    mine, factor, name, how, lambda t, p=placement: dt.from_local(t, mesh, [p])
                )
                torch.testing.assert_close(got.full_tensor().detach(), want.detach())
                grad = plain.grad.chunk(2)[rank] if placement is S0 else plain.grad
                torch.testing.assert_close(mine.grad, grad)
                if "used" in how and "not" in how:
                    torch.testing.assert_close(now.full_tensor().detach(), then.detach())
    with pytest.raises(RuntimeError, match="view of a leaf Variable"):
        dt.from_local(nn.Parameter(whole), mesh, [R]).zero_()


@torch.library.custom_op("test_writes::addto_", mutates_args={"x"})
def addto_(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("test_writes::swap_", mutates_args={"x", "y"})
def swap_(x: Tensor, y: Tensor, scale: float) -> None:
    x.mul_(scale)
    y.add_(1)


@on_ranks(2)
def test_a_target_that_is_also_an_argument_is_one_tensor() -> None:
    mesh = dt.init_mesh((2,), ("a",))
    whole = torch.arange(10.0).reshape(5, 2)
    for placement in (R, S0, S1):
        x = dt.shard_tensor(whole.clone(), mesh, [placement])
        with fallbacks():
            torch.ops.test_writes.addto_(x, x)
            assert x.placements == (placement,)
            assert torch.equal(x.full_tensor(), whole * 2)
            torch.ops.test_writes.swap_(x, x, 3.0)
        assert torch.equal(x.full_tensor(), whole * 6 + 1)
        index = torch.tensor([0, 1, 2, 3, 4])
        with pytest.raises(RuntimeError, match=r"single memory location|overlap"), fallbacks():
            x.index_add_(0, index, x)
        with pytest.raises(RuntimeError, match=r"single memory location|overlap"), fallbacks():
            x.index_copy_(0, index.flip(0), x)
        assert torch.equal(x.full_tensor(), whole * 6 + 1)
