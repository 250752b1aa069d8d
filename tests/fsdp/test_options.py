"""Options of shard_data_parallel: ignored parameters, modules that share a segment, dtypes by
module, shards along other dims. Training is compared with one process."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Shard
from tests.support.micro import batch_of, meshes
from tests.support.oracle import randn
from tests.support.part import part
from tests.support.pool import on_ranks
from tests.support.training import at_rest, compare, engine, gradients, line, mlp, train, values

WAYS: list[dict[str, Any]] = [
    {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reshard_after_forward": False},
    {"shard_axis": None},
]  # fmt: skip


class Part(nn.Module):
    """A module with a parameter of its own, one in a child, and one that is not used in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.scale = nn.Parameter(torch.ones(7))
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(x)) * self.scale)


class Model(nn.Module):
    """Uneven over 2 and over 4 ranks; the first and the last linear share their weight.

    recompute  parts are computed again in the backward
    low        the dtype of autocast
    """

    recompute, low = False, None

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(5, 5)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.norm, self.drop = nn.LayerNorm(5), nn.Identity()
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.start.weight

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", self.low) if self.low else contextlib.nullcontext():
            x = self.start(x)
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False) if self.recompute else part(x)
            x = self.head(self.drop(self.norm(x)))
        return x.float() if self.low else x


def made(**how: Any) -> Any:
    torch.manual_seed(0)
    model = Model() if how.get("low") else Model().double()
    model.__dict__.update(how)
    return model


def squares(model: Any, x: Any) -> Any:
    loss = model(x).square().sum()
    loss.backward()
    return loss


def trained(model: Any, mesh: Any, steps: int = 3, reduce: str = "scatter") -> Any:
    """Losses, gradients and parameters of some steps, the last of two micro-batches."""
    dtype = torch.float32 if model.low else torch.float64
    batches = [batch_of(mesh, i, dtype=dtype) for i in range(steps)]

    def step(model: nn.Module, x: Any) -> Any:
        if x is not batches[-1]:
            return squares(model, x)
        for i in range(2):
            with dt.accumulate(model, i == 1, reduce) if mesh else contextlib.nullcontext():
                loss = squares(model, x)
        return loss

    return train(model, step, batches)


def sharded(model: Any, mesh: Any, **options: Any) -> Any:
    replicas = "dp" if "dp" in mesh.dim_names else None
    return dt.shard_data_parallel(model, mesh, replicate_axis=replicas, **options)


HOW: list[dict[str, Any]] = [{}, {"recompute": True}, {"low": torch.float16}]
EACH = [*itertools.product(WAYS, HOW, range(3))]


def ignored_of(model: Any) -> list[list[Any]]:
    return [
        [model.parts[1].scale, model.start.weight],
        [*model.parts[0].parameters(), model.norm.bias],
        [*model.parameters()],
    ]


@pytest.mark.parametrize(("ways", "how", "which"), part(EACH, 5, "ignored, 2"), ids=str)
@on_ranks(2)
def test_ignored_parameters_stay_as_they_are_and_train(ways: Any, how: Any, which: int) -> None:
    ignored_are_right(ways, how, which)


@pytest.mark.parametrize(("ways", "how", "which"), part(EACH, 2, "ignored, 4"), ids=str)
@on_ranks(4)
def test_ignored_parameters_beside_replicas(ways: Any, how: Any, which: int) -> None:
    ignored_are_right(ways, how, which)


def ignored_are_right(ways: Any, how: Any, which: int) -> None:
    want = trained(made(**how), None)
    for mesh in meshes().values():
        model = made(**how)
        ignored = ignored_of(model)[which]
        before = [(p, p.data_ptr()) for p in ignored]
        sharded(model, mesh, ignored_params=set(ignored), segments=["parts.*"], **ways)
        for p in model.parameters():
            assert isinstance(p, dt.DistTensor) is (id(p) not in map(id, ignored))
        assert all(
            a is b and a.data_ptr() == at for a, (b, at) in zip(ignored, before, strict=True)
        )
        got = trained(model, mesh)
        compare(got, want, 0.05 if how.get("low") else 1e-9)
        assert {id(p) for p in ignored} <= {id(p) for p in model.parameters()}
        assert len({repr(p.tolist()) for p in gathered(ignored[0])}) == 1


def gathered(p: Any) -> list[Any]:
    out = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(out, p.detach())
    return out


