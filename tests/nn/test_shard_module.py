"""Modules with DistTensor parameters: shard_module's plans, meta device, ties; and nn.Module's own
methods."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import disttensor as dt
from tests.support.layouts import S0, S1, R, everywhere, grid, same


class Net(nn.Module):
    """Embedding tied to the head, a block of two linears, a norm with buffers."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, device=device)
        self.block = nn.Sequential(
            nn.Linear(6, 5, device=device), nn.GELU(), nn.Linear(5, 6, device=device)
        )
        self.norm = nn.BatchNorm1d(6, device=device)
        self.head = nn.Linear(6, 7, bias=False, device=device)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.block(x))


PLANS = {
    "exact": {
        "block.0.weight": (R, S0),
        "block.0.bias": (R, S0),
        "block.2.weight": (R, S1),
        "embed.weight": (R, S0),
    },
    "globs": {"block.0.*": (R, S0), "block.2.w*": (R, S1), "em*.weight": (R, S0)},
    "regex": {
        re.compile(r"block\.0\.(weight|bias)"): (R, S0),
        re.compile(r".*\.2\.weight"): (R, S1),
        "head.weight": (R, S0),
    },
    "modules": {"block.0": (R, S0), "block.2.weight": (R, S1), "embed": (R, S0)},
}


def net(device: str | None = None) -> Net:
    torch.manual_seed(3)
    return Net(device)


def function_plan(name: str, module: nn.Module, mesh: dt.ProcessMesh) -> None:
    layouts = {"block.0": (R, S0), "block.2": (R, S1), "embed": (R, S0)}
    if name in layouts:
        module.weight = dt.shard_tensor(module.weight, mesh, layouts[name])
    if name == "block.0":
        module.bias = dt.shard_tensor(module.bias, mesh, (R, S0))


@pytest.mark.feature("Modules")
@everywhere
@pytest.mark.parametrize("plan", [*PLANS, "function"])
def test_plans(plan):
    plain, module = net().double(), net().double()
    out = dt.shard_module(module, grid(), PLANS.get(plan, function_plan))
    assert out is module
    lies = {name: p.placements for name, p in module.named_parameters()}
    assert lies["block.0.weight"] == lies["block.0.bias"] == lies["embed.weight"] == (R, S0)
    assert lies["block.2.weight"] == (R, S1) and lies["block.2.bias"] == (R, R)
    assert module.norm.running_mean.placements == (
        R,
        R,
    ) and module.norm.num_batches_tracked.placements == (R, R)
    if plan != "function":
        assert module.head.weight is module.embed.weight
    assert [n for n, _ in module.named_parameters()][:5] == [
        n for n, _ in plain.named_parameters()
    ][:5]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())
    same([*module.parameters()][:5], [*plain.parameters()][:5])
    tokens = torch.arange(12).reshape(4, 3) % 7
    for m, t in ((module, dt.shard_tensor(tokens, grid(), (S0, R))), (plain, tokens)):
        nn.functional.cross_entropy(m(t).flatten(0, 1), t.flatten()).backward()
    for p, q in zip(module.parameters(), plain.parameters(), strict=False):
        if plan != "function" and q.grad is not None:
            same(p.grad, q.grad)


@everywhere
def test_a_count_beside_what_an_entry_splits_is_replicated():
    for pattern in ("1.*", "1", "*"):
        module = nn.Sequential(nn.Identity(), nn.BatchNorm1d(6))
        dt.shard_module(module, grid(), {pattern: [S0, R]})
        assert module[1].running_var.placements == module[1].weight.placements == (S0, R)
        assert module[1].num_batches_tracked.placements == (R, R)
    for pattern in ("*.num_batches_tracked", "1.num_batches_tracked"):
        with pytest.raises(ValueError, match="0-d"):
            dt.shard_module(
                nn.Sequential(nn.Identity(), nn.BatchNorm1d(6)), grid(), {pattern: (S0, R)}
            )


