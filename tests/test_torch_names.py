"""The names that PyTorch users know: they do what torch's own do, on the same ranks."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TheirPartial
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard
from torch.distributed.tensor import distribute_tensor as their_distribute_tensor

import disttensor as dt
from disttensor import ProcessMesh
from disttensor.core.placement import as_placement
from tests.support.layouts import S0, S1, P, R, counted, everywhere, grid, same
from tests.support.pool import on_ranks

ROOT = Path(__file__).resolve().parent.parent
PAIRS = [
    (dt.Shard(1), TheirShard(1)), (dt.Shard(-1), TheirShard(-1)), (R, TheirReplicate()),
    (P, TheirPartial()), (dt.Partial("max"), TheirPartial("max")),
    (dt.Partial("prod"), TheirPartial("product")),
]  # fmt: skip


def theirs(mesh: dt.ProcessMesh) -> DeviceMesh:
    return mesh.to_device_mesh()


def test_placements_of_torch_are_ours():
    for ours, of_torch in PAIRS:
        assert as_placement(of_torch) == ours and as_placement(ours) is ours
        for question in ("is_shard", "is_replicate", "is_partial"):
            assert getattr(ours, question)() == getattr(of_torch, question)()
    assert dt.Shard(1).is_shard(1) and not dt.Shard(1).is_shard(0)
    assert P.is_partial("sum") and not P.is_partial("max")
    assert not dt.attention.Balanced(0).is_shard() and as_placement(None) == R


@everywhere
def test_torch_meshes_and_placements_are_taken_wherever_ours_are():
    plain, mesh = counted(6, 5), theirs(grid())
    x = dt.shard_tensor(plain, mesh, [TheirShard(0), None])
    assert x.process_mesh is grid() and x.placements == (S0, R)
    same(x, plain)
    assert dt.reshard(x, mesh, [TheirReplicate(), TheirShard(1)]).placements == (R, S1)
    assert dt.zeros(4, mesh=mesh, placements=[TheirShard(0), R]).placements == (S0, R)
    local = dt.from_local(torch.ones(2, 2), mesh, [TheirShard(0), TheirPartial()])
    assert local.placements == (S0, P)
    model = dt.shard_module(nn.Linear(4, 6), mesh, {"weight": [TheirShard(0), TheirReplicate()]})
    assert model.weight.placements == (S0, R) and model.bias.placements == (R, R)
    double = dt.local_map(
        lambda t: t * 2, in_placements=[[TheirShard(0), TheirReplicate()]],
        out_placements=[TheirShard(0), TheirReplicate()], device_mesh=mesh,
    )  # fmt: skip
    same(double(x), plain * 2)
    same(double(plain), plain * 2)  # of a regular tensor, on that mesh
    loader = torch.utils.data.DataLoader(torch.arange(12.0), batch_size=4)
    (first, *_) = dt.shard_loader(loader, mesh, [TheirShard(0), TheirReplicate()])
    assert first.placements == (S0, R) and first.tolist() == [0.0, 1.0, 2.0, 3.0]
    for wrong in ([TheirShard(0)], [TheirShard(2), None], [3, None]):
        with pytest.raises((TypeError, ValueError), match="placements"):
            dt.shard_tensor(plain, mesh, wrong)


@everywhere
def test_a_mesh_answers_as_a_device_mesh():
    ours = grid()
    of_torch = init_device_mesh("cpu", ours.shape, mesh_dim_names=ours.dim_names)
    for mesh in (ours, of_torch):
        assert mesh.size() == ours.size == 4 or ours.size == mesh.size()
    for axis in (0, 1, *ours.dim_names):
        number = ours.dim_names.index(axis) if isinstance(axis, str) else axis
        assert ours.size(axis) == of_torch.size(number)
        assert ours.get_local_rank(axis) == of_torch.get_local_rank(axis)
        assert ours.get_group(axis).size() == of_torch.get_group(axis).size()
    assert ours.get_coordinate() == list(of_torch.get_coordinate())
    assert ours.get_rank() == of_torch.get_rank() and ours.mesh_dim_names == of_torch.mesh_dim_names
    flat = ours._flatten()
    assert flat.shape == (ours.size,) and flat.get_local_rank() == ours.get_rank()
    assert pickle.loads(pickle.dumps(ours.size)) == copy.copy(ours.size) == ours.size
    for call in (ours.get_local_rank, ours.get_group):
        with pytest.raises(ValueError, match="has 2 axes; name one"):
            call()


@on_ranks(4)
def test_parts_of_a_mesh_have_one_root_on_all_ranks():
    """Flattened, unflattened and joined parts of torch's mesh and of ours."""
    theirs_ = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    from_torch = ProcessMesh.from_device_mesh
    ours, whole = from_torch(theirs_), theirs_._flatten("all")._unflatten(0, (2, 2), ("a", "b"))
    full = torch.arange(4.0)
    for part, size, mesh in (
        ("dp_cp", 2, from_torch(theirs_["dp", "cp"]._flatten("dp_cp"))),
        ("dp_tp", 4, from_torch(theirs_["dp", "tp"]._flatten("dp_tp"))),
        ("cp_tp", 2, from_torch(theirs_["cp", "tp"]._flatten("cp_tp"))),
        ("a", 4, from_torch(whole)),
        ("b", 2, from_torch(whole["b"])),
        ("tp", 2, from_torch(theirs_["tp"])),
        ("dp_cp", 2, ours["dp", "cp"]._flatten()),
        ("x", 2, ours["tp"]._unflatten("tp", (2, 1), ("x", "y"))),
        ("dp", 4, ours._unflatten(1, (1, 1), ("x", "y"))),
    ):
        assert mesh.dim_names[0] == part and mesh.size == size and mesh.root.size == 4
        roots: list[Any] = [None] * 4
        dist.all_gather_object(roots, repr(mesh.root))
        assert len(set(roots)) == 1, roots
        how = [S0, *[R] * (mesh.ndim - 1)]
        x = dt.shard_tensor(full, mesh, how, src_rank=0)
        assert x.sum().item() == 6.0
        same(dt.reshard(x, ours, [S0, R, R]), full)
        assert mesh.get_group(mesh_dim=0).size() == mesh.shape[0]
    with pytest.raises(ValueError, match=r"mesh_sizes=\[3, 1\] of axis 'tp'.*has to be 2"):
        ours._unflatten("tp", (3, 1), ("x", "y"))