@on_ranks(1)
def test_shards_in_host_memory_beside_accelerators_are_refused() -> None:
    mesh = dt.ProcessMesh([0], ("fsdp",))
    assert dt.shard_data_parallel(nn.Linear(2, 2), mesh, offload=True)
    with mock.patch.object(mesh, "device_type", "cuda"), pytest.raises(NotImplementedError):
        dt.shard_data_parallel(nn.Linear(2, 2), mesh, offload=True)


@on_ranks(2)
def test_ignored_parameters_on_several_meshes_are_refused_where_they_would_be_wrong() -> None:
    model = mlp()
    dt.shard_module(model[0], dt.ProcessMesh([0], ("fsdp",)))
    dt.shard_module(model[2], dt.ProcessMesh([1], ("fsdp",)))
    with pytest.raises(ValueError, match=r"ignored_params: '4.weight' is a regular tensor that"):
        dt.shard_data_parallel(model, ignored_params=model[4].parameters())
    assert type(model[4].weight) is nn.Parameter
    small = mlp()
    with pytest.raises(ValueError, match=r"'0.bias' is a regular tensor that requires grad"):
        dt.shard_data_parallel(
            small, dt.ProcessMesh([0], ("fsdp",)), ignored_params={small[0].bias}
        )
    assert type(small[2].weight) is nn.Parameter
    frozen = model[4].requires_grad_(False).parameters()
    dt.shard_data_parallel(model, ignored_params=frozen, segments=["0", "2"])
    want = mlp()
    placed = dt.shard_module(copy.deepcopy(want), line(), {"0.weight": [Shard(1)]})
    dt.shard_data_parallel(placed, line(), ignored_params=[placed[0].weight])
    assert placed[0].weight.placements == (Shard(1),)
    x = randn(3, 6)
    squares(placed, dt.shard_tensor(x, line(), [Shard(0)]))
    squares(want, x)
    compare(gradients(placed), gradients(want))


# Several modules as one segment, and modules without parameters ----------------------------------

GROUPS: list[list[Any]] = [
    [["start", "norm", "head"], "parts.0", ("parts.1", "parts.2")],
    [("parts.*", "norm"), ["drop", "start"]],
    ["parts.*", ["drop", "parts.2.act", "parts.0"], "parts.1.act"],
    [["", "parts.1"], "parts.2.down"],
]


NAMES = [
    ["start .. head", "parts.0", "parts.1 .. parts.2"],
    ["Model", "start", "parts.0 .. norm"],
    ["Model", "parts.0", "parts.1", "parts.2"],
    ["Model", "parts.2.down"],
]
EACH_GROUP = [*itertools.product(WAYS, HOW[:2], range(len(GROUPS)))]


@pytest.mark.parametrize(("ways", "how", "which"), part(EACH_GROUP, 4, "groups, 2"), ids=str)
@on_ranks(2)
def test_several_modules_share_a_segment(ways: Any, how: Any, which: int) -> None:
    groups_are_right(ways, how, which)


@pytest.mark.parametrize(("ways", "how", "which"), part(EACH_GROUP, 2, "groups, 4"), ids=str)
@on_ranks(4)
def test_several_modules_share_a_segment_beside_replicas(ways: Any, how: Any, which: int) -> None:
    groups_are_right(ways, how, which)


def groups_are_right(ways: Any, how: Any, which: int) -> None:
    want = trained(made(**how), None)
    for mesh in meshes().values():
        model = sharded(made(**how), mesh, segments=GROUPS[which], **ways)
        assert [segment.name for segment in engine(model).segments] == NAMES[which]
        compare(trained(model, mesh), want)


@on_ranks(2)
def test_modules_without_parameters() -> None:
    """Nothing is gathered, and arguments are cast."""
    mesh = line()
    x = dt.shard_tensor(torch.ones(3, 6), mesh, [Shard(0)])
    model = dt.shard_data_parallel(nn.Sequential(nn.Tanh()), mesh, mp_policy=Policy(F64))
    with dt.debugging.record_comms() as log:
        assert model(x).dtype is F64
    assert not len(log)
    assert dt.shard_data_parallel(nn.Tanh(), mesh, segments=[[""]])(x).dtype is torch.float32
    frozen = dt.shard_data_parallel(nn.BatchNorm1d(6, affine=False), mesh)
    assert frozen.running_mean.process_mesh is mesh and frozen(x).shape == (3, 6)


