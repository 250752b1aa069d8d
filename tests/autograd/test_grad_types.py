"""The table of gradient types, and moves between them, without processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from disttensor.autograd.grad_types import (
    GradType,
    gradient_type,
    reshard_local,
    scale_average_grad,
)
from disttensor.core.mesh import ProcessMesh
from tests.support.pool import fake_world
from tests.support.reshard_cases import P, R, S, Threads, layouts, spec, value, window


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(16):
        yield


def mesh(*shape):
    return ProcessMesh(torch.arange(torch.Size(shape).numel()).reshape(shape))


@pytest.mark.parametrize(
    ("placements", "varying", "want", "uses", "divisor"),
    [
        ((S(0), R), (), (S(0), R), (), 1),
        ((P(), S(0)), (), (R, S(0)), (0,), 1),
        ((R, S(0)), (0,), (P(), S(0)), (), 1),
        ((R, R), (1, 0), (P(), P()), (), 1),
        ((R, P()), (0,), (P(), R), (1,), 1),
        ((P("avg"), P()), (), (R, R), (0, 1), 2),
        ((P("avg"), P("avg")), (), (R, R), (0, 1), 6),
    ],
)
def test_the_table_is_its_own_inverse(placements, varying, want, uses, divisor):
    m = mesh(2, 3)
    t = GradType(spec(m, placements, (6, 4)), varying)
    found, divided = gradient_type(t)
    assert found == GradType(spec(m, want, (6, 4)), uses) and divided == divisor
    if divisor == 1:
        assert gradient_type(found) == (GradType(t.spec, tuple(sorted(varying))), 1)


def test_uses_are_named_in_order_of_the_axes():
    m = mesh(1, 2, 1, 1, 1, 1, 1, 1, 2)
    placements = [P() if a in (1, 8) else R for a in range(9)]
    assert gradient_type(GradType(spec(m, placements, (4,))))[0].varying == (1, 8)


def test_an_extreme_that_is_pending_has_no_gradient():
    with pytest.raises(RuntimeError, match="pending 'max' has no gradient"):
        gradient_type(GradType(spec(mesh(2), [P("max")], (4,))))


@pytest.mark.parametrize(("pending", "times"), [("avg", 4), ("sum", 1), ("max", 1)])
def test_the_gradient_of_an_average_is_scaled_once(pending, times):
    s = spec(mesh(4), [P(pending)], (3,))
    leaf = torch.ones(3, requires_grad=True)
    assert scale_average_grad(scale_average_grad(leaf, s), s) is leaf
    leaf.sum().backward()
    assert leaf.grad.tolist() == [times] * 3
    plain = torch.ones(3)
    assert scale_average_grad(plain, s) is plain


def test_a_leaf_of_which_a_maximum_is_pending_is_left_alone():
    leaf = torch.ones(3, requires_grad=True)
    assert scale_average_grad(leaf, spec(mesh(2, 2), [P("avg"), P("max")], (3,))) is leaf


def test_a_move_takes_a_result_that_is_known(monkeypatch):
    def body(m):
        s, d = (GradType(spec(m, [p], (5, 4))) for p in (S(0), R))
        x, known = torch.ones(s.spec.local_shape, requires_grad=True), value((5, 4))
        y = reshard_local(x, s, d, [known])
        return y.requires_grad and y is not known and torch.equal(y, known)

    assert all(Threads((3,), monkeypatch).run_on(body).values())


@pytest.mark.parametrize("src", layouts(2, 1, ("sum", "avg")), ids=str)
@pytest.mark.parametrize("dst", layouts(2, 1, ("sum", "avg")), ids=str)
def test_the_backward_of_a_move_is_the_move_between_the_duals(src, dst, monkeypatch):
    """The gradient of the whole is the same before and after; of an average each rank has 1/n."""
    threads = Threads((3,), monkeypatch)
    grad = value((5, 4), torch.float64, seed=2)
    ends = [spec(threads.meshes[0], p, (5, 4), torch.float64) for p in (src, dst)]

    def given(s, place):
        means, divided = gradient_type(GradType(s))
        return window(grad, means.spec.box_at(place)) / divided

    def body(m):
        s, d = (GradType(spec(m, p, (5, 4), torch.float64)) for p in (src, dst))
        x = torch.zeros(s.spec.local_shape, dtype=torch.float64, requires_grad=True)
        y = reshard_local(x, s, d, None)
        assert y is not x and y.shape == d.spec.local_shape
        seed = given(d.spec, m.coordinate).requires_grad_()
        (got,) = torch.autograd.grad(y, x, seed, create_graph=True)
        (again,) = torch.autograd.grad(got, seed, torch.zeros_like(got))
        assert again.shape == seed.shape
        return got.detach()

    for place, got in threads.run_on(body).items():
        torch.testing.assert_close(got, given(ends[0], place), rtol=1e-12, atol=1e-12)