@everywhere
def test_what_the_plan_does_not_name_is_replicated_and_dist_parameters_stay():
    module = net()
    module.head.weight = nn.Parameter(dt.shard_tensor(torch.ones(7, 6), grid(), (S1, R)))
    dt.shard_module(module, grid())
    assert module.head.weight.placements == (S1, R)
    assert all(p.placements == (R, R) for n, p in module.named_parameters() if n != "head.weight")


@everywhere
def test_a_bad_plan_changes_nothing():
    bad = [
        ({"blok.0.weight": (R, R)}, "matches no parameter"),
        ({"block.0.weight": (S0,)}, "1 entries"),
        ({"block.0.weight": (R, S0), "block.0.bias": (S1, R)}, "out of range"),
        ({"block.*": (R, S1)}, "out of range"),
        ({"embed.weight": (S0, R), "head.weight": (R, R)}, "tied"),
        ({re.compile("x.*"): (R, R)}, "matches no"),
        ({"norm.running_mean": (dt.Partial(), R)}, "Partial"),
        ({"block.0.weight": (0, 1)}, "no placement"),
        ({"norm.num_batches_tracked": (S0, R)}, "0-d"),
        ({3: (R, R)}, "3"),
    ]
    for plan, text in bad:
        module = net()
        before = {n: id(p) for n, p in (*module.named_parameters(), *module.named_buffers())}
        with pytest.raises((ValueError, TypeError), match=re.escape(text)) as error:
            dt.shard_module(module, grid(), plan)
        assert "shard_module" in str(error.value), error.value
        assert before == {
            n: id(p) for n, p in (*module.named_parameters(), *module.named_buffers())
        }