@everywhere
def test_redistribute_and_distribute_tensor_are_those_of_torch():
    plain, mesh = counted(5, 3), grid()
    for source in (0, 1, None) if mesh.size > 1 else (0, None):
        mine = plain if source is None or mesh.get_coordinate() == [source] * 2 else plain * 0
        x = dt.distribute_tensor(mine, mesh, [S0, S1], src_data_rank=source)
        assert x.placements == (S0, S1)
        same(x, plain)
    y = their_distribute_tensor(plain, theirs(mesh), [TheirShard(0), TheirShard(1)])
    for wanted in ([R, R], [R, S0], [S1, S0]):
        expected = y.redistribute(placements=dt_to_torch(wanted))
        out = x.redistribute(placements=wanted)
        assert isinstance(expected, DTensor) and out.placements == tuple(wanted)
        same(out.to_local(), x.redistribute(mesh, wanted).to_local())
        same(out, plain)
    leaf = dt.shard_tensor(plain, mesh, [S0, R], requires_grad=True)
    (leaf.redistribute(theirs(mesh), [R, S1]) * plain).sum().backward()
    same(leaf.grad, plain)
    with pytest.raises(TypeError, match=r"redistribute: device_mesh"):
        x.redistribute("mesh", [R, R])
    with pytest.raises(ValueError, match=r"src_data_rank=2: .* an axis of \d rank"):
        dt.distribute_tensor(plain, mesh, [S0, R], src_data_rank=2)


def dt_to_torch(placements):
    return [TheirShard(p.dim) if p.is_shard() else TheirReplicate() for p in placements]


