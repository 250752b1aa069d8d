"""Sub-meshes, ``mesh["tp"]``: another group of ranks on each rank, and one program all the same."""

from __future__ import annotations

import copy
import math
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from tests.support.layouts import same
from tests.support.oracle import fallbacks, randint, randn
from tests.support.pool import fake_world, on_ranks

R, S, P = Replicate(), Shard, Partial()
NAMES = ("dp", "tp")
SHAPES = [(2, 2), (1, 4), (4, 1)]


def mesh_of(shape) -> ProcessMesh:
    return dt.init_mesh(shape, NAMES)


def leaves_on(mesh):
    """(plain, ours): parameters on both sub-meshes and on the whole, with gradients."""
    plain, ours = [], []
    kinds = [(mesh["tp"], [S(0)]), (mesh["dp"], [S(1)]), (mesh["tp"], [R]), (mesh["dp"], [R])]
    kinds += [(mesh, [S(0), R]), (mesh["dp"], [S(0)])]
    for i, (on, placements) in enumerate(kinds):
        full, x = randn(5, 3, seed=i), randn(7, 5, seed=i + 20)
        plain.append(full.clone().requires_grad_())
        ours.append(dt.shard_tensor(full, on, placements, requires_grad=True))
        # a split batch: the gradient is pending
        batch = dt.shard_tensor(x, on, [S(0)] * on.ndim)
        for w, data in ((plain[-1], x), (ours[-1], batch)):
            (data @ w).square().sum().backward()
    return plain, ours


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(4)
def test_clipping_counts_a_parameter_of_a_sub_mesh_once(shape):
    mesh = mesh_of(shape)
    for order in (2.0, 1.0, 0.0, math.inf, -math.inf):
        for some in (slice(None), slice(0, 1), slice(0, 4), slice(1, 2), slice(2, 3)):
            plain, ours = leaves_on(mesh)
            norm = dt.clip_grad_norm_(ours[some], 0.1, order)
            want = nn.utils.clip_grad_norm_(plain[some], 0.1, order)
            torch.testing.assert_close(norm, want, rtol=1e-9, atol=0)
            same([w.grad for w in ours], [w.grad for w in plain])
            got = nn.utils.get_total_norm([w.grad for w in ours[some]], order)
            want = nn.utils.get_total_norm([w.grad for w in plain[some]], order)
            same(got, want)


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(4)
def test_optimizers_and_scalers_over_sub_meshes(shape):
    mesh = mesh_of(shape)
    for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        plain, ours = leaves_on(mesh)
        for leaves in (plain, ours):
            adam = torch.optim.AdamW(leaves, 0.1, **how)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for bad in (False, True, False):
                adam.zero_grad()
                scaler.scale(sum(w.square().sum().to("cpu") for w in leaves[:1])).backward()
                for w in leaves[1:]:
                    scaler.scale(w.square().sum()).backward()
                if bad:  # an element that one rank of each group has
                    leaves[0].grad[4, 2] = math.inf
                scaler.unscale_(adam)
                nn.utils.clip_grad_norm_(leaves, 0.3)
                scaler.step(adam)
                scaler.update()
            assert scaler.get_scale() == 2.0
        same(ours, plain)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.scale * self.down(torch.tanh(self.up(x)))
        return self.head(self.norm(x))


PLAN = {"up.*": [S(0)], "down.weight": [S(1)], "embed.weight": [S(1)]}


def composed(mesh, axis, **how):
    """torchtitan's order: tensor parallelism on one sub-mesh, data parallelism on the other."""
    torch.manual_seed(3)
    model = dt.shard_module(Model().double(), mesh["tp"], PLAN)
    if dist.get_rank() > 1:  # values come from the first rank
        with torch.no_grad():
            model.head.weight.local.zero_()
    return dt.shard_data_parallel(model, mesh["dp"], axis, **how)


