"""Bad input: the error says what, where and what to do; nothing has changed; nobody hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.nn import functional as collectives_of_nn

import disttensor as dt
from disttensor import Partial, ProcessMesh, Shard
from disttensor.comm import groups
from tests.support.layouts import S0, S1, P, R, counted, everywhere, grid, same
from tests.support.pool import on_ranks

# Layouts ------------------------------------------------------------------------------------------

BAD_PLACEMENTS = [
    ((S0,), ValueError,
        r"\[S\(0\)\] has 1 entries, but the mesh has 2 axes: give one placement per mesh axis"),
    ((S0, R, R), ValueError, r"\[S\(0\), R, R\] has 3 entries, but the mesh has 2 axes"),
    ((), ValueError, r"has 0 entries, but the mesh has 2 axes"),
    ((R, Shard(2)), ValueError,
        r"Shard\(2\) on mesh axis 1 is out of range for a tensor of 2 dims"),
    ((Shard(-3), R), ValueError, r"Shard\(-3\) on mesh axis 0 is out of range"),
    (("dp", R), TypeError,
        r"'dp' is no placement; use Shard\(dim\), Replicate\(\) or Partial\(op\)"),
    ((0, 1), TypeError, r"0 is no placement"),
    ((Shard(0, order=1), Shard(0, order=1)), ValueError, r"two axes claim one order on dim 0"),
]  # fmt: skip


@everywhere
@pytest.mark.parametrize(
    ("placements", "kind", "text"), BAD_PLACEMENTS, ids=range(len(BAD_PLACEMENTS))
)
def test_placements_that_do_not_fit(placements, kind, text):
    mesh, data = grid(), counted(4, 4)
    x = dt.shard_tensor(data, mesh)
    calls = [
        lambda: dt.shard_tensor(data, mesh, placements), lambda: dt.reshard(x, mesh, placements),
        lambda: dt.from_local(data, mesh, placements, shape=(4, 4)),
        lambda: dt.zeros(4, 4, mesh=mesh, placements=placements),
        lambda: dt.api.create.from_fn(torch.ones, mesh, placements, (4, 4)),
        lambda: dt.local_map(torch.sin, out_placements=[placements])(x),
    ]  # fmt: skip
    for call in calls:
        with dt.debugging.record_comms() as log, pytest.raises(kind, match=text):
            call()
        assert len(log) == 0
    same(x, data)


@everywhere
def test_dims_mappings_that_do_not_fit():
    mesh, data = grid(), counted(4, 4)
    for kwargs, text in [
        ({"dims_mapping": [0]}, r"dims_mapping \[0\] has 1 entries for a tensor of 2 dims"),
        ({"dims_mapping": [0, 0]}, r"mesh axis 0 is used twice"),
        ({"dims_mapping": [2, -1]}, r"the mesh has no axis 2"),
        ({"dims_mapping": [0, -1], "partial_status": {0: "sum"}}, r"mesh axis 0 is used twice"),
        ({"partial_status": {1: "median"}}, r"'median'\): no such reduction; use one of sum"),
        ({"dims_mapping": [0, -1], "placements": (S0, R)}, r"not both"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            dt.shard_tensor(data, mesh, **kwargs)
    with pytest.raises(ValueError, match=r"a 0-d tensor cannot be sharded"):
        dt.shard_tensor(1.0, mesh, (S0, R))


@everywhere
def test_reductions_without_a_meaning():
    flags, ints = torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.int64)
    for data, op in [(flags, "sum"), (flags, "avg"), (flags, "prod"), (ints, "avg")]:
        for call in (
            lambda: dt.shard_tensor(data, grid(), (Partial(op), R)),
            lambda: dt.from_local(data, grid(), (R, Partial(op)), shape=(4,)),
            lambda: dt.reshard(dt.shard_tensor(data, grid()), grid(), (R, Partial(op))),
        ):  # fmt: skip
            with pytest.raises(
                ValueError,
                match=rf"Partial\('{op}'\) of torch\.\w+ on mesh axis '(dp|tp)' "
                r"has no meaning; use ",
            ):
                call()
    same(dt.shard_tensor(ints, grid(), (P, R)), ints)
    same(dt.shard_tensor(flags, grid(), (Partial("any"), Partial("all"))), flags)
    with pytest.raises(ValueError, match="no such reduction"):
        Partial("mean")


# Meshes -------------------------------------------------------------------------------------------


@everywhere
def test_meshes_that_cannot_be():
    size = dist.get_world_size()
    for ranks, names, text in [
        ([0, 0], ("a",), r"rank 0 occurs twice"),
        ([0, size], ("a",),
            rf"ranks \[{size}\] are outside the world, which has ranks 0 to {size - 1}"),
        ([-1], ("a",), r"outside the world"),
        ([[0]], ("a",), r"2 axes need as many different names, got \('a',\)"),
        ([[0]], ("a", "a"), r"different names"), ([], ("a",), r"holds no rank"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            ProcessMesh(ranks, names)
    with pytest.raises(
        ValueError,
        match=rf"has 12 places, the world {size} processes; choose sizes whose product is {size}",
    ):
        dt.init_mesh((3, 4))
    with pytest.raises(ValueError, match=r"has no axis 'pp'; its axes are dp, tp"):
        grid()["pp"]


@on_ranks(4)
def test_a_mesh_without_this_rank_has_no_groups_here():
    mesh = ProcessMesh([0, 1], ("dp",))
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="is not in"):
            mesh["dp"]
        with pytest.raises(ValueError, match="is not in"):
            mesh.to_device_mesh()


@on_ranks(4)
def test_two_stages_in_one_call():
    """On all ranks alike: those of one mesh, of the other, and of none."""
    a, b = ProcessMesh([0, 1], ("x",)), ProcessMesh([2], ("x",))
    x, y = dt.shard_tensor(counted(4, 4), a, (S0,)), dt.shard_tensor(counted(4, 4), b)
    for call in (
        lambda: x + y, lambda: torch.cat([x, y]), lambda: x.add_(y),
        lambda: torch.linalg.solve(x, y),
        lambda: torch.nn.functional.linear(x, y),
    ):  # fmt: skip
        with pytest.raises(
            ValueError,
            match=r"f64\[4@?x?, 4\] on ProcessMesh\(x=.* and f64\[4@?x?, 4\] on ProcessMesh\(x=.*"
            r"reshard\(x, mesh, pl",
        ):
            call()


@on_ranks(4)
def test_two_meshes_in_one_call():
    x, y = (
        dt.shard_tensor(counted(4, 4), grid(), (S0, R)),
        dt.shard_tensor(counted(4, 4), ProcessMesh(range(4), ("x",)), (S0,)),
    )
    for call in (
        lambda: x + y, lambda: torch.cat([x, y]), lambda: x.add_(y), lambda: x @ y,
        lambda: torch.linalg.solve(x, y),
        lambda: torch.where(x > 0, x, y), lambda: x.copy_(y),
        lambda: torch.nn.functional.linear(x, weight=y),
    ):  # fmt: skip
        with pytest.raises(
            ValueError,
            match=r"tensors on two meshes: .*ProcessMesh\(.*=.*and .*"
            r"reshard\(x, mesh, placements\)",
        ):
            call()
    same(x, counted(4, 4))
    same(dt.reshard(x, y.process_mesh, (S0,)) + y, 2 * counted(4, 4))


# Gradients ----------------------------------------------------------------------------------------


@everywhere
def test_gradients_that_do_not_fit():
    x = dt.shard_tensor(counted(4, 4), grid(), (S0, R), requires_grad=True)
    x.sum().backward()
    for bad, kind, text in [
        (3.0, TypeError, r"a tensor or None is expected, not float"),
        (torch.ones(4), RuntimeError, r"its global shape is \[4, 4\], the gradient's \[4\]"),
        (torch.ones(4, 4), RuntimeError,
            r"its dtype is torch.float64, the gradient's torch.float32"),
        (dt.shard_tensor(torch.ones(2, 2), grid()), RuntimeError,
            r"its global shape is \[4, 4\], the gradient's \[2, 2\]"),
        (dt.shard_tensor(torch.ones(4, 4), grid()), RuntimeError,
            r"its dtype is torch.float64, the gradient's torch.float32"),
        (dt.shard_tensor(counted(4, 4), ProcessMesh(range(dist.get_world_size()), ("x",))),
            RuntimeError, r"the gradient is on ProcessMesh\(x="),
    ]:  # fmt: skip
        with pytest.raises(kind, match=re.escape("grad of f64[4@dp, 4]") + ".*" + text):
            x.grad = bad
        same(x.grad, torch.ones(4, 4, dtype=torch.float64))
    with pytest.raises(
        RuntimeError, match=r"backward of f64\[4@dp, 4\].*only for a tensor of one element"
    ):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match=r"global shape is \[4, 4\], the gradient's \[2, 2\]"):
        (x * 2).backward(torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        x.detach().sum().backward()
    y = x * 2
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        (y * y).sum().backward()
        (y * y).sum().backward()
    with pytest.raises(
        RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"
    ):
        x.add_(1)
    layer = dt.shard_module(torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4)}), grid())
    for _ in range(2):  # the second call runs in C
        with pytest.raises(
            RuntimeError,
            match=r"leaf Variable .* torch.Tensor.mul_ at .*test_errors.py:\d+ writes to a.bias\. "
            r"Write inside of `with torch.no_grad\(\):`",
        ):
            layer["a"].bias.mul_(1)
        with torch.no_grad():
            layer["a"].bias.mul_(1)
    with pytest.raises(RuntimeError, match=r"view of a leaf .* writes to a\.weight"):
        layer["a"].weight[:2].zero_()
    with pytest.raises(RuntimeError, match="input 0 was not used in the graph of the outputs"):
        torch.autograd.grad(y.detach().requires_grad_().sum(), x)
    with pytest.raises(
        RuntimeError, match="only Tensors of floating point dtype can require gradients"
    ):
        dt.shard_tensor(torch.arange(4), grid(), (S0, R)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
        x.numpy()
    maximum = dt.shard_tensor(counted(4), grid(), (Partial("max"), R))
    with pytest.raises(RuntimeError, match=r"a pending 'max' has no gradient: reduce it first"):
        dt.reshard(maximum.requires_grad_(), grid(), (R, R)).sum().backward()


# Values -------------------------------------------------------------------------------------------


@on_ranks(4)
def test_writing_to_a_view_that_had_to_be_copied():
    """A write to x.view(...) reaches x; one to a reshape is refused, because only in one process do
    strides say whether it is a view."""
    x, want = dt.shard_tensor(counted(4, 4), grid(), (S1, R)), counted(4, 4)
    for flat in (x.reshape(16), x.flatten()):
        for write in (lambda: flat.add_(1), lambda: flat.fill_(0), lambda: flat.zero_(),
                      lambda: flat.__setitem__(0, 5.0), lambda: flat.copy_(torch.zeros(16)),
                      lambda: flat.mul_(flat)):  # fmt: skip
            with pytest.raises(
                RuntimeError,
                match=r"f64\[16.*is a result of .*(reshape|flatten).*copy.*clone\(\)",
            ):
                write()
        flat.clone().add_(1)
    dt.reshard(x, grid(), (R, R)).view(16).add_(1)
    same(x, want)
    for write in (lambda t: t.view(16).add_(1), lambda t: t.view(16).__setitem__(0, 5.0),
                  lambda t: t.view(16).copy_(torch.arange(16.0)), lambda t: t[:, 1].add_(1),
                  lambda t: [v.mul_(v) for v in [t.view(16)]],
                  lambda t: t.view(2, 2, 4)[0].add_(1)):  # fmt: skip
        write(x)
        write(want)
        same(x, want)


COLLECTIVES = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x)] * dist.get_world_size(), x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "isend": lambda x: dist.isend(x, 0),
    "nn.all_reduce": lambda x: collectives_of_nn.all_reduce(x),
    "nn.all_gather": lambda x: collectives_of_nn.all_gather(x),
    "functional": lambda x: functional_collectives.all_reduce(x, "sum", dist.group.WORLD),
}


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@everywhere
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_torch_are_for_plain_tensors(name):
    """They would count a replicated value once for each rank."""
    data = counted(4, 4)
    x = dt.shard_tensor(data, grid(), [S0, R], requires_grad=True) * 2
    for given in (x, x.detach()):
        with pytest.raises(RuntimeError, match=r"a collective of torch\.distributed"):
            COLLECTIVES[name](given)
    same(x, data * 2)


@everywhere
def test_memory_that_only_one_process_has():
    x = dt.shard_tensor(counted(4, 4), grid(), (S0, R))
    leaf = dt.shard_tensor(counted(4, 4), grid(), (S0, R), requires_grad=True)
    for call, kind, text in [
        (lambda: x.resize_(2, 2), RuntimeError, "is not resized"),
        (lambda: x.set_(counted(4, 4)), TypeError, "memory and strides are those of one process"),
        (lambda: leaf.t_(), RuntimeError, "leaf"),
    ]:
        with pytest.raises(kind, match=text):
            call()
    if dist.get_world_size() > 1:
        with pytest.raises(RuntimeError, match="strides are those of the memory of one process"):
            x.t().as_strided((2, 2), (1, 4))
    same([x, leaf], [counted(4, 4)] * 2)


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@everywhere
def test_what_torch_refuses_is_refused():
    x = dt.shard_tensor(counted(4, 4), grid(), (S0, R))
    plain = counted(4, 4)
    for text in ["x.item()", "bool(x)", "int(x)", "x[9]", "x @ torch.ones(3, dtype=torch.float64)",
        "x.view(3, 5)", "x.add_(torch.ones(2, 4, 4))",
                 "len(x.sum())", "iter(x.sum())", "x.sum(7)", "x.backward()",
                 "torch.cat([x, x[0]])", "x.reshape(5)", "x + 'a'", "x.nosuch",
                 "x.expand(3, 3)", "range(x[0, 0])", "x.long().mean()", "float(x)",
                 "x.retain_grad()", "x.register_post_accumulate_grad_hook(print)",
                 "x.register_hook(print)"]:  # fmt: skip
        errors = []
        for t in (plain, x):
            try:
                eval(text, {"torch": torch, "x": t})
            except Exception as error:
                errors.append(error)
        assert len(errors) in (0, 2) and len({type(e) for e in errors}) < 2, (text, errors)
    same(x, plain)


# Ranks that disagree ------------------------------------------------------------------------------


@on_ranks(4)
def test_debug_mode_names_the_ranks_that_do_something_else():
    rank = dist.get_rank()
    x = dt.shard_tensor(counted(4, 4), grid(), (S0, R))
    with dt.debugging.compare_ranks(seconds=30):
        same(x, counted(4, 4))
        begin = time.monotonic()
        with pytest.raises(
            dt.errors.MismatchError,
            match=r"ranks disagree about the next collective over dp:\n  rank \d: all_",
        ) as error:
            dt.reshard(x, grid(), (R, R)) if rank != 2 else dt.reshard(x.sum(0), grid(), (R, R))
            raise (
                dt.errors.MismatchError(
                    "ranks disagree about the next collective over dp:\n  rank 0: all_"
                )
                if rank in (1, 3)
                else None
            )
        if rank in (0, 2):
            assert "rank 0: all_gather" in str(error.value) and "rank 2: all_reduce" in str(
                error.value
            )
            assert "test_errors.py" in str(error.value)
        assert time.monotonic() - begin < 30  # found, not waited for
    dist.barrier()
    same(x, counted(4, 4))


@pytest.mark.parametrize("call", ["all_gather", "new_group"])
@on_ranks(4)
def test_debug_mode_names_the_rank_that_never_comes(call: str):
    x = dt.shard_tensor(counted(4, 4), grid(), (S0, R))
    x.full_tensor()  # the group is there
    begin = time.monotonic()
    with dt.debugging.compare_ranks(seconds=1.0):
        if dist.get_rank() == 0:
            with pytest.raises(
                dt.errors.MismatchError,
                match=rf"rank 0 is at {call}.*test_errors.py:\d+.*"
                r"but rank 2 did not come within 1 s; its last",
            ):
                if call == "all_gather":
                    x.full_tensor()
                else:  # of a lane that nobody has used
                    groups.new_group([0, 2], ["dp"], "late")
    assert time.monotonic() - begin < 30  # not the time limit of the group
    dist.barrier()


# Starting -----------------------------------------------------------------------------------------


def started(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parent.parent)
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **env, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_half_set_environment_is_named():
    out = started("import disttensor as dt; dt.init_mesh((1,))", RANK="0", WORLD_SIZE="1")
    assert out.returncode == 1
    assert (
        "RANK, WORLD_SIZE is set, MASTER_ADDR, MASTER_PORT is not" in out.stderr
        and "torchrun" in out.stderr
    )


def test_ranks_need_a_process_group_and_an_environment_that_makes_sense():
    out = started("import disttensor as dt; dt.ProcessMesh([0, 1])")
    assert out.returncode == 1 and "call init_mesh first" in out.stderr
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    out = started("import disttensor as dt; dt.init_mesh((1,))", RANK="two", WORLD_SIZE="1", **env)
    assert out.returncode == 1 and "RANK='two'" in out.stderr
    out = started("import disttensor as dt; dt.init_mesh((1,))", RANK="3", WORLD_SIZE="2", **env)
    assert (
        out.returncode == 1
        and "RANK='3', WORLD_SIZE='2'" in out.stderr
        and "torchrun" in out.stderr
    )


def test_a_world_of_one_needs_nothing():
    code = (
        "import torch, disttensor as dt; m = dt.init_mesh((1, 1), ('dp', 'tp'));"
        "print(dt.shard_tensor(torch.arange(3), m, [dt.Shard(0), dt.Replicate()]).sum().item())"
    )
    out = started(code)
    assert out.stdout == "3\n", out.stderr
    assert "destroy_process_group" not in out.stderr
