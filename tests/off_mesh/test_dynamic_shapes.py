"""Functions whose output shape depends on data: ranks outside learn the shape, and the program goes
on."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import rnn

from disttensor import ProcessMesh
from disttensor.errors import FallbackWarning
from tests.support.oracle import grid, randint, randn
from tests.support.pool import on_ranks
from tests.support.stages import Stages, check_stages, stage_meshes

INTS = randint(0, 4, (9,), seed=3)
ROWS = randint(0, 2, (6, 3), seed=5)
COUNTS = torch.tensor([2, 0, 3, 1, 1, 0, 2])


def nonzero(x, ints, rows, counts):
    i = torch.nonzero(x > 0.2)
    return i.to(x.dtype) * 2, x[i[:, 0]]


def nonzero_tuple(x, ints, rows, counts):
    a, b = torch.nonzero(x > 0.2, as_tuple=True)
    return x[a, b], a + b


def argwhere(x, ints, rows, counts):
    return torch.argwhere(x > 0.2).double() + 1


def where(x, ints, rows, counts):
    a, b = torch.where(x > 0.2)
    return x[a, b] * 2, b


def masked_select(x, ints, rows, counts):
    return x.masked_select(x > 0.2).exp() * torch.masked_select(x * 2, x > 0.2)


def getitem(x, ints, rows, counts):
    return x[x > 0.2].cumsum(0)


def getitem_rows(x, ints, rows, counts):
    return x[x.sum(1) > 0] @ x.t(), x[:, x.sum(0) > 0] * 3


def getitem_mixed(x, ints, rows, counts):
    return x[x[:, 0] > 0, 1], x[None, x.sum(1) > 0, :2]


def setitem(x, ints, rows, counts):
    y = x * 1
    y[y > 0.2] = 0.0
    z = x * 1
    z[z < 0] = x[x < 0] * 2
    return y * x, z


def setitem_rows(x, ints, rows, counts):
    y = x * 1
    y[x.sum(1) > 0] *= 2
    return y


def unique(x, ints, rows, counts):
    return torch.unique(ints) * 2, ints.unique(sorted=True) + 1


def unique_all(x, ints, rows, counts):
    values, inverse, times = torch.unique(ints, return_inverse=True, return_counts=True)
    return values[inverse] * 1, times.cumsum(0)


def unique_dim(x, ints, rows, counts):
    values, times = torch.unique(rows, dim=0, return_counts=True)
    return values.double().t() @ times.double(), times


def unique_consecutive(x, ints, rows, counts):
    values, inverse, times = torch.unique_consecutive(ints, return_inverse=True, return_counts=True)
    return values + times, inverse, torch.unique_consecutive(rows, dim=0) + 1


def bincount(x, ints, rows, counts):
    return torch.bincount(ints) * 2, ints.bincount(minlength=7), ints.bincount(x[:, 0].new_ones(9))


def repeat_interleave(x, ints, rows, counts):
    return torch.repeat_interleave(x, counts, dim=0).tanh(), x.repeat_interleave(2, 1)


def repeat_interleave_of_counts(x, ints, rows, counts):
    return x[torch.repeat_interleave(counts)]


def one_hot(x, ints, rows, counts):
    return F.one_hot(ints).double().t() @ F.one_hot(ints, 5).double()


def nothing_found(x, ints, rows, counts):
    return x[x > 1e9].sum() + x.masked_select(x > 1e9).sum(), torch.nonzero(x > 1e9).sum(0)


def packed_sequence(x, ints, rows, counts):
    packed = rnn.pack_padded_sequence(x.unsqueeze(-1), torch.tensor([7, 4, 4, 2, 1]))
    return packed.data * 2, packed.batch_sizes + 1


def ctc_loss(x, ints, rows, counts):
    names = x.log_softmax(-1).unsqueeze(1).expand(7, 2, 5)
    lengths = torch.tensor([7, 6]), torch.tensor([2, 1])
    return F.ctc_loss(names, torch.tensor([[1, 2], [3, 4]]), *lengths)


PROGRAMS = [
    nonzero, nonzero_tuple, argwhere, where, masked_select, getitem, getitem_rows, getitem_mixed,
    setitem, setitem_rows, unique,
    unique_all, unique_dim, unique_consecutive, bincount, repeat_interleave,
    repeat_interleave_of_counts, one_hot, nothing_found, packed_sequence, ctc_loss,
]  # fmt: skip


def with_stage(program, stage):
    """The program on ``stage``; what it gives goes on to the other one, and back into a loss."""

    def run(on: Stages):
        x = on.leaf(randn(7, 5), 1 - stage).tanh()
        x = on.to(x, stage)
        others = [on.value(v, stage) for v in (INTS, ROWS, COUNTS)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            for _ in range(2):  # cold and warm
                results = program(x, *others)
        results = results if isinstance(results, tuple) else (results,)
        loss = x.sum()
        for r in results:
            loss = loss + r.sum() * 0.5
            away = on.to(r, 1 - stage)
            assert away.shape == r.shape
            loss = loss + on.to((away * away).sum(), stage)
        return (loss, *[r.detach() for r in results])

    return run


def backward(results):
    results[0].backward()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@on_ranks(2)
def test_on_a_stage(program):
    for stage in (0, 1):
        check_stages(with_stage(program, stage), stage_meshes(), 0, backward)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@on_ranks(4)
def test_on_a_stage_that_is_split(program):
    for seed in (1, 2, 3):
        check_stages(with_stage(program, seed % 2), stage_meshes(), seed, backward)


@on_ranks(4)
def test_beside_a_mesh_of_all():
    """Ranks 2 and 3 are in one mesh and outside the other."""
    meshes = [grid(), ProcessMesh([1, 0], ("tp",))]
    for program in (nonzero, unique_all, getitem_rows):
        check_stages(with_stage(program, 1), meshes, 4, backward)
