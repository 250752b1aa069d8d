"""The results whose memory is that of an argument: the same on ranks of the mesh, on a rank off the
mesh, and in one process, for each view function and for arguments of different strides."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.pool import on_ranks

Call = Callable[[Any], Any]
# of x [4, 6], in each order of memory: a result, or the results that are written to
VIEWS: dict[str, Call] = {
    "view": lambda x: x.reshape(2, 2, 6) if not x.is_contiguous() else x.view(2, 2, 6),
    "reshape": lambda x: x.reshape(24),
    "reshape_as": lambda x: x.reshape_as(torch.ones(2, 2, 6)),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "contiguous": lambda x: x.contiguous(),
    "contiguous of a product": lambda x: (x * 1).contiguous(),
    "to": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "movedim": lambda x: x.movedim(0, 1),
    "mT": lambda x: x.mT,
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "index": lambda x: x[:, 1:4],
    "steps": lambda x: x[:, ::2],
    "list of indices": lambda x: x[:, [0, 1]],
    "mask": lambda x: x.masked_fill(x > 3, 0),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "expand": lambda x: x.expand(4, 6),
    "broadcast_to": lambda x: x.broadcast_to(4, 6),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(torch.ones(4, 6), x)[1],
    "meshgrid": lambda x: torch.meshgrid(x[:, 0], indexing="ij")[0],
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "einsum of a diagonal": lambda x: torch.einsum("ii->i", x[:, :4]),
    "einsum of a sum": lambda x: torch.einsum("ij->i", x),
    "atleast_1d": lambda x: torch.atleast_1d(x),
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "positive": lambda x: x.positive(),
    "conj": lambda x: x.conj(),
    "resolve_conj": lambda x: x.resolve_conj(),
    "real": lambda x: x.real,
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "clone": lambda x: x.clone(),
    "t_copy": lambda x: torch.t_copy(x),
    "tril": lambda x: x.tril(),
    "roll": lambda x: x.roll(1, 1),
    "cat": lambda x: torch.cat([x]),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "sum of nothing": lambda x: x[:, :, None].sum(2),
}
ORDERS: dict[str, tuple[Any, Call]] = {
    "rows": (Shard(0), lambda x: x.view(4, 6)),
    "columns": (Replicate(), lambda x: x.view(6, 4).t()),
    "part": (Replicate(), lambda x: torch.cat([x.view(4, 6)] * 2, 1)[:, 3:9]),
    "columns times 2": (Shard(0), lambda x: x.view(6, 4).t() * 2),
}


def written(order: Call, view: Call, x: Any, w: Any) -> Any:
    """Writes w, which requires grad, to a view. Returns the source."""
    source = order(x * 1)
    view(source).add_(w)
    return source


@on_ranks(3)
def test_a_write_reaches_the_same_tensors_on_all_ranks() -> None:
    """A source that the write reached requires grad."""
    mesh = dt.ProcessMesh([0, 1], ("x",))
    inside, wrong, found = mesh.coordinate is not None, [], dict[Any, Any]()
    values, one = torch.arange(24.0), torch.ones((), requires_grad=True)
    w = dt.shard_tensor(torch.ones(()), mesh, requires_grad=True)
    warnings.simplefilter("ignore")
    for (order_name, (at, order)), (name, view) in itertools.product(ORDERS.items(), VIEWS.items()):
        case, plain = (name, order_name), written(order, view, values, one)
        try:
            source = written(order, view, dt.shard_tensor(values, mesh, [at]), w)
        except RuntimeError as error:
            found[case] = None  # a copy in place of a view, for which writes are refused
            if "move" not in str(error):
                wrong.append((case, str(error)[:200]))
            continue
        found[case] = source.requires_grad
        same = not inside or torch.equal(source.full_tensor(), plain)
        if not same or found[case] != plain.requires_grad:
            wrong.append((case, same, found[case], plain.requires_grad))
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, (found, wrong))
    assert not any(wrong for _, wrong in every), "\n".join(map(str, every[0][1] + every[2][1]))
    for case in found:
        said = {ranks[case] for ranks, _ in every} - {None}
        assert len(said) < 2, (case, every[0][0][case], every[2][0][case])