def steps(model, place, n=3, **how):
    adam = torch.optim.AdamW(model.parameters(), 0.1, **how)
    norms = []
    for i in range(n):
        tokens, targets = (
            place(randint(0, 11, (6, 4), seed=i)),
            place(randint(0, 11, (6, 4), i + 9)),
        )
        adam.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(0, 1))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2))
        adam.step()
    return norms, adam


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", [1, 2, 3, None])
@on_ranks(4)
def test_tensor_parallelism_then_sharding_on_the_other_sub_mesh(stage, shape):
    mesh = mesh_of(shape)
    torch.manual_seed(3)
    plain = Model().double()
    how = {"stage": stage or 3, "segments": ["up", "down"] if stage == 3 else None}
    model = composed(mesh, "dp" if stage else None, **how)
    assert {p.process_mesh for p in [*model.parameters(), *model.buffers()]} == {mesh}
    split = [[[1, 0], -1], [0]] if stage else [[1, -1], [-1]]
    assert [p.dims_mapping for p in (model.up.weight, model.norm.weight)] == split
    options = {"foreach": stage != 2} if stage else {"fused": True}
    got, ours = steps(model, lambda x: dt.shard_tensor(x, mesh, [S(0), R]), **options)
    want, theirs = steps(plain, lambda x: x, **options)
    same(got, want)
    same(list(model.parameters()), list(plain.parameters()))
    same(list(model.state_dict().values()), list(plain.state_dict().values()))
    states = zip(ours.state.values(), theirs.state.values(), strict=True)
    assert all(torch.allclose(a["exp_avg"].full_tensor(), b["exp_avg"]) for a, b in states)
    dt.debugging.check_replicas(model)


@on_ranks(4)
def test_what_else_a_composition_takes():
    mesh = dt.init_mesh((2, 1, 2), ("dp", "cp", "tp"))
    torch.manual_seed(3)
    model = dt.shard_module(Model().double(), mesh["tp"], PLAN)
    tied = model.head.bias = model.up.bias
    model = dt.shard_data_parallel(model, mesh["dp"], "dp")
    assert model.head.bias is model.up.bias and model.up.bias.process_mesh is mesh["dp", "tp"]
    with pytest.raises(RuntimeError, match=r"brought .* to"):
        torch.optim.SGD([tied], 0.1).step()
    whole = dt.shard_module(Model(), dt.init_mesh((2, 2), NAMES), {"up.weight": [R, S(0)]})
    dt.shard_data_parallel(whole, dt.init_mesh((2, 2), NAMES)["dp"], "dp")
    assert whole.up.weight.dims_mapping == [[1, 0], -1]
    for bad, words in (
        (lambda m: dt.shard_data_parallel(m, mesh["dp"], "tp"), "splits it already"),
        (lambda m: dt.shard_data_parallel(m, mesh["dp"], "ep"), "has no axis 'ep'"),
        (lambda m: dt.shard_data_parallel(m, ProcessMesh([0, 1, 2, 3], ("x",)), "x"), "no axis"),
    ):
        model = dt.shard_module(Model(), mesh["tp"], PLAN)
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=words):
            bad(model)
        assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(4)
def test_reshards_from_and_to_sub_meshes(shape):
    mesh = mesh_of(shape)
    other, stage = ProcessMesh([3, 1], ("x",)), ProcessMesh([2], ("x",))
    full, w = randn(5, 3), randn(5, 3, seed=1)
    ends = [(mesh["tp"], [S(0)]), (mesh["dp"], [S(1)]), (mesh, [S(0), S(1)]), (mesh["dp"], [R])]
    ends += [(mesh["tp"], [P]), (other, [S(0)]), (stage, [R])]
    for src, placed in ends:
        for dst, wanted in ends:
            if P in wanted:
                continue
            x = dt.shard_tensor(full, src, [R] * src.ndim, requires_grad=True)
            y = dt.reshard(dt.reshard(x, src, placed), dst, wanted)
            assert y.process_mesh is dst and y.placements == tuple(wanted)
            torch.testing.assert_close(y.detach().full_tensor(everywhere=True), full)
            split = dt.shard_tensor(w, dst, [S(0)] * dst.ndim)  # a use that varies
            (y * split).sum().backward()
            if x.is_initialized:
                same(x.grad, w)
            with torch.no_grad():
                kept, moved = x.to_local().clone(), dt.reshard(x, dst, wanted)
                if moved is not x:
                    moved.zero_()  # memory of its own
                assert x.to_local().equal(kept)


@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(4)
def test_nobody_is_outside_of_a_sub_mesh(shape):
    """Calls that send values to ranks outside a mesh."""
    mesh = mesh_of(shape)
    full = randn(6, 3)
    for name in NAMES:
        x = dt.shard_tensor(full, mesh[name], [S(0)])
        with dt.values_everywhere():
            assert x[0, 0].item() == full[0, 0].item() and x.sum().item() == pytest.approx(
                full.sum()
            )
        same(dt.broadcast_value(x), full)
        with fallbacks():
            same(x[x > 0], full[full > 0])
            same(x.nonzero(), full.nonzero())
        same(dt.from_local(x.to_local(), mesh[name], [S(0)]), full)
        drawn = []
        for on in (mesh, mesh[name]):
            dt.manual_seed(1)
            drawn.append(dt.rand(6, 3, mesh=on, placements=[S(0), R][: on.ndim]).full_tensor())
        assert drawn[0].equal(drawn[1])
        w = dt.shard_tensor(full, mesh[name], [S(0)], requires_grad=True)
        (g,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)
        same(g, 2 * full)
    for src in range(4):
        data = full if dist.get_rank() == src else torch.zeros_like(full)
        same(dt.shard_tensor(data, mesh["tp"], [S(0)], src_rank=src), full)