@everywhere
def test_gradients_of_locals_have_the_placements_that_are_asked_for():
    plain, mesh = counted(4, 3), grid()
    rank = 1.0 + mesh.get_rank()
    w = dt.shard_tensor(plain, mesh, [R, S0], requires_grad=True)
    (w.to_local(grad_placements=[TheirPartial(), TheirShard(0)]) * rank).sum().backward()
    by_hand = dt.shard_tensor(plain, mesh, [R, S0], requires_grad=True)
    (by_hand.to_local(grad_axes=0) * rank).sum().backward()
    same(w.grad, by_hand.grad.full_tensor())
    for wrong in ([S0, S0], [R, P], [R, R]):
        with pytest.raises(ValueError, match="to_local: grad_placements"):
            w.to_local(grad_placements=wrong)


def summed(x: torch.Tensor, mesh: dt.ProcessMesh, axis: int) -> torch.Tensor:
    """The sum of ``x`` over an axis of the mesh."""
    out = x.clone()
    if mesh.shape[axis] > 1:
        torch.distributed.all_reduce(out, group=mesh.get_group(axis))
    return out


@everywhere
def test_the_gradient_of_a_piece_has_the_placements_that_are_asked_for():
    mesh, full = grid(), counted(4, 3)
    piece = full.tensor_split(mesh.shape[1])[mesh.get_local_rank("tp")]
    for placed in ([R, S0], [P, S0]):
        mine, their_piece = (piece.clone().requires_grad_() for _ in range(2))
        x = dt.from_local(mine, mesh, [R, S0], shape=(4, 3), grad_placements=placed)
        (x * x).sum().backward()
        y = DTensor.from_local(
            their_piece, theirs(mesh), [TheirReplicate(), TheirShard(0)],
            grad_placements=[TheirReplicate() if placed[0] == R else TheirPartial(), TheirShard(0)],
        )  # fmt: skip
        (y * y).sum().backward()
        grads = mine.grad, their_piece.grad
        if placed[0] == P:
            same(*(summed(g, mesh, 0) for g in grads))
            assert not mesh.get_local_rank("dp") or not torch.equal(mine.grad, 2 * piece)
        else:
            same(*grads)
            assert torch.equal(mine.grad, 2 * piece)
    for wrong in ([S0, S0], [R, P], [R, R]):
        with pytest.raises(ValueError, match="from_local: grad_placements"):
            dt.from_local(piece, mesh, [R, S0], shape=(4, 3), grad_placements=wrong)


@everywhere
def test_the_gradient_of_a_full_tensor_has_the_placements_that_are_asked_for():
    mesh, full = grid(), counted(4, 3)
    rank = 1.0 + mesh.get_rank()
    w = dt.shard_tensor(full, mesh, [R, S0], requires_grad=True)
    (w.full_tensor(grad_placements=[TheirPartial(), TheirPartial()]) * rank).sum().backward()
    total = sum(1.0 + r for r in range(mesh.size))
    same(w.grad, torch.full((4, 3), total, dtype=torch.float64))
    with pytest.raises(ValueError, match="full_tensor: grad_placements"):
        w.full_tensor(grad_placements=[S0, R])
    with pytest.raises(ValueError, match="full_tensor: everywhere=True and grad_placements"):
        w.full_tensor(everywhere=True, grad_placements=[P, P])


@everywhere
def test_the_norm_of_clipping_may_be_asked_for_its_full_tensor():
    w = dt.shard_tensor(counted(4, 3), grid(), [R, S0], requires_grad=True)
    w.sum().backward()
    norm = dt.clip_grad_norm_([w], 1.0)
    assert norm.full_tensor().data_ptr() == norm.data_ptr() and type(norm) is torch.Tensor
    for read in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        same(read, torch.tensor(12.0, dtype=torch.float64).sqrt())


