"""What was wrong once. Most were found by tests/fuzz/fuzz_programs.py and made smaller; each is
checked like its programs."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from disttensor.tensor import views
from tests.fuzz import fuzz_programs
from tests.support import oracle
from tests.support.oracle import randn
from tests.support.pool import on_ranks

S0, S1, R = Shard(0), Shard(1), Replicate()


def program(shape, *lines, end="backward"):
    return pytest.param(shape, lines, end, id=lines[-2][:40] + " " + end)


# Each has the same values and gradients as on plain tensors.
PROGRAMS_OF_2 = [
    # the gradient of a leaf that is a pending average was that of its own share
    program((2,), "v = leaf(1, (4,), 'Pavg')", "w = torch.sin(v * 1.0)", "loss = w.sum()"),
    program((2,), "v = leaf(1, (4,), 'Pavg')", "w = torch.sin(v * 1.0)", "loss = w.sum()",
        end="grad"),
    program((2,), "d = data(1, (4,), 'Pavg')", "v = newleaf(2, d)", "loss = (v * d).sum()"),
    # a gradient that is differentiated again was counted once for each rank
    program((2,), "v = leaf(1, (5,), 'P')", "w = v * 1.0", "loss = (w ** 2).sum()", end="double"),
    program((2,), "v = leaf(1, (5,), 'R')", "w = v * data(2, (5,), 'S0')",
        "loss = (w * v).sum() + (v ** 3).sum()", end="double"),
    # a view taken without grad was replayed with grad for uses that vary
    program(
        (2,), "v = leaf(1, (2, 3), 'R')", "with torch.no_grad(): w = v.t()",
        "loss = (w * data(2, (3, 2), 'S0') * leaf(3, (3, 2), 'R')).sum()",
    ),
    # bias shapes that only broadcast
    program((2,), "v = leaf(1, (2, 1), 'S0')", "w = F.linear(v, v, v)", "loss = (w ** 2).sum()"),
    # one row here, two in the whole: a transposed piece looks contiguous, and was given itself
    program(
        (2,), "v = leaf(1, (4, 2), 'S1') * 1.0", "w = v.t().contiguous()", "w.add_(1)",
        "x = w * v.t()", "loss = x.sum()",
    ),
    program((2,), "v = leaf(1, (4, 2), 'S1') * 1.0", "w = v.t().reshape(8)", "w.mul_(2)",
        "loss = w.sum() + (v ** 2).sum()"),
    # what an all-gather of uneven pieces gave could not be written to
    program((2,), "v = leaf(1, (5, 3), 'S0') * 1.0", "w = to(v, 'R') * 1.0",
        "loss = (w.add_(1) ** 2).sum()"),
]  # fmt: skip
PROGRAMS_OF_4 = [
    program((4,), "i = index(1, (5,), 8, 'S0')", "v = F.embedding(i, leaf(2, (8, 4), 'R') * 1.0)",
        "loss = (v ** 2).sum()", end="double"),
    program((4,), "v = leaf(1, (4,), 'S0') * 1.0", "w = v.index_select(0, index(2, (4,), 4, 'R'))",
        "loss = (w ** 3).sum()", end="double"),
    program((4,), "v = leaf(1, (2,), 'S0') * 1.0", "w = v.index_select(0, index(2, (4,), 2, 'R'))",
        "loss = (w ** 3).sum()", end="double"),
    # an axis of one rank made a view into one that could not be written to
    program((4, 1), "v = leaf(1, (4, 3, 3), 'S0 S1') * 1.0", "v.flatten(0, 1).tanh_()",
        "loss = (v ** 2).sum()"),
    # ranks with nothing had no graph of second order, and left the others waiting
    program(
        (2, 2), "v = leaf(1, (2, 3), 'S0 S0') * 1.0", "w = plain(2, (3,))",
        "n = F.rms_norm(v, (3,), w)", "loss = (n ** 2).sum()",
        end="double",
    ),
    program(
        (2, 2), "v = leaf(1, (2, 4, 2), 'S0 S0') * 1.0", "w = leaf(2, (4,), 'R R')",
        "n = F.group_norm(v, 2, w)",
        "loss = (n ** 3).sum()", end="double",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "lines", "end"), PROGRAMS_OF_2)
@on_ranks(2)
def test_program_on_2_ranks(shape, lines, end):
    fuzz_programs.check("\n".join(lines), shape, end)


@pytest.mark.parametrize(("shape", "lines", "end"), PROGRAMS_OF_4)
@on_ranks(4)
def test_program_on_4_ranks(shape, lines, end):
    fuzz_programs.check("\n".join(lines), shape, end)


# Views that had to copy ---------------------------------------------------------------------------


def split_rows():
    return oracle.place(randn(7, 3), oracle.line(), [S0]) * 1.0


@on_ranks(2)
def test_a_write_to_a_view_of_a_copy_is_refused():
    a, _ = split_rows().split([3, 4], 0)
    for lost in (a, a.unsqueeze(1), a.detach(), a.t()[0]):
        with pytest.raises(RuntimeError, match=r"had to move data and returned a copy"):
            lost.neg_()


@on_ranks(2)
def test_a_copy_is_out_of_date_after_a_write_to_what_it_was_taken_from():
    for write in (lambda x: x.add_(1), lambda x: x[2:].mul_(2), lambda x: x.t().zero_()):
        x = split_rows()
        a, b = x.split([3, 4], 0)
        kept, before = a.clone(), a * 2
        view = b.t()
        write(x)
        for old in (a, b, view):
            with pytest.raises(RuntimeError, match=r"written to since"):
                _ = old + 1
            with pytest.raises(RuntimeError, match=r"written to since"):
                old.full_tensor()
        assert torch.equal((kept * 2).full_tensor(), before.full_tensor())
        x.split([3, 4], 0)[0].full_tensor()  # taken again


@on_ranks(2)
def test_a_row_that_is_written_shows_in_the_tensor_and_stays_up_to_date():
    x, want = split_rows(), randn(7, 3)
    row, other = x[4], x[4]
    row.add_(1)
    row[1:].mul_(2)
    want[4].add_(1)
    want[4, 1:].mul_(2)
    assert torch.equal(x.full_tensor(), want)
    assert torch.equal(row.full_tensor(), want[4])
    with pytest.raises(RuntimeError, match=r"written to since"):
        other.full_tensor()


# Writes to a tensor of 5 x 6 through other shapes of it, all of which move data of split dims.
RESHAPED = {
    "flat": lambda x: x.view(-1)[3:9].zero_(),
    "by numbers": lambda x: x.view(-1).__setitem__(torch.tensor([1, 7, 22]), 5.0),
    "transposed": lambda x: x.view(-1).view(2, 15).t()[3].fill_(2.0),
    "unflatten": lambda x: x.unflatten(1, (2, 3))[:, 1].neg_(),
    "view_as": lambda x: x.view_as(torch.empty(10, 3)).mul_(3),
    "twice": lambda x: [(v.clamp_(-0.5, 1), v[0].copy_(v[1])) for v in [x.view(10, 3)]],
}


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("grad", [False, True])
@on_ranks(2)
def test_a_write_to_another_shape_of_a_tensor_shows_in_the_tensor(grad, name):
    write, weights = RESHAPED[name], randn(5, 6, seed=3)
    leaf = randn(5, 6).requires_grad_(grad)
    want = leaf * 1.5
    write(want)
    for layout in ([R], [S0], [S1]):
        ours = oracle.place(leaf.detach(), oracle.line(), layout).requires_grad_(grad)
        x = ours * 1.5
        view = x.view(3, 10)
        write(x)
        torch.testing.assert_close(x.detach().full_tensor(), want.detach())
        if layout != [R]:
            with pytest.raises(RuntimeError, match=r"written to since"):
                view.full_tensor()
        if grad:
            (x * weights).sum().backward()
            (expected,) = torch.autograd.grad((want * weights).sum(), leaf, retain_graph=True)
            torch.testing.assert_close(ours.grad.full_tensor(), expected)


@on_ranks(2)
def test_a_write_to_a_reshape_that_copied_is_refused():
    """In one process, strides decide whether it is a view; ranks do not know those of the whole."""
    for take in (lambda x: x.reshape(-1), lambda x: x.t().reshape(-1), lambda x: x.flatten()):
        with pytest.raises(RuntimeError, match=r"had to move data and returned a copy"):
            take(split_rows()).zero_()


@on_ranks(2)
def test_copies_that_are_gone_leave_nothing_behind():
    gc.collect()
    before = len(views.LIVE)
    x = split_rows()
    parts = [x[i] for i in range(7)]
    assert len(views.LIVE) == before + 1
    del parts
    assert len(views.LIVE) == before


# Reshards and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [[S0], [S1], [Partial()], [Partial("avg")]], ids=str)
@pytest.mark.parametrize("grad", [False, True])
@on_ranks(2)
def test_a_write_to_a_reshard_leaves_its_source_alone(to, grad):
    x = oracle.place(randn(5, 3), oracle.line(), [R]).requires_grad_(grad) * 1.0
    y = dt.reshard(x, None, to)
    y.mul_(2)
    oracle.compare_replicas([x.detach()])
    assert torch.equal(x.detach().full_tensor(), randn(5, 3))
    torch.testing.assert_close(y.detach().full_tensor(), randn(5, 3) * 2)


@on_ranks(2)
def test_a_write_to_the_source_of_a_pending_sum_is_the_same_on_all_ranks():
    """On the first rank it was a view of the source, on the other fresh memory."""
    x = oracle.place(randn(5), oracle.line(), [R]).requires_grad_()
    y = dt.reshard(x, None, [Partial()])
    with torch.no_grad():
        x.mul_(0.5)
    (y**2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * randn(5))


# Strides ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_transposed_piece_of_one_row_is_not_contiguous():
    x = oracle.place(randn(4, 2), oracle.line(), [S1])
    assert x.is_contiguous()
    assert x.stride() == (2, 1)
    assert not x.t().is_contiguous()
    assert x.t().stride() == (1, 2)
    assert x.t().contiguous().is_contiguous()
    assert F.linear(x, x).is_contiguous()


# Copies -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_copy_of_a_gradient_is_not_noted_under_the_address_of_what_is_gone():
    """Where another gradient got that address, its copy was the first one's."""
    x = oracle.place(randn(5), oracle.line(), [R]).requires_grad_()
    x.sum().backward()
    memo = {}
    copied = copy.deepcopy(x, memo)
    assert copied.grad.full_tensor().equal(torch.ones(5, dtype=torch.float64))
    assert all(id(t) in memo for t in (x, x.grad))
