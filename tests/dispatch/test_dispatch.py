"""The path of one call: what a plan depends on, how warm a call gets, what is refused."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.comm import compare_programs
from disttensor.dispatch import dispatch, native
from disttensor.dispatch.key import key_of
from tests.support.pool import fake_world


@pytest.fixture
def mesh() -> Iterator[dt.ProcessMesh]:
    """A mesh of 2 x 4 in a world whose communication is faked: this process is rank 0."""
    with fake_world(8):
        yield dt.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ("dp", "tp"))


def sharded(mesh: dt.ProcessMesh, *shape: int) -> dt.DistTensor:
    return dt.from_local(
        torch.ones(shape), mesh, [dt.Shard(0), dt.Replicate()], shape=(shape[0] * 2, *shape[1:])
    )


def python_calls(f: Callable[[], Any]) -> list[str]:
    """Names of the Python functions that a call of ``f`` enters, itself left out."""
    seen: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return seen[1:]


def test_a_warm_pointwise_call_enters_few_python_functions_or_none(mesh: dt.ProcessMesh) -> None:
    x, y = sharded(mesh, 3, 4), sharded(mesh, 3, 4)
    for in_c in (False, True):
        with native.using(in_c):
            x + y
            most = 0 if in_c and native.module is not None else 4
            assert len(python_calls(lambda: x + y)) <= most


def test_a_warm_use_of_a_parameter_enters_few(mesh: dt.ProcessMesh) -> None:
    x = sharded(mesh, 3, 4)
    w = torch.nn.Parameter(dt.shard_tensor(torch.ones(5, 4), mesh))
    torch.nn.functional.linear(x, w)
    assert len(python_calls(lambda: torch.nn.functional.linear(x, w))) <= 6


@pytest.mark.parametrize(
    "pair", [(1, True), (1, 1.0), (0, False), (0.0, False), ("1", 1)], ids=repr
)
def test_equal_constants_of_two_types_have_two_keys(pair: tuple[Any, Any]) -> None:
    one, other = pair
    assert key_of(one) != key_of(other)
    assert key_of([one]) != key_of([other])


def test_constants_promote_by_their_type(mesh: dt.ProcessMesh) -> None:
    x = dt.shard_tensor(torch.arange(4), mesh)
    assert [(x * c).dtype for c in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_floats_do_not_fill_the_plans(mesh: dt.ProcessMesh) -> None:
    x = sharded(mesh, 3, 4)
    x * 0.5
    before = len(dispatch.PLANS)
    for i in range(100):
        x * (i / 7)
    assert len(dispatch.PLANS) == before


def test_a_tensor_with_an_attribute_spec_is_plain(mesh: dt.ProcessMesh) -> None:
    x, y, z = sharded(mesh, 4, 6), torch.ones(6), torch.ones(8, 1)
    y.spec = z.spec = "mine"  # type: ignore[attr-defined]
    for _ in range(2):
        assert (x + y).shape == (x + z).shape == (8, 6)
    assert torch.cat([x, torch.ones(8, 6)]).shape == (16, 6)


def test_plans_are_bounded(mesh: dt.ProcessMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.PLANS, "limit", len(dispatch.PLANS) + 5)
    for n in range(1, 20):
        x = sharded(mesh, n, 2)
        assert (x + x).shape == (2 * n, 2)
    assert len(dispatch.PLANS) <= dispatch.PLANS.limit


def test_the_order_of_a_norm_counts_by_value(mesh: dt.ProcessMesh) -> None:
    x = dt.shard_tensor(torch.tensor([3.0, -4.0]), mesh)
    got = [torch.linalg.vector_norm(x, p).item() for p in (2.0, 1.0, float("inf"), 2.0)]
    assert got == [5.0, 7.0, 4.0, 5.0]


def test_autocast_is_seen_by_a_warm_plan(mesh: dt.ProcessMesh) -> None:
    x, w = sharded(mesh, 3, 4), dt.shard_tensor(torch.ones(5, 4), mesh)
    linear = torch.nn.functional.linear
    dtypes = [linear(x, w).dtype]
    with torch.autocast("cpu", torch.bfloat16):
        dtypes += [linear(x, w).dtype, linear(x, w).dtype]
    dtypes.append(linear(x, w).dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]


def test_a_rule_that_lies_is_caught(mesh: dt.ProcessMesh) -> None:
    import ops

    def twice(x: Any) -> Any:
        return torch.cat([x, x])

    made = ops.Rule("twice", lambda input: ops.pointwise_factors([input]))
    ops.replace_rule(
        torch.erfinv,
        ops.Rule("liar", lambda input: ops.pointwise_factors([input], local=lambda call: twice)),
    )
    try:
        with pytest.raises(RuntimeError, match=r"rule liar says .* \[3, 4\].* gave \[6, 4\]"):
            torch.erfinv(sharded(mesh, 3, 4))
    finally:
        ops.replace_rule(torch.erfinv, made)


def test_a_split_into_one_piece_is_a_tuple_each_time(mesh: dt.ProcessMesh) -> None:
    x = dt.ones(2, 4, mesh=mesh)
    for _ in range(3):
        (piece,) = torch.split(x, 2)
        assert type(piece) is dt.DistTensor and piece.shape == (2, 4)


def test_two_meshes_are_an_error_that_names_both(mesh: dt.ProcessMesh) -> None:
    other = dt.ProcessMesh([0, 1], ("x",))
    with pytest.raises(ValueError, match=r"two meshes.*dp=2, tp=4.*x=2.*reshard"):
        sharded(mesh, 3, 4) + dt.shard_tensor(torch.ones(6, 4), other)


@pytest.mark.parametrize("world", [32, 4096])
def test_a_program_runs_in_a_large_world(world: int) -> None:
    with fake_world(world):
        mesh = dt.init_mesh((world // 8, 8), ("dp", "tp"))
        w = torch.nn.Parameter(
            dt.zeros(4096, 64, mesh=mesh, placements=[dt.Replicate(), dt.Shard(0)])
        )
        x = dt.ones(world, 64, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
        loss = torch.nn.functional.linear(x, w).relu().sum()
        loss.backward()
        assert w.grad is not None
        assert w.grad.partial_status == {0: "sum"}
        assert w.grad.to_local().shape == (512, 64)


def test_a_runner_holds_no_tensor_of_its_first_call(mesh: dt.ProcessMesh) -> None:
    """One of several results, which stays with the runner of any call."""
    x = sharded(mesh, 4, 4)
    held = weakref.ref(x.local)
    torch.split(x + 0, 2, dim=1)
    torch.split(x, 2, dim=1)
    compare_programs.CALLS.clear()
    del x
    assert held() is None


def test_a_tuple_of_one_view_has_its_gradient(mesh: dt.ProcessMesh) -> None:
    """Views of leaves and of results, for each function that gives a tuple of views."""
    calls: list[Callable[[Any], Any]] = [
        lambda x: x.unbind(0), lambda x: x.split(1), lambda x: x.chunk(1),
        lambda x: x.tensor_split(1),
    ]  # fmt: skip
    for call in calls:
        for made in (lambda x: x, torch.sin):
            plain = torch.ones(1, 4, requires_grad=True)
            x = dt.shard_tensor(plain.detach(), mesh, requires_grad=True)
            for leaf in (plain, x):
                (view,) = call(made(leaf))
                (view * 3).sum().backward()
            assert x.grad is not None and plain.grad is not None
            torch.testing.assert_close(x.grad.to_local(), plain.grad)