@pytest.mark.filterwarnings("ignore::disttensor.errors.PieceWarning")
@on_ranks(4)
def test_a_pickle_of_a_tensor_keeps_the_root_of_its_mesh():
    mesh = mesh_of((2, 2))
    for part in (mesh["tp"], mesh["dp"], mesh["dp", "tp"], mesh["tp"]._flatten("x"), mesh):
        x = dt.shard_tensor(torch.arange(4.0), part, [S(0), R][: part.ndim])
        for one in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
            assert one.process_mesh is part and one.process_mesh.root is part.root
            assert one.sum().item() == 6.0


@on_ranks(4)
def test_checkpoints_of_sub_meshes_are_read_on_any_mesh():
    mesh = mesh_of((2, 2))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = nn.ParameterList(leaves_on(mesh)[1])
    ours = list(model)
    for w in ours:
        w.square().sum().backward()
    adam = torch.optim.AdamW(ours, 0.1)
    adam.step()
    full = [w.detach().full_tensor() for w in ours]
    dt.Checkpointer(folder[0]).save(1, model=model, optimizer=adam)
    for on in (mesh["dp"], mesh["tp"], mesh):
        params = nn.ParameterList([dt.zeros(5, 3, mesh=on, dtype=full[0].dtype) for _ in ours])
        other = torch.optim.AdamW(params, 0.1)
        assert dt.Checkpointer(folder[0]).load(model=params, optimizer=other) == 1
        same(list(params), full)
        for a, b in zip(params, ours, strict=True):
            same(other.state[a]["exp_avg_sq"], adam.state[b]["exp_avg_sq"].full_tensor())
    dt.pretrained.save(model, folder[0] + "/files")
    loaded = nn.ParameterList([dt.zeros(5, 3, mesh=mesh["dp"], dtype=full[0].dtype) for _ in ours])
    dt.pretrained.load(loaded, folder[0] + "/files")
    same(list(loaded), full)


def test_a_sub_mesh_knows_its_root():
    with fake_world(8, rank=3):
        mesh = ProcessMesh(torch.arange(8).reshape(2, 2, 2), ("pp", "dp", "tp"))
        tp, both = mesh["tp"], mesh["dp", "tp"]
        assert tp.ranks == (2, 3) and tp.coordinate == (1,) and tp.root is mesh
        assert tp is mesh["tp"] is both["tp"] and tp is not ProcessMesh([2, 3], ("tp",))
        assert mesh["tp", "dp"].ranks == (0, 2, 1, 3) and mesh["tp", "dp"].root_axes == (2, 1)
        assert mesh["pp", "dp", "tp"] is mesh and mesh.root is mesh
        assert mesh["dp", "tp", "pp"].root is mesh["dp", "tp", "pp"]  # the same on all ranks
        assert (repr(tp), repr(both)) == (f"{mesh!r}['tp']", f"{mesh!r}['dp', 'tp']")
        for one in (copy.deepcopy(tp), pickle.loads(pickle.dumps(tp))):
            assert one is tp
        with pytest.raises(IndexError, match="another mesh on each rank"):
            both[0]
        with pytest.raises(ValueError, match="different names"):
            mesh["tp", "tp"]


@on_ranks(4)
def test_meshes_that_differ_between_ranks_are_refused_on_all():
    rank = dist.get_rank()
    group = ProcessMesh([0, 1] if rank < 2 else [2, 3], ("tp",))
    w = dt.ones(4, mesh=group, placements=[S(0)], requires_grad=True)
    (w * 3).sum().backward()
    for order in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="the ranks give parameters of different meshes"):
            dt.clip_grad_norm_([w], 1.0, order)
        same(w.grad, torch.full((4,), 3.0))
    mesh = mesh_of((2, 2))
    x = dt.ones(4, 4, mesh=mesh["dp"])
    for other in (dt.ones(4, 4, mesh=mesh), dt.ones(4, 4, mesh=mesh["tp"])):
        with pytest.raises(ValueError, match="which sends nothing from a sub-mesh to its whole"):
            x + other
