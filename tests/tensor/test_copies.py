"""Copies keep what copies of torch keep: the attributes of the user, gradients, and shared memory.
A pickle of a piece warns when it is made."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor import errors
from tests.support import oracle
from tests.support.layouts import S0, S1, P, R, counted, everywhere, grid
from tests.support.pool import on_ranks

PIECES = pytest.mark.filterwarnings("ignore::disttensor.errors.PieceWarning")
Make = Callable[..., Any]


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def made(kind: str, make: Make) -> Any:
    """Returns a tensor of a kind, with an attribute of the user."""
    x = make(5, 4)
    if kind == "parameter":
        x = nn.Parameter(x)
    elif kind != "plain":
        x.requires_grad_()
    if kind in ("parameter", "leaf"):
        (x * x).sum().backward()
    if kind == "hooked":
        x.register_hook(lambda g: g)
    x = x.detach() if kind == "alias" else x * 2 if kind == "result" else x
    x.note, x.more = ["a"], {"b": 1}
    return x


def facts(kind: str, way: Any, make: Make) -> Any:
    """Returns what a program can see of a copy."""
    x = made(kind, make)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            y = way(x)
        except RuntimeError as error:
            return str(error)[:40]
    seen: list[Any] = [sum("hook" in str(w.message) for w in said)]
    seen += [getattr(y, "note", None), getattr(y, "more", None)]
    seen += [hasattr(y, "note") and y.note is x.note, isinstance(y, nn.Parameter)]
    seen += [y.requires_grad, y.is_leaf, y.shape, y.stride(), y.dtype, y.grad]
    with torch.no_grad():
        y.fill_(7)
    return [*seen, y, x.detach()]


@PIECES
@everywhere
def test_a_copy_has_what_torch_keeps() -> None:
    for way in (copy.copy, copy.deepcopy, pickled, saved):
        for kind in ("plain", "leaf", "parameter", "alias", "result", "hooked"):
            expected = facts(kind, way, counted)
            for layout in [(R, R), (S1, S0), (P, S0)]:
                ours = facts(kind, way, functools.partial(sharded, layout))
                compare(ours, expected, f"{way.__name__} {kind} {layout}")


def sharded(layout: Any, *shape: int) -> Any:
    return oracle.place(counted(*shape), grid(), layout)


def compare(ours: Any, expected: Any, where: str) -> None:
    """Compares facts; tensors by their values."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(ours.full_tensor(), expected), where
    elif isinstance(expected, (list, tuple)):
        assert len(ours) == len(expected), where
        for one, other in zip(ours, expected, strict=True):
            compare(one, other, where)
    else:
        assert ours == expected, where


# Memory that tensors share ------------------------------------------------------------------------

Two = Callable[[Make], tuple[Any, Any]]


def with_gradient(make: Make) -> tuple[Any, Any]:
    x = make(5, 4).requires_grad_()
    (x * x).sum().backward()
    return x, x.grad


def of_module(make: Make) -> tuple[Any, Any]:
    module = nn.Module()
    module.register_buffer("a", make(5, 4))
    module.register_buffer("b", module.a.T)
    module.register_parameter("c", nn.Parameter(module.a))
    return module, ()


def _view(take: Callable[[Any], Any]) -> Two:
    def two(make: Make) -> tuple[Any, Any]:
        x = make(5, 4)
        return x, take(x)

    return two


SHARING: dict[str, Two] = {
    "transpose": _view(lambda x: x.T),
    "detach": _view(lambda x: x.detach()),
    "unsqueeze": _view(lambda x: x.unsqueeze(0)),
    "column": _view(lambda x: x[:, 1]),
    "rows": _view(lambda x: x[1:4]),
    "flat": _view(lambda x: x.view(-1)),
    "shallow": _view(copy.copy),
    "clone": _view(lambda x: x.clone()),
    "parameter": _view(nn.Parameter),
    "gradient": with_gradient,
    "module": of_module,
}


