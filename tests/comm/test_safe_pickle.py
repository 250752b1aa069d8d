"""Facts that ranks send to each other name listed classes only: a message runs no code."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import disttensor as dt
from disttensor import pipeline
from disttensor.comm import agree, groups, objects, safe_pickle
from disttensor.core.placement import Placement
from tests.support import oracle
from tests.support.layouts import S0, P, R, counted
from tests.support.pool import on_ranks


class Own:
    """A class of the user."""


class Mine(dt.Shard):
    """A placement of the user."""


class Failed(Exception):
    """An error of the user."""


class Harm:
    """Unpickles by running code."""

    def __reduce__(self) -> Any:
        return exec, ("import torch; torch._harmed = True",)


def only_listed(f: Callable[[], Any]) -> Any:
    """Runs f while pickles of any class cannot be read."""

    def loads(data: bytes) -> Any:
        raise AssertionError("a message is read as a pickle of any class")

    usual = safe_pickle.pickle
    safe_pickle.pickle = types.SimpleNamespace(  # type: ignore[assignment]
        loads=loads, UnpicklingError=pickle.UnpicklingError
    )
    try:
        return f()
    finally:
        safe_pickle.pickle = usual


def stage() -> dt.ProcessMesh:
    return dt.ProcessMesh([0, 1], ("x",))


def entries() -> None:
    mesh = oracle.line()
    dt.from_local(torch.ones(2, 3), mesh, [S0])
    dt.from_local(torch.ones(2, 3), stage(), [S0])
    dt.shard_tensor(counted(5), mesh, [S0], src_rank=0)
    x = dt.shard_tensor(counted(5), mesh, [R], check=True).requires_grad_()
    x.register_hook(lambda g: g)
    scaler = torch.amp.GradScaler("cpu")
    dt.optim.shard_scaler(scaler)
    agree.agree("test", groups.world_group(), own=(1, None), dtype=torch.bfloat16, at=slice(2))


def looks() -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        x = oracle.place(torch.ones(2, 3).to(dtype), stage(), [S0])
        found = dt.debugging.pieces(x)
        assert [None if t is None else (t.dtype, t.shape) for t in found] == [
            (dtype, (1, 3)), (dtype, (1, 3)), None,
        ]  # fmt: skip
    net = dt.shard_module(nn.Linear(3, 2), oracle.line())
    dt.debugging.check_replicas(net)
    w = dt.ones(3, mesh=oracle.line(), requires_grad=True)
    with pipeline.record() as recorded:
        pipeline.run(lambda x: (w * x).sum(), [1.0, 2.0])
    assert recorded.timeline().ranks


def sent_results() -> None:
    """Shapes that depend on data, errors, and the placements of a user, on a rank off the mesh."""
    x = oracle.place(torch.tensor([0.0, 2.0, 3.0]), stage(), [R])
    assert torch.nonzero(x).shape == (2, 1)
    y = dt.from_local(torch.ones(2, 2), stage(), [Mine(1)], shape=(2, 4))
    assert y.placements == (Mine(1),)
    with pytest.raises((IndexError, RuntimeError)):
        torch.nonzero(x)[5]
    for error in (Failed("a"), KeyError("k"), dt.errors.MismatchError("m"), OSError(2, "no", "f")):
        with pytest.raises(type(error)) as raised:
            if dist.get_rank() < 2:
                with objects.send_errors([0, 1], torch.device("cpu")):
                    raise error
            objects.recv_object([0, 1], torch.device("cpu"))
        assert raised.value.args == error.args


def checkpoint(folder: str) -> None:
    net = dt.shard_data_parallel(nn.Linear(5, 3), dt.ProcessMesh(range(3), ("fsdp",)))
    adam = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 5)).sum().backward()
    adam.step()
    kept = dt.Checkpointer(folder)
    state = {"model": net, "optimizer": adam, "notes": {"lr": 0.1, "of": [1, "a"]}}
    kept.save(1, **state)
    kept.save(2, background=True, **state)
    assert kept.load(**state) == 2
    with pytest.raises(ValueError, match="no complete checkpoint"):
        kept.load(7, **state)


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@on_ranks(3)
def test_no_message_of_ours_is_a_pickle_of_any_class(tmp_path: Path) -> None:
    for program in (entries, looks, sent_results):
        only_listed(program)
    only_listed(lambda: checkpoint(str(tmp_path)))


@on_ranks(3)
def test_a_message_that_names_other_classes_is_refused_on_all_ranks() -> None:
    world, rank = groups.world_group(), dist.get_rank()
    for harm in (Harm(), Own(), print, [{"a": Harm()}]):
        for culprit in (0, 2):
            with pytest.raises(pickle.UnpicklingError, match="which is not on the list"):
                objects.gather_objects(harm if rank == culprit else 1, world)
        with pytest.raises(pickle.UnpicklingError, match="which is not on the list"):
            if rank < 2:
                objects.send_object(harm, [0, 1], torch.device("cpu"))
            else:
                objects.recv_object([0, 1], torch.device("cpu"))
    assert not hasattr(torch, "_harmed")
    assert objects.gather_objects(rank, world) == [0, 1, 2]  # the ranks are in step


@on_ranks(3)
def test_objects_of_the_user_are_sent_where_they_are_expected() -> None:
    world = groups.world_group()
    found = objects.gather_objects(Own() if dist.get_rank() else 1, world, any_class=True)
    assert [type(x) for x in found] == [int, Own, Own]
    split = dt.local_map(lambda x: (x, Own()), in_placements=[[S0]], out_placements=[[S0], None])
    assert type(split(oracle.place(counted(4), stage(), [S0]))[1]) is Own


def test_a_placement_is_named_by_its_base_class() -> None:
    assert safe_pickle.loads(pickle.dumps([Mine(0), P])) == [Mine(0), P]
    assert issubclass(Mine, Placement | dt.Shard)


def test_a_class_that_another_thread_pickles_for_the_first_time_is_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``pickle`` notes the slots of a class in the class."""
    data, find = pickle.dumps(MetadataIndex("x")), safe_pickle.SafeUnpickler.find_class
    del MetadataIndex.__slotnames__  # type: ignore[attr-defined]

    def found(self: Any, module: str, name: str) -> Any:
        kind = find(self, module, name)
        pickle.dumps(MetadataIndex("y"))
        return kind

    monkeypatch.setattr(safe_pickle.SafeUnpickler, "find_class", found)
    assert safe_pickle.loads(data) == MetadataIndex("x")