# Dtypes by module --------------------------------------------------------------------------------

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
POLICIES: list[Any] = [
    Policy(F32, reduce_dtype=F64, output_dtype=F64),
    {"parts.*": Policy(F32), "norm": Policy(F64, output_dtype=F64)},
    {"parts.1": Policy(F64, output_dtype=F64), "parts.?": Policy(F32, F64), "": Policy(F32)},
    {"": Policy(F32, F64), "norm": Policy(F64, output_dtype=F32),
     "head": Policy(F32, F64, cast_forward_inputs=False)},
    {"parts.0.up": Policy(F32, output_dtype=F64), "parts.1.act": Policy(F32, output_dtype=F64)},
]  # fmt: skip


class Plain(nn.Module):
    """What policies mean, in one process: parameters are cast before a forward of the whole, and
    modules that are named or that segments gather (the whole, ``parts``) cast by hooks."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        super().__init__()
        self.model = model
        entries = given if isinstance(given, dict) else {"": given}
        modules = dict(model.named_modules())
        named: dict[str, Any] = {}
        for pattern in sorted(entries, key=lambda name: name not in modules):
            for name in modules:
                if name.count(".") == pattern.count(".") and fnmatch.fnmatch(name, pattern):
                    named.setdefault(name, entries[pattern])
        self.dtypes: dict[str, Any] = {}
        for name, module in modules.items():
            around = [name.rsplit(".", i)[0] for i in range(name.count(".") + 1)] + [""]
            policy = next((named[at] for at in around if at in named), Policy())
            for key, _ in module.named_parameters(recurse=False):
                self.dtypes[f"{name}.{key}"] = policy.param_dtype or F64
            gathered = not name or (name.count(".") == 1 and name.startswith("parts"))
            if policy.cast_forward_inputs and policy.param_dtype and (name in named or gathered):
                low = policy.param_dtype
                module.register_forward_pre_hook(lambda m, args, low=low: (args[0].to(low),))
            if name in named and policy.output_dtype:
                to = policy.output_dtype
                module.register_forward_hook(lambda m, args, out, to=to: out.to(to))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def forward(self, x: Any) -> Any:
        cast = {name: p.to(self.dtypes[name]) for name, p in self.named_parameters()}
        return torch.func.functional_call(self.model, cast, x)


def seen(model: nn.Module) -> list[Any]:
    """The dtypes that modules without children meet, in the order of the calls."""
    found: list[Any] = []
    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_hook(
                lambda m, args, out: found.append((args[0].dtype, out.dtype))
            )
    return found


EACH_POLICY = [*itertools.product(WAYS, range(len(POLICIES)))]


@pytest.mark.parametrize(("ways", "which"), part(EACH_POLICY, 5, "policies, 2"), ids=str)
@on_ranks(2)
def test_a_policy_by_module_is_that_of_casts_by_hand(ways: Any, which: int) -> None:
    policies_are_right(ways, which)


@pytest.mark.parametrize(("ways", "which"), part(EACH_POLICY, 2, "policies, 4"), ids=str)
@on_ranks(4)
def test_a_policy_by_module_beside_replicas(ways: Any, which: int) -> None:
    policies_are_right(ways, which)


def policies_are_right(ways: Any, which: int) -> None:
    policy = POLICIES[which]
    plain = Plain(made(), policy)
    plain.low = None
    met = seen(plain)
    want = trained(plain, None)
    for mesh in meshes().values():
        for recompute in (False, True):
            model = made(recompute=recompute)
            model = sharded(model, mesh, mp_policy=policy, segments=["parts.*"], **ways)
            mine = seen(model)
            got = trained(model, mesh)
            compare(got, want, 1e-4)
            assert recompute or mine == met, (mine, met)
            assert {p.dtype for p in model.parameters()} == {F64}


@on_ranks(2)
def test_each_policy_reduces_in_its_own_dtype() -> None:
    mesh = line()
    policy = {"0": Policy(BF16), "2": Policy(BF16, F32), "4": Policy(BF16)}
    for ways, kind in (({"stage": 3}, "reduce_scatter"), ({"stage": 1}, "all_reduce")):
        for segments in (["0", "2", "4"], [["0", "2", "4"]]):
            model = dt.shard_data_parallel(
                mlp(torch.float32), mesh, mp_policy=policy, segments=segments, **ways
            )
            twin = copy.deepcopy(model)
            for m in (model, twin):
                with dt.debugging.record_comms() as log:
                    hidden = m[1](m[0](dt.shard_tensor(torch.ones(3, 6), mesh, [Shard(0)])))
                    hidden = m[3](m[2](hidden)).float()
                    m[4](hidden).sum().backward()
                assert {r.dtype for r in log if r.kind == kind} == {BF16, F32}
                assert {r.dtype for r in log if r.kind == "all_gather"} == {BF16}


@on_ranks(4)
def test_policies_of_stages_are_known_outside_their_meshes() -> None:
    stages = [dt.ProcessMesh(ranks, ("fsdp",)) for ranks in ([0, 1], [2, 3])]
    policy = {
        "0": Policy(F32, output_dtype=F64),
        "2": Policy(F32),
        "4": Policy(F32, cast_forward_inputs=False),
    }
    for segments in (["0", "2", "4"], [["0", "2"], "4"]):
        torch.manual_seed(0)
        model = mlp()
        torch.manual_seed(0)
        plain = mlp()
        for name, on in (("0", 0), ("2", 0), ("4", 1)):
            dt.shard_module(model[int(name)], stages[on])
        dt.shard_data_parallel(model, mp_policy=policy, segments=segments)
        for _ in range(2):
            x = torch.ones(5, 6).double()
            first = model[1](model[0](dt.shard_tensor(x, stages[0], [Shard(0)])))
            second = model[3](model[2](first))
            moved = dt.reshard(second, stages[1], [Shard(0)])
            out = model[4](moved)
            assert [t.dtype for t in (first, second, moved, out)] == [F64, F32, F32, F32]
            out.sum().backward()
            plain(x).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            if p.is_initialized:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4)


# Shards along other dims --------------------------------------------------------------------------


class Views(nn.Module):
    """Kernels of three dims, and weights that the forward views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(3, 5, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        x = self.conv(x.unsqueeze(1)).sum(1)
        return torch.tanh(x @ self.weight.view(5, 6)) * self.scale


def along(p: Any) -> Any:
    return None if p.ndim < 2 else Shard(1 if p.ndim == 2 else -1)


def make_views(**how: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(made(), Views()).double()
    model[0].__dict__.update(how)
    model.low = None
    return model


EACH_DIM = [*itertools.product(WAYS[:4], HOW[:2], ["scatter", "none"])]


@pytest.mark.parametrize(("ways", "how", "reduce"), part(EACH_DIM, 4, "dims, 2"), ids=str)
@on_ranks(2)
def test_parameters_are_split_along_the_dim_of_shard_placement_fn(
    ways: Any, how: Any, reduce: str
) -> None:
    other_dims_are_right(ways, how, reduce)


@pytest.mark.parametrize(("ways", "how", "reduce"), part(EACH_DIM, 2, "dims, 4"), ids=str)
@on_ranks(4)
def test_parameters_are_split_along_other_dims_beside_replicas(
    ways: Any, how: Any, reduce: str
) -> None:
    other_dims_are_right(ways, how, reduce)


def other_dims_are_right(ways: Any, how: Any, reduce: str) -> None:
    want = trained(make_views(**how), None)
    for mesh in meshes().values():
        model = make_views(**how)
        sharded(model, mesh, shard_placement_fn=along, segments=["0.parts.*"], **ways)
        assert model[0].start.weight.placements[-1] == Shard(1)
        assert model[1].weight.placements[-1] == Shard(2)
        assert model[0].start.bias.placements[-1] == Shard(0)
        size = mesh.shape[-1]
        assert model[0].parts[0].up.weight.to_local().shape[1] <= -(-5 // size)
        compare(trained(model, mesh, reduce=reduce), want)
        assert all(p.grad.to_local().is_contiguous() for p in model.parameters())


@on_ranks(4)
def test_shards_along_the_dim_that_tensor_parallelism_splits() -> None:
    """With low precision, an optimizer that reads gradients in place, and a resumed run."""
    mesh = dt.ProcessMesh(torch.arange(4).view(2, 2), ("fsdp", "tp"))
    plan = {"0.weight": [dt.Replicate(), Shard(0)], "2.weight": [dt.Replicate(), Shard(1)]}
    batches = [randn(5, 6, seed=i) for i in range(3)]
    for fn in (along, lambda p: Shard(p.ndim - 1)):
        torch.manual_seed(0)
        want = train(mlp(), squares, batches, lambda ps: torch.optim.AdamW(ps, fused=True))
        torch.manual_seed(0)
        model = dt.shard_module(mlp(), mesh, plan)
        dt.shard_data_parallel(model, mesh, shard_placement_fn=fn, segments=["0", "2"])
        assert model[2].weight.dims_mapping == [-1, [1, 0]]
        placed = [dt.shard_tensor(b, mesh, [Shard(0), dt.Replicate()]) for b in batches]
        got = train(model, squares, placed, lambda ps: torch.optim.AdamW(ps, fused=True))
        compare(got, want)
        again = dt.shard_data_parallel(mlp(), mesh, shard_placement_fn=fn)
        again.load_state_dict(copy.deepcopy(model.state_dict()))
        compare(values(again), values(model))
        compare(values(copy.deepcopy(model)), values(model))


@on_ranks(2)
def test_other_dims_on_the_meta_device_and_in_second_derivatives() -> None:
    mesh = line()
    with torch.device("meta"):
        model = mlp()
    dt.manual_seed(0)
    dt.shard_data_parallel(model, mesh, shard_placement_fn=along, segments=["0", "2"])
    assert model[0].weight.placements == (Shard(1),)
    plain = mlp()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(q.full_tensor())
    x = randn(5, 6)
    for m, batch in ((plain, x), (model, dt.shard_tensor(x, mesh, [Shard(0)]))):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*will create a reference cycle")
            m(batch).square().sum().backward(create_graph=True)
        sum(p.grad.square().sum() for p in m.parameters()).backward()
    compare(gradients(model), gradients(plain))


# Gathered for longer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ways", "how"), part([*itertools.product(WAYS, HOW[:2])], 4, "unshard"), ids=str
)
@on_ranks(2)
def test_unshard_gathers_once_for_all_forwards_and_backwards(ways: Any, how: Any) -> None:
    unshard_is_right(ways, how)


@on_ranks(4)
def test_unshard_beside_replicas() -> None:
    unshard_is_right({}, HOW[1])


def unshard_is_right(ways: Any, how: Any) -> None:
    want = trained(made(**how), None)
    for mesh in meshes().values():
        model = sharded(made(**how), mesh, segments=["parts.*"], **ways)
        held, x = list(model.parameters()), batch_of(mesh, 0)
        stage = ways.get("stage", 3) if "shard_axis" not in ways else None
        with dt.fsdp.unshard(model):
            with dt.debugging.record_comms() as log:
                for _ in range(2):
                    model(x)
                    squares(model, x)
            assert not [r for r in log if r.kind == "all_gather"]
            assert [id(p) for p in model.parameters()] == [id(p) for p in held]
            for p in model.parameters():
                p.grad = None
            compare(trained(model, mesh), want)
            with dt.debugging.record_comms() as log, dt.fsdp.unshard(model.parts[0]):
                squares(model, x)  # the step of the optimizer changed all parameters: once each
            gathers = sum(r.kind == "all_gather" for r in log)
            assert gathers == (0 if stage is None else 4)
            with pytest.raises(ZeroDivisionError), dt.fsdp.unshard(model):
                raise ZeroDivisionError
        at_rest(model, held)
        with dt.fsdp.unshard(model.parts[1]), dt.debugging.record_comms() as log:
            squares(model, x)
        if stage == 3 and not how:
            assert sum(r.kind == "all_gather" for r in log) == (5 if len(ways) < 2 else 3)
        at_rest(model, held)
    with pytest.raises(ValueError, match="unshard: Linear holds no DistTensor"):
        dt.fsdp.unshard(nn.Linear(2, 2)).__enter__()


class Writes(nn.Linear):
    writes = True

    def forward(self, x: Any) -> Any:
        if self.writes:
            with torch.no_grad():
                self.weight.add_(1)
        return super().forward(x)


@on_ranks(2)
def test_a_forward_that_writes_to_what_unshard_keeps_is_refused_and_the_next_is_right() -> None:
    model = Writes(3, 3)
    x = torch.ones(2, 3)
    want = nn.Linear.forward(model, x).detach()
    dt.shard_data_parallel(model, line())
    with dt.fsdp.unshard(model):
        with pytest.raises(RuntimeError, match="wrote to one of its parameters"):
            model(x)
        model.writes = False
        compare(model(x).full_tensor().detach(), want, 1e-6)


class Generates(nn.Linear):
    def generate(self, x: Any) -> Any:
        return self(torch.tanh(self(x))) @ self.weight


@on_ranks(2)
def test_methods_that_read_parameters_need_no_registration() -> None:
    """The registration of FSDP2 leaves the module as it is."""
    torch.manual_seed(0)
    plain, x = Generates(5, 5).double(), randn(3, 5)
    for ways in WAYS:
        plain.zero_grad()
        model = dt.shard_data_parallel(copy.deepcopy(plain), line(), **ways)
        register_fsdp_forward_method(model, "generate")
        squares(model.generate, dt.shard_tensor(x, line(), [Shard(0)]))
        plain.zero_grad()
        squares(plain.generate, x)
        compare(gradients(model), gradients(plain))