@everywhere
def test_numbers_of_factories_do_not_depend_on_placements():
    mesh, found = grid(), []
    for placements in ([R, R], [S0, R], [S1, S0], [dt.attention.Balanced(0), R]):
        dt.manual_seed(7)
        x = dt.randint(3, 50, (5, 4), mesh=mesh, placements=placements)
        assert x.dtype == torch.int64 and x.placements == tuple(placements)
        found.append(x.tolist())
        assert all(3 <= n < 50 for row in found[-1] for n in row)
        a = dt.arange(1, 9, 2, mesh=mesh, placements=[S0, R])
        assert a.tolist() == [1, 3, 5, 7] and a.placements == (S0, R)
    assert all(f == found[0] for f in found) and len({n for row in found[0] for n in row}) > 5
    assert dt.arange(5.0, mesh=mesh, requires_grad=True).requires_grad
    with pytest.raises(ValueError, match="low=3, high=3"):
        dt.randint(3, 3, (2,), mesh=mesh)


@everywhere
def test_fully_shard_and_replicate_train_as_one_process():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    rows = counted(8, 4).sin().float()
    line = dt.init_mesh((grid().size,), ("dp",))
    models = {
        "shards": (dt.fully_shard, line, [S0]),
        "torch's mesh": (dt.fully_shard, theirs(line), [S0]),
        "HSDP": (dt.fully_shard, grid(), [S0, S0]),
        "replicas": (dt.replicate, line, [S0]),
    }
    for wrap, mesh, placements in models.values():
        expected, model = copy.deepcopy(plain), wrap(copy.deepcopy(plain), mesh=mesh)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (expected, model)]
        for _ in range(3):
            batch = dt.shard_tensor(rows, mesh, placements)
            losses = [
                F.mse_loss(expected(rows), rows[:, :2]),
                F.mse_loss(model(batch), batch[:, :2]),
            ]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            same(losses[1], losses[0])
        for key, value in expected.state_dict().items():
            same(model.state_dict()[key], value)
        for again in (model, model[0]):
            with pytest.raises(ValueError, match="sharded already"):
                wrap(again, mesh=mesh)
    with pytest.raises(ValueError, match="at most 1 are expected"):
        dt.replicate(copy.deepcopy(plain), mesh=grid())


@on_ranks(2)
def test_redistribute_sends_and_returns_the_dtypes_of_torch():
    """Between all pairs of layouts, used as it is and with pieces; twice differentiated."""
    mesh = dt.init_mesh((2,), ("d",))
    plain = counted(5, 3).sin().float()
    wide, narrow = torch.float64, torch.bfloat16
    for forward, backward in ((None, wide), (narrow, None), (narrow, wide), (wide, narrow)):
        dtypes = {"forward_dtype": forward, "backward_dtype": backward}
        for src, to in itertools.product(([R], [S0], [S1], [P]), repeat=2):
            if to == [P]:
                continue
            x = dt.reshard(dt.shard_tensor(plain, mesh), mesh, src).detach().requires_grad_()
            y = their_distribute_tensor(plain, theirs(mesh), [TheirReplicate()])
            y = y.redistribute(placements=dt_to_torch(src)).detach().requires_grad_()
            out, expected = (
                t.redistribute(placements=how, **dtypes)
                for t, how in ((x, to), (y, dt_to_torch(to)))
            )
            assert out.dtype is expected.dtype
            same(out, expected.full_tensor())
            rows = dt.shard_tensor(torch.ones(4, 5, dtype=out.dtype), mesh, [S0])
            with dt.debugging.record_comms() as log:
                (grad,) = torch.autograd.grad((rows @ out).sum(), x, create_graph=True)
            sent = {r.dtype for r in log.records}
            # the product would gather other layouts itself; a leaf adds up without messages
            assert to != [R] or sent <= {backward or x.dtype}, (src, to, dtypes, sent)
            if to == [R] and (src == [S0] or (src == [R] and backward is not None)):
                assert sent, (src, dtypes)
            assert grad.dtype is x.dtype
            same(grad.detach(), torch.full((5, 3), 4.0))
            (out.double() ** 2).sum().backward()
            assert x.grad.dtype is x.dtype
            tolerance = 0.02 if narrow in (forward, backward) else 1e-6
            torch.testing.assert_close(x.grad.full_tensor(), 2 * plain, rtol=tolerance, atol=1e-6)
    with pytest.raises(NotImplementedError, match="within a mesh"):
        x.redistribute(dt.ProcessMesh([0]), [R], forward_dtype=narrow)


