"""Arguments that torch refuses: each rank raises torch's error, also where its piece is empty or it
is not in the mesh, before anything is sent. So the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.pool import on_ranks

Call = Callable[..., Any]
# of a float [1, 3], an int64 [1, 3] and a bool [1, 3]
CALLS: dict[str, Call] = {
    # dims
    "sum twice": lambda x, i, b: x.sum((0, 0)),
    "amax twice": lambda x, i, b: x.amax((0, -2)),
    "mean twice": lambda x, i, b: x.mean((1, 1)),
    "squeeze twice": lambda x, i, b: x.squeeze((0, 0)),
    "flip twice": lambda x, i, b: x.flip(0, 0),
    "permute twice": lambda x, i, b: x.permute(0, 0),
    "movedim twice": lambda x, i, b: x.movedim((0, 0), (0, 1)),
    "var twice": lambda x, i, b: x.var((0, 0)),
    "logsumexp twice": lambda x, i, b: x.logsumexp((0, 0)),
    "norm twice": lambda x, i, b: torch.linalg.vector_norm(x, dim=(0, 0)),
    "sum": lambda x, i, b: x.sum(2),
    "max": lambda x, i, b: x.max(2),
    "argmax": lambda x, i, b: x.argmax(-3),
    "softmax": lambda x, i, b: x.softmax(2),
    "cumsum": lambda x, i, b: x.cumsum(2),
    "sort": lambda x, i, b: x.sort(2),
    "topk dim": lambda x, i, b: x.topk(1, 2),
    "transpose": lambda x, i, b: x.transpose(0, 2),
    "unsqueeze": lambda x, i, b: x.unsqueeze(4),
    "select dim": lambda x, i, b: x.select(2, 0),
    "narrow dim": lambda x, i, b: x.narrow(2, 0, 1),
    "flatten": lambda x, i, b: x.flatten(0, 2),
    "unflatten": lambda x, i, b: x.unflatten(1, (2, 2)),
    "diagonal": lambda x, i, b: x.diagonal(0, 0, 0),
    "unbind": lambda x, i, b: x.unbind(2),
    "gather dim": lambda x, i, b: x.gather(2, i),
    "index_select dim": lambda x, i, b: x.index_select(2, i[0]),
    "cat dim": lambda x, i, b: torch.cat([x, x], 2),
    "stack dim": lambda x, i, b: torch.stack([x, x], 4),
    "roll": lambda x, i, b: x.roll(1, 2),
    "glu": lambda x, i, b: F.glu(x, 1),
    # sizes
    "add": lambda x, i, b: x + x[:, :2],
    "matmul": lambda x, i, b: x @ x,
    "linear": lambda x, i, b: F.linear(x, x[:, :2]),
    "bmm": lambda x, i, b: torch.bmm(x[None], x[None]),
    "addmm": lambda x, i, b: torch.addmm(x, x, x),
    "addmm of more dims": lambda x, i, b: torch.addmm(x[None], x.t(), x),
    "einsum": lambda x, i, b: torch.einsum("ij,ij->i", x, x[:, :2]),
    "view": lambda x, i, b: x.view(2, 2),
    "reshape": lambda x, i, b: x.reshape(5),
    "two unknown sizes": lambda x, i, b: x.reshape(-1, -1),
    "expand": lambda x, i, b: x.expand(1, 4),
    "fewer dims": lambda x, i, b: x.expand(3),
    "repeat": lambda x, i, b: x.repeat(2),
    "split": lambda x, i, b: x.split([1, 1], 1),
    "chunk": lambda x, i, b: x.chunk(0),
    "tensor_split": lambda x, i, b: x.tensor_split(0),
    "cat": lambda x, i, b: torch.cat([x, x[:, :2]]),
    "stack": lambda x, i, b: torch.stack([x, x[:, :2]]),
    "where": lambda x, i, b: torch.where(b, x, x[:, :2]),
    "select": lambda x, i, b: x.select(1, 3),
    "narrow": lambda x, i, b: x.narrow(1, 2, 2),
    "index": lambda x, i, b: x[:, 3],
    "too many indices": lambda x, i, b: x[0, 0, 0],
    "topk": lambda x, i, b: x.topk(4, 1),
    "kthvalue": lambda x, i, b: x.kthvalue(4, 1),
    "unfold": lambda x, i, b: x.unfold(1, 4, 1),
    "layer_norm": lambda x, i, b: F.layer_norm(x, (2,)),
    "group_norm": lambda x, i, b: F.group_norm(x, 2),
    "mse_loss": lambda x, i, b: F.binary_cross_entropy(x, x[:, :2]),
    "cross_entropy": lambda x, i, b: F.cross_entropy(x, i),
    "conv": lambda x, i, b: F.conv1d(x[None], x[None, :, :2].expand(1, 2, 2)),
    "attention": lambda x, i, b: F.scaled_dot_product_attention(x[None], x[None, :, :2], x[None]),
    "weights of nll_loss": lambda x, i, b: F.nll_loss(x, i[:, 0], x[0, :2]),
    "weights of cross_entropy": lambda x, i, b: F.cross_entropy(x, i[:, 0], x[0, :2]),
    "bilinear": lambda x, i, b: F.bilinear(x, x, x.expand(2, 1, 3)),
    "tensordot": lambda x, i, b: torch.tensordot(x, x[:, :2], ([1], [1])),
    "multi_dot": lambda x, i, b: torch.linalg.multi_dot([x, x, x]),
    "cross": lambda x, i, b: torch.linalg.cross(x, x[:, :2]),
    "cdist": lambda x, i, b: torch.cdist(x, x[:, :2]),
    "solve": lambda x, i, b: torch.linalg.solve(x.expand(3, 3), x),
    "baddbmm": lambda x, i, b: torch.baddbmm(x[None], x[None], x[None]),
    "weights of batch_norm": lambda x, i, b: F.batch_norm(x.t(), x[0, :1], x[0, :1], x[0]),
    "max of nothing": lambda x, i, b: x[:, :0].max(1),
    "argmin of nothing": lambda x, i, b: x[:, :0].argmin(),
    "amax of nothing": lambda x, i, b: x[:, :0].amax(1),
    "aminmax of nothing": lambda x, i, b: x[:, :0].aminmax(dim=1),
    "pad": lambda x, i, b: F.pad(x, (-2, -2)),
    # dtypes
    "softmax of ints": lambda x, i, b: i.softmax(1),
    "log_softmax of ints": lambda x, i, b: i.log_softmax(1),
    "mean of ints": lambda x, i, b: i.mean(1),
    "nanmean of ints": lambda x, i, b: torch.nanmean(i, 1),
    "var of ints": lambda x, i, b: i.var(1),
    "norm of ints": lambda x, i, b: torch.linalg.vector_norm(i, dim=1),
    "layer_norm of ints": lambda x, i, b: F.layer_norm(i, (3,)),
    "gelu of ints": lambda x, i, b: F.gelu(i),
    "bits of floats": lambda x, i, b: x & x,
    "matmul of dtypes": lambda x, i, b: x @ i.t(),
    "floats in ints": lambda x, i, b: i.add_(0.5),
    "targets of int32": lambda x, i, b: F.cross_entropy(x, i[:, 0].int()),
    "embedding of floats": lambda x, i, b: F.embedding(x, x),
    "condition of floats": lambda x, i, b: torch.where(x, x, x),
    "inverse of ints": lambda x, i, b: torch.linalg.inv(i.expand(3, 3)),
    "minus of bool": lambda x, i, b: b - b,
    "logits of ints": lambda x, i, b: F.binary_cross_entropy_with_logits(i, x),
    "dropout of ints": lambda x, i, b: F.dropout(i, 2.0),
    "reduction": lambda x, i, b: F.mse_loss(x, x, reduction="max"),
}


def outcome(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passes"


@on_ranks(3)
def test_all_ranks_raise_the_same_error_of_torch() -> None:
    """One row over two ranks, and a third rank that is not in the mesh."""
    mesh = dt.ProcessMesh([0, 1], ("x",))
    values = torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3) > 0
    found, wrong = {}, []
    for at in (Shard(0), Shard(1), Replicate()):
        for name, call in CALLS.items():
            given = [dt.shard_tensor(v, mesh, [at]) for v in values]
            found[f"{name} {at}"] = outcome(lambda call=call, given=given: call(*given))
        big = dt.shard_tensor(torch.ones(5, 3), mesh, [at])
        with dt.values_everywhere():
            assert big.sum().item() == 15
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, found)
    plain = {name: outcome(lambda call=call: call(*values)) for name, call in CALLS.items()}
    for name, text in found.items():
        said = [ranks[name] for ranks in every]
        kind = plain[name.rpartition(" ")[0]].partition(":")[0]
        if len(set(said)) > 1 or text.partition(":")[0] != kind:
            wrong.append((name, kind, *said))
    assert not wrong, "\n".join(map(str, wrong))
    assert "passes" not in plain.values()