class HiddenLayer(nn.Module):
    """Its layer is in a plain list, where ``modules()`` does not find it; its parameters are."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 3)]
        self.weights = nn.ParameterList(self.layers[0].parameters())

    def forward(self, x):
        return self.layers[0](x)


@everywhere
def test_a_parameter_that_an_unregistered_module_holds_is_placed_there_too():
    mesh = grid()
    model = dt.shard_module(HiddenLayer(), mesh, {})
    assert model.layers[0].weight is model.weights[0]
    x = dt.shard_tensor(torch.randn(5, 4), mesh, [S0, R])
    model(x).sum().backward()
    assert model.weights[0].grad.full_tensor().abs().sum() > 0


@everywhere
def test_meta_modules_are_made_shard_by_shard():
    with torch.device("meta"):
        module = Net()
    assert module.head.weight.is_meta
    dt.manual_seed(5)
    dt.shard_module(module, grid(), PLANS["globs"])
    assert module.head.weight is module.embed.weight
    for p in (*module.parameters(), *module.buffers()):
        assert not p.is_meta and p.local.shape == p.spec.local_shape
    same(module.norm.running_var, torch.ones(6))
    same(module.norm.running_mean, torch.zeros(6))
    assert (
        module.block[0].weight.full_tensor().abs().max() <= 6**-0.5
        and module.block[0].weight.full_tensor().std() > 0.1
    )


@everywhere
def test_meta_parameters_that_nobody_initializes_are_an_error():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3, device="meta")
            self.scale = nn.Parameter(torch.empty(3, device="meta"))

    module = Scale()
    with pytest.raises(ValueError, match=r"scale.*meta.*reset_parameters"):
        dt.shard_module(module, grid())
    assert module.inner.weight.is_meta and type(module.inner.weight) is nn.Parameter

    def init(m):
        if hasattr(m, "scale"):
            nn.init.constant_(m.scale, 3.0)
        else:
            m.reset_parameters()

    dt.shard_module(module, grid(), {"scale": (S0, R)}, init=init)
    same(module.scale, torch.full((3,), 3.0))
    table = nn.Module()
    table.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="table is on the meta device"):
        dt.shard_module(table, grid())


# nn.Module's own methods --------------------------------------------------------------------------


@everywhere
def test_state_dict_goes_there_and_back():
    module, other = (dt.shard_module(net(), grid(), PLANS["exact"]) for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    state = module.state_dict()
    assert all(isinstance(v, dt.DistTensor) for v in state.values())
    assert not any(v.requires_grad for v in state.values())
    layouts = [p.spec for p in other.parameters()]
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert [p.spec for p in other.parameters()] == layouts
    same([*other.parameters()], [*net().parameters()])
    plain = {k: v + 2 for k, v in net().state_dict().items()}
    other.load_state_dict(plain)  # plain, global tensors are cut
    assert [p.spec for p in other.parameters()] == layouts
    same([*other.state_dict().values()], [*plain.values()])
    net().load_state_dict({k: v.full_tensor() for k, v in state.items()})
    with pytest.raises(RuntimeError, match=r"block\.0\.weight"):
        other.load_state_dict({**plain, "block.0.weight": torch.ones(3, 3)})
    fresh = dt.shard_module(net(), grid(), PLANS["exact"])
    fresh.load_state_dict(state, assign=True)
    same([*fresh.state_dict().values()], [*net().state_dict().values()])


@everywhere
def test_module_methods():
    module = dt.shard_module(net(), grid(), PLANS["exact"])
    before = [p.spec for p in module.parameters()]
    assert module.double() is module and all(p.dtype == torch.float64 for p in module.parameters())
    assert [p.spec.layout for p in module.parameters()] == [s.layout for s in before]
    assert (
        module.norm.num_batches_tracked.dtype == torch.int64
        and module.head.weight is module.embed.weight
    )
    module.to(torch.bfloat16)
    assert module.block[0].weight.local.dtype == torch.bfloat16 == module.norm.running_mean.dtype
    module.to("cpu").float().cpu().eval().train().share_memory()
    assert [p.spec for p in module.parameters()] == before
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())
    module.requires_grad_(False)
    assert not any(p.requires_grad for p in module.parameters())
    module.requires_grad_(True)
    tokens = torch.arange(8).reshape(2, 4) % 7
    for to_none in (False, True):
        module(tokens).sum().backward()
        module.zero_grad(set_to_none=to_none)
        grads = [p.grad for n, p in module.named_parameters() if "norm" not in n]
        assert all(g is None if to_none else (g.full_tensor() == 0).all() for g in grads)
    module(tokens).sum().backward()
    twin = copy.deepcopy(module)
    assert twin.head.weight is twin.embed.weight and twin.head.weight is not module.head.weight
    assert all(p.grad is None for p in twin.parameters())  # as of plain parameters
    module.apply(lambda m: m)
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in net().parameters())
    assert "Linear(in_features=6" in repr(module)
    module.register_parameter("extra", nn.Parameter(module.norm.weight.detach() * 2))
    module.register_buffer("table", module.norm.weight.detach() * 2)
    assert "extra" in dict(module.named_parameters()) and "table" in module.state_dict()


@everywhere
def test_parameters_to_vector_and_back():
    plain, module = net(), dt.shard_module(net(), grid(), PLANS["exact"])
    vector = nn.utils.parameters_to_vector(module.parameters())
    same(vector, nn.utils.parameters_to_vector(plain.parameters()))
    nn.utils.vector_to_parameters(vector.detach() * 2, module.parameters())
    same([*module.parameters()], [2 * p.detach() for p in plain.parameters()])


@everywhere
def test_functional_call_and_parametrizations():
    plain, module = net().double(), dt.shard_module(net().double(), grid(), PLANS["exact"])
    tokens = torch.arange(8).reshape(2, 4) % 7
    doubled = [{k: v * 2 for k, v in m.named_parameters()} for m in (module, plain)]
    same(
        torch.func.functional_call(module, doubled[0], (tokens,)),
        torch.func.functional_call(plain, doubled[1], (tokens,)),
    )
    for m in (module, plain):
        m(tokens).square().sum().backward()
        nn.utils.clip_grad_value_(m.parameters(), 1.0)
        nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    same(
        [p.grad for p in list(module.parameters())[:5]],
        [p.grad for p in list(plain.parameters())[:5]],
    )