@everywhere
def test_from_local_without_a_check_sends_nothing():
    mesh = grid()
    for placements, shape in (([S0, S1], (2, 3)), ([S0, S0], (2, 3)), ([P, R], (4, 1))):
        local = torch.ones(shape) * (1 + mesh.get_rank())
        expected = dt.from_local(local, mesh, placements)
        with dt.debugging.record_comms() as log:
            x = dt.from_local(local, mesh, placements, run_check=False)
        assert not log.records and x.spec is expected.spec
        same(x, expected.full_tensor())
    outside = dt.ProcessMesh([mesh.size - 1], ("alone",))
    assert dt.from_local(torch.ones(3, 2), outside, [S0], run_check=False).shape == (3, 2)
    if mesh.size > 1:
        with (
            dt.debugging.compare_ranks(),
            pytest.raises(ValueError, match="the pieces do not form"),
        ):
            uneven = torch.ones(1 + mesh.get_local_rank("dp"), 3)
            dt.from_local(uneven, mesh, [S0, R], run_check=False)


def test_local_map_takes_placements_by_name_because_torchs_order_is_another():
    with pytest.raises(TypeError, match="takes 1 positional argument but 3"):
        dt.local_map(lambda t: t * 2, [[S0, R]], [S0, R])


FIRST_CALLS = """
import torch, disttensor as dt
x = dt.distribute_tensor(torch.arange(4.0), None, [dt.Shard(0)])
model = dt.fully_shard(torch.nn.Linear(4, 4))
print(f"{x.device_mesh.size()} {model.weight.placements}")
"""


@pytest.mark.limit(120)
def test_without_a_mesh_the_first_call_starts_the_process_group(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(FIRST_CALLS)
    done = subprocess.run(
        [sys.executable, "-m", "disttensor.run", "--nproc", "2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "2 (Shard(0),)" in done.stdout, done.stdout + done.stderr


def test_errors_have_one_base_class():
    for name in set(dt.errors.__all__) - {"FallbackWarning", "PieceWarning"}:
        assert issubclass(getattr(dt.errors, name), dt.errors.DistTensorError)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 6)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.tokens(x))
        return h + self.down(F.gelu(self.up(h)))


@everywhere
def test_styles_of_parallelize_module_are_values_of_a_plan():
    from torch.distributed.tensor import parallel

    torch.manual_seed(0)
    plain, numbers = Block().double(), torch.arange(8).reshape(2, 4)
    plan = {
        "tokens": parallel.RowwiseParallel(input_layouts=TheirReplicate()),
        "up": parallel.ColwiseParallel(),
        "down": parallel.RowwiseParallel(),
        "norm": parallel.SequenceParallel(),
        "": parallel.PrepareModuleInput(
            input_layouts=TheirReplicate(), desired_input_layouts=TheirReplicate()
        ),
    }
    mesh = grid()
    model = dt.shard_module(copy.deepcopy(plain), mesh, plan)
    where = {name: p.placements for name, p in model.named_parameters()}
    assert where == {
        "tokens.weight": (R, S0), "norm.weight": (R, R), "norm.bias": (R, R),
        "up.weight": (R, S0), "up.bias": (R, S0), "down.weight": (R, S1), "down.bias": (R, R),
    }  # fmt: skip
    y = model(dt.shard_tensor(numbers, mesh, [S0, R]))
    expected = plain(numbers)
    same(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        same(p.grad, q.grad)
    with pytest.raises(TypeError, match=r"'norm'.* splits nn.Linear and nn.Embedding"):
        dt.shard_module(copy.deepcopy(plain), mesh, {"norm": parallel.ColwiseParallel()})
    unnamed = dt.ProcessMesh(mesh.mesh, ("a", "b"))
    with pytest.raises(ValueError, match=r"'up'.*no axis is named 'tp'"):
        dt.shard_module(copy.deepcopy(plain), unnamed, {"up": parallel.ColwiseParallel()})