def after_writes(two: Two, reverse: bool, make: Make) -> Any:
    """Returns the values of copies after a write to the first, and after a write to the second."""
    found: list[Any] = []
    for at in (0, 1):
        pair = two(make)
        copies = copy.deepcopy(pair[::-1] if reverse else pair)
        copies = copies[::-1] if reverse else copies
        if isinstance(copies[0], nn.Module):
            copies = (copies[0].a, copies[0].b, copies[0].c)
        with torch.no_grad():
            try:
                copies[at].fill_(7)
                found += [*[t.detach().clone() for t in copies], copies[0].grad is copies[1]]
            except RuntimeError as error:
                assert "had to move data" in str(error)
                found.append(None)
    return found


@everywhere
def test_a_deepcopy_shares_the_memory_that_its_sources_share() -> None:
    """A copy in place of a view, whose data had to be moved, raises an error after a write to its
    source, or at a write to itself, on all ranks."""
    for name, two in SHARING.items():
        for reverse in (False, True):
            expected = after_writes(two, reverse, counted)
            for layout in [(R, R), (S1, S0), (P, R)]:
                make = functools.partial(sharded, layout)
                ours, where = after_writes(two, reverse, make), f"{name} {reverse} {layout}"
                if None in ours:
                    assert dist.get_world_size() > 1 and name in ("rows", "flat", "column"), where
                else:
                    compare(ours, expected, where)


@on_ranks(2)
def test_a_moved_view_that_is_copied_alone_can_be_written_to() -> None:
    x = oracle.place(counted(3, 2), oracle.line(), [S0])
    y = copy.deepcopy(x.view(-1))
    y.fill_(7)
    assert torch.equal(y.full_tensor(), torch.full((6,), 7.0, dtype=torch.float64))
    assert torch.equal(x.full_tensor(), counted(3, 2))


@PIECES
@everywhere
def test_a_saved_view_shares_memory_with_its_base() -> None:
    x = oracle.place(counted(5, 4), grid(), (S0, R))
    a, b, c = saved([x, x[:, 1:], nn.Parameter(x)])
    a.fill_(7)
    assert torch.equal(b.full_tensor(), torch.full((5, 3), 7.0, dtype=torch.float64))
    assert torch.equal(c.full_tensor(), torch.full((5, 4), 7.0, dtype=torch.float64))


@on_ranks(2)
def test_a_copy_of_a_gradient_in_a_bucket_is_no_larger_than_the_gradient() -> None:
    mesh = dt.ProcessMesh([0, 1], ("fsdp",))
    net = dt.shard_data_parallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), mesh)
    net(oracle.place(torch.ones(4, 8), mesh, [S0])).sum().backward()
    assert any(p.grad.local.untyped_storage().nbytes() > p.grad.nbytes for p in net.parameters())
    for p in net.parameters():
        grad = copy.deepcopy(p.grad)
        assert grad.local.untyped_storage().nbytes() == grad.local.nbytes
        assert torch.equal(grad.full_tensor(), p.grad.full_tensor())


# Pickles of pieces --------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize("way", [pickle.dumps, saved], ids=["pickle", "save"])
def test_a_pickle_of_a_piece_warns_when_it_is_made_on_one_rank(way: Any) -> None:
    """Of a split or pending tensor, in a state dict, and off the mesh; a whole value does not."""
    everyone, part = oracle.line(), dt.ProcessMesh([1, 2], ("x",))
    full = counted(4)
    pieces = [oracle.place(full, everyone, [layout]) for layout in (S0, P)]
    pieces += [oracle.place(full, part, [S0]), {"a": {"b": nn.Parameter(pieces[0])}}]
    for rank in range(3):
        for number, value in enumerate(pieces):
            if dist.get_rank() == rank:
                errors.warned.clear()
                with pytest.warns(errors.PieceWarning, match=f"rank {rank} pickles.*Checkpointer"):
                    way(value)
            del number
        if dist.get_rank() == rank:  # nothing is sent
            way([oracle.place(full, everyone, [R]).detach(), full])
            if rank == 0:
                with pytest.warns(errors.PieceWarning, match="off the mesh"):
                    errors.warned.clear()
                    way(dt.ones(4, mesh=part))
    dist.barrier()


@on_ranks(2)
def test_a_line_that_pickles_pieces_warns_once() -> None:
    x = oracle.place(counted(5), oracle.line(), [S0])
    errors.warned.clear()
    with pytest.warns(errors.PieceWarning) as said:
        for _ in range(3):
            pickle.dumps([x, x + 1])
    assert len(said) == 1
