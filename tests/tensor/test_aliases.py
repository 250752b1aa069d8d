"""Names of one memory: what is written through one of them is read through each, as in one plain
process, also where a pending sum was reduced for an earlier call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from tests.support.layouts import grid
from tests.support.oracle import line, place, randn
from tests.support.pool import fake_world, on_ranks

R, S0, P = Replicate(), Shard(0), Partial()


def _set(y: Any) -> Any:
    out = torch.empty_like(y)
    out.set_(y)
    return out


def _data_set(y: Any) -> Any:
    out = torch.empty_like(y)
    out.data = y
    return out


def _from_local(y: Any) -> Any:
    if not isinstance(y, dt.DistTensor):
        return y
    return dt.from_local(y.to_local(), y.process_mesh, y.placements, shape=y.shape)


NAMES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda y: y,
    "data": lambda y: y.data,
    "detach": lambda y: y.detach(),
    "data of detach": lambda y: y.detach().data,
    "detach of data": lambda y: y.data.detach(),
    "view": lambda y: y.view(y.shape),
    "view of data": lambda y: y.data.view(y.shape),
    "data of a view": lambda y: y[:].data,
    "set_": _set,
    "data =": _data_set,
    "view of set_": lambda y: _set(y)[:],
    "from_local": _from_local,
    "from_local of data": lambda y: _from_local(y.data),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(-2.0),
    "copy_": lambda x: x.copy_(x * 3.0 + 1.0),
    "zero_": lambda x: x.zero_(),
    "fill_ of a view": lambda x: x[1:].fill_(4.0),
    "set item": lambda x: x.__setitem__(0, -7.0),
    "addcmul out": lambda x: torch.mul(x, 0.5, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], -1.5),
    "data": lambda x: x.data.mul_(5.0),
    "plain piece": lambda x: (x.to_local() if isinstance(x, dt.DistTensor) else x).mul_(-3.0),
    "data of a plain piece": lambda x: plain(x).data.mul_(-3.0),
    "numpy": lambda x: plain(x).numpy().__imul__(-3.0),
}
READS: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "abs": lambda x: x.abs(),
    "full_tensor": lambda x: x * 1.0,
}


def plain(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, dt.DistTensor) else x


def whole(x: Any) -> Tensor:
    return x.full_tensor().clone() if isinstance(x, dt.DistTensor) else x.clone()


def seen(y: Any, write: Callable[[Any], Any], writer: str) -> list[Tensor]:
    """All names read, one written through, and all read again, twice."""
    names = {name: make(y) for name, make in NAMES.items()}
    found = []
    for x in names.values():
        found += [whole(read(x)) for read in READS.values()]
    for _ in range(2):
        write(names[writer])
        for x in names.values():
            found += [whole(read(x)) for read in READS.values()]
    return found


def compare(mesh: Any, placements: Any, writers: Any, writes: Any) -> None:
    value = torch.arange(12.0).reshape(4, 3) - 5.0
    labels = [(n, r) for _ in range(3) for n in NAMES for r in READS]
    for writer in writers:
        for how in writes:
            y = dt.shard_tensor(value.clone(), mesh, placements)
            mine = seen(y, WRITES[how], writer)
            theirs = seen(value.clone(), WRITES[how], writer)
            pairs = zip(labels, mine, theirs, strict=True)
            wrong = [label for label, a, b in pairs if not torch.equal(a, b)]
            assert not wrong, (writer, how, wrong)


def test_a_write_through_one_name_of_a_pending_sum_is_read_through_each() -> None:
    with fake_world(4):  # this rank has the value, and adds nothing to it
        compare(dt.ProcessMesh([[0, 1], [2, 3]], ("x", "y")), (P, P), NAMES, WRITES)


@pytest.mark.parametrize("placements", [(P,), (S0,), (R,)], ids=str)
@on_ranks(2)
def test_a_write_through_one_name_is_read_through_each_on_all_ranks(placements: Any) -> None:
    writers = [name for name in NAMES if "view" not in name]
    mesh = dt.ProcessMesh([0, 1], ("x",))
    compare(mesh, placements, writers, ["mul_", "zero_", "plain piece", "numpy"])


@on_ranks(2)
def test_gathered_parameters_follow_writes_through_another_name() -> None:
    mesh = dt.ProcessMesh([0, 1], ("dp",))
    x = torch.arange(6.0).reshape(2, 3)
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        plain_model, model = nn.Linear(3, 5), nn.Linear(3, 5)
        model.load_state_dict(plain_model.state_dict())
        dt.shard_data_parallel(model, mesh, shard_axis="dp", stage=stage)
        found: list[list[Tensor]] = []
        for m, given in ((plain_model, x), (model, dt.shard_tensor(x, mesh, [S0]))):
            with torch.no_grad():
                other = m.weight.detach().clone()
                m.weight.data = other
                values = [whole(m(given))]
                other.mul_(3.0)
                values.append(whole(m(given)))
                m.weight.data.add_(1.0)
                values.append(whole(m(given)))
                m.weight.mul_(0.5)
                values += [whole(m(given)), whole(other)]
            found.append(values)
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, msg=f"stage {stage}")


@on_ranks(2)
def test_an_embedding_keeps_its_values_when_the_weights_are_written_to() -> None:
    mesh = dt.ProcessMesh([0, 1], ("dp",))
    ids, scale = torch.tensor([[1, 0, 2], [2, 2, 1]]), torch.arange(1.0, 4.0)

    def run(w: Any, ids: Any, scale: Any, write: str) -> list[Tensor]:
        other = w.detach() * 2
        w.data = other
        y = nn.functional.embedding(ids, w)
        with torch.no_grad():
            other.mul_(5.0) if write == "other" else w.data.mul_(5.0)
        loss = (y * scale[:, None]).sum()
        loss.backward()
        return [whole(loss), whole(w.grad)]

    for write in ("other", "data"):
        values = torch.arange(6.0).reshape(3, 2)
        expected = run(values.clone().requires_grad_(), ids, scale, write)
        w = dt.shard_tensor(values.clone(), mesh, [R]).requires_grad_()
        split = dt.shard_tensor(scale, mesh, [S0])
        given = run(w, dt.shard_tensor(ids, mesh, [R]), split, write)
        for mine, theirs in zip(given, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@on_ranks(4)
def test_data_of_another_layout_is_refused_for_a_result_in_a_graph():
    """Autograd added up the gradient of the new piece to the shape of the old one."""
    x = place(randn(4, 4), grid(), [S0, S0]).requires_grad_()
    other = place(randn(4, 4, seed=1), grid(), [S0, R])
    h = x.exp()
    with pytest.raises(RuntimeError, match=r"expects a gradient in its layout"):
        h.data = other
    h.data = other.redistribute(placements=h.placements)
    h.detach_()
    h.data = other
    assert h.spec is other.spec


@on_ranks(2)
def test_set_is_a_write():
    for placements in ([S0], [R], [Partial()]):
        x = place(randn(4, 4), line(), placements).requires_grad_()
        with pytest.raises(RuntimeError, match=r"a leaf that requires grad"):
            x.set_(x.detach() * 2)
        h = x * 1.0
        y = h.mul(h) if placements != [Partial()] else h.detach()
        h.set_(h.detach() * 3)
        if placements != [Partial()]:  # a product of pending values reads reduced ones
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
                y.sum().backward()
        torch.testing.assert_close(h.detach().full_tensor(), randn(4, 4) * 3)
