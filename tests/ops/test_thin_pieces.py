"""Pieces of one row or none: torch calls them contiguous whatever strides they have, so what checks
strides or offsets, copies or shares memory must not go by that."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from tests.support.part import EVERYTHING, part
from tests.support.pool import on_ranks

SHAPES = [(1, 6, 7), (5, 2, 7), (4, 1, 7), (2, 3, 7), (0, 2, 7), (4, 7), (1, 7), (3, 8)]
VIEWS = {
    "columns": lambda x: x[..., 4:6],
    "odd": lambda x: x[..., 3:5],
    "step": lambda x: x[..., 1:5:2],
    "transposed": lambda x: x[..., 1:3].transpose(0, -2),
    "expanded": lambda x: x[:1, ..., 3:5].expand(4, *x.shape[1:-1], 2),
    "whole": lambda x: x.unflatten(-1, (x.shape[-1] // 2, 2)) if x.shape[-1] % 2 == 0 else x,
    "copy": lambda x: x[..., 3:5].clone(),
}
CALLS = {
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(-1),
    "same shape": lambda y: y.reshape(y.shape),
    "split": lambda y: y.reshape(*y.shape, 1),
    "complex": lambda y: torch.view_as_complex(y.contiguous()),
    "reshaped to complex": lambda y: torch.view_as_complex(y.reshape(*y.shape[:-2], -1, 2)),
    "double": lambda y: y.contiguous().view(torch.float64),
    "bytes": lambda y: y.contiguous().view(torch.uint8),
    "viewed": lambda y: y.contiguous().view(-1),
    "real": lambda y: torch.view_as_real(torch.view_as_complex(y.contiguous())),
}
FALLBACKS = {"double", "bytes"}


@pytest.mark.limit(600 if EVERYTHING else 120)
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_share_memory_where_one_process_shares_it(ranks: int) -> None:
    on_ranks(ranks, timeout=600)(body)(part([*itertools.product(SHAPES, VIEWS, CALLS)], 40, ranks))


def body(cases: list[tuple[Any, str, str]]) -> None:
    mesh = ProcessMesh(range(torch.distributed.get_world_size()), ("x",))
    for shape, view, call in cases:
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        try:
            plain = CALLS[call](VIEWS[view](x := whole.clone()))
        except (RuntimeError, IndexError):
            continue
        for dim in (*range(len(shape)), None):
            case = f"{shape} {view} {call} split on {dim}"
            places = [Replicate() if dim is None else Shard(dim)]
            d = dt.shard_tensor(whole, mesh, places)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dt.errors.FallbackWarning)
                mine = CALLS[call](VIEWS[view](d))
            assert torch.equal(mine.full_tensor(), plain), case
            given = [None] * mesh.size
            seen = VIEWS[view](d)
            says = seen.is_contiguous() if seen.to_local().numel() else None  # it cannot know
            torch.distributed.all_gather_object(given, says)
            assert len({*given} - {None}) <= 1, (case, given)
            if call in FALLBACKS:  # a copy, as the warning says
                continue
            try:
                mine.fill_(0)
            except RuntimeError as error:  # the same on all ranks
                assert "so a write would not reach" in str(error), case
                continue
            written = x.clone()
            CALLS[call](VIEWS[view](written)).fill_(0)
            assert torch.equal(d.full_tensor(), written), (case, d.full_tensor(), written)
