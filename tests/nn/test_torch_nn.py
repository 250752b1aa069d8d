"""torch's own layers, unmodified: loss and gradients on a mesh are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import disttensor as dt
from tests.support.models.case import Case, check
from tests.support.models.torch_nn import CASES
from tests.support.pool import on_ranks


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("axis", ["dp", "tp"])
@on_ranks(2)
def test_two_ranks(case: Case, axis: str) -> None:
    check(case, dt.ProcessMesh([0, 1], (axis,)))


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(4)
def test_dp_x_tp(case: Case) -> None:
    check(case, dt.ProcessMesh([[0, 1], [2, 3]], ("dp", "tp")))


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith(("lstm", "gru"))], ids=str)
@on_ranks(2)
def test_recurrent_networks_send_nothing_for_a_split_batch(case: Case) -> None:
    log = check(case, dt.ProcessMesh([0, 1], ("dp",)))
    assert not len(log), str(log)


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@on_ranks(2)
def test_packed_sequences_are_those_of_one_process(kind: Any) -> None:
    mesh = dt.ProcessMesh([0, 1], ("dp",))
    whole = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([3, 5, 7, 2, 1])

    def program(net: Any, x: Any, lengths: Any, ordered: bool) -> list[Any]:
        if ordered:  # the longest first
            lengths, order = lengths.sort(descending=True)
            x = x[order]
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=ordered)
        out, state = net(packed)
        padded, sizes = rnn.pad_packed_sequence(out, batch_first=True)
        last = state[0] if isinstance(state, tuple) else state
        (padded.square().sum() + last.sum()).backward()
        return [padded, last, sizes]

    for ordered, bidirectional in ((True, False), (False, True)):
        torch.manual_seed(1)
        net = kind(4, 3, batch_first=True, num_layers=2, bidirectional=bidirectional)
        plain = whole.clone().requires_grad_()
        want = [*program(net, plain, lengths, ordered), plain.grad]
        grads = {name: p.grad for name, p in net.named_parameters()}
        for placement in (dt.Replicate(), dt.Shard(0), dt.Shard(1)):
            net.zero_grad()
            twin = dt.shard_module(copy.deepcopy(net), mesh)
            x = dt.shard_tensor(whole, mesh, [placement]).requires_grad_()
            got = [*program(twin, x, lengths, ordered), x.grad]
            for mine, one in zip(got, want, strict=True):
                full = mine.full_tensor() if isinstance(mine, dt.DistTensor) else mine
                torch.testing.assert_close(full.detach(), one.detach())
            for name, p in twin.named_parameters():
                torch.testing.assert_close(p.grad.full_tensor(), grads[name])


@on_ranks(2)
def test_a_large_gru_on_a_split_batch() -> None:
    """Torch's kernel crashes if the rows of a weight are fewer than its three gates."""
    net, whole = nn.GRU(160, 160, batch_first=True), torch.randn(3, 2, 160)
    want, _ = net(whole)
    mesh = dt.ProcessMesh([0, 1], ("dp",))
    got, _ = dt.shard_module(net, mesh)(dt.shard_tensor(whole, mesh, [dt.Shard(0)]))
    torch.testing.assert_close(got.full_tensor(), want)
