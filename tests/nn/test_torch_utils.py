"""What torch does to modules whose parameters are DistTensors: hooks, parametrizations, pruning,
``to("meta")``, lazy modules, sparse embeddings, copies, batched gradients, quantization."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import disttensor as dt
from disttensor import DistTensor, ProcessMesh, Replicate, Shard
from tests.support.oracle import fallbacks, line, place, randn
from tests.support.pool import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
X = randn(5, 4, seed=1)


def net(mesh=None):
    """One process' module; on a mesh with its parameters split."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return module if mesh is None else dt.shard_module(module, mesh, {"*": [S0]})


def full(x):
    return x.detach().full_tensor() if isinstance(x, DistTensor) else x.detach()


def both(run):
    """``run(module, input)`` in one process and on ranks: the same tensors."""
    plain = run(net(), X.clone().requires_grad_())
    ours = run(net(line()), place(X, line(), [S0]).requires_grad_())
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(full(a), full(b))


def backward(module, x):
    y = module(x)
    y.square().sum().backward()
    return [y, x.grad, *[p.grad for p in module.parameters()]]


class Twice(nn.Module):
    def forward(self, w):
        return w * 2

    def right_inverse(self, w):
        return w / 2


def parametrized(module):
    parametrize.register_parametrization(module[0], "weight", Twice())


def written(module):
    parametrized(module)
    with torch.no_grad():
        module[0].weight = module[0].weight * 0.5


def left(module):
    parametrized(module)
    parametrize.remove_parametrizations(module[0], "weight")


def pruned_and_left(module):
    prune.l1_unstructured(module[0], "weight", amount=0.4)
    prune.remove(module[0], "weight")


CHANGES = {
    "parametrization": parametrized,
    "written through it": written,
    "taken away": left,
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "prune": lambda m: prune.l1_unstructured(m[0], "weight", amount=0.4),
    "prune rows": lambda m: prune.ln_structured(m[0], "weight", amount=0.4, n=2, dim=0),
    "prune by mask": lambda m: prune.custom_from_mask(m[0], "weight", torch.ones(6, 4).triu()),
    "prune all": lambda m: prune.global_unstructured(
        [(m[0], "weight"), (m[2], "weight")], prune.L1Unstructured, amount=0.4
    ),
    "pruned and left": pruned_and_left,
}


@on_ranks(2)
def test_full_backward_hooks_see_and_change_gradients():
    def run(kind, module, x):
        seen = []

        def hook(m, *grads):
            seen.extend(g for pair in grads for g in pair)
            changed = grads[0]
            return tuple(None if g is None else g * 2 for g in changed)

        for m in module.modules():
            getattr(m, f"register_full_backward_{kind}")(hook)
        found = backward(module, x)
        assert {type(g) for g in seen} == {type(x)}
        return [*found, *seen]

    both(lambda m, x: run("hook", m, x))
    both(lambda m, x: run("pre_hook", m, x))
    seen = []
    module = net(line())
    module[0].register_full_backward_hook(lambda m, *grads: seen.append(grads))
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        module(place(X, line(), [S0])).sum().backward()
    assert seen[0][0] == (None,)
    assert isinstance(seen[0][1][0], DistTensor)
    # a rank outside the mesh calls none
    outside = ProcessMesh([0], ("x",))
    module, calls = nn.ReLU(), []
    module.register_full_backward_hook(lambda *_: calls.append(0))
    module(dt.ones(4, mesh=outside, requires_grad=True)).sum().backward()
    assert len(calls) == (outside.coordinate is not None)


@on_ranks(2)
def test_parametrizations_and_pruning_after_sharding():
    for change in CHANGES.values():
        with fallbacks():
            both(lambda m, x, change=change: (change(m), backward(m, x))[1])


@on_ranks(2)
def test_orthogonal_and_spectral_parametrizations_after_sharding():
    def spectral(module):
        parametrizations.spectral_norm(module[0])
        norm = module[0].parametrizations.weight[0]
        with torch.no_grad():  # where they begin is drawn
            for vector in (norm._u, norm._v):
                vector.fill_(len(vector) ** -0.5)

    def run(change, module, x):
        torch.manual_seed(3)
        change(module)
        found = backward(module, x)
        return [*found, module.eval()(x)]

    with fallbacks():
        both(lambda m, x: run(spectral, m, x))
        for kind in ("matrix_exp", "cayley"):
            change = functools.partial(orthogonal, kind)
            both(lambda m, x, change=change: run(change, m, x))


def orthogonal(kind, module):
    parametrizations.orthogonal(module[0], orthogonal_map=kind, use_trivialization=False)


@on_ranks(2)
def test_hooks_of_the_old_kind_lazy_shards_and_quantized_dtypes_are_refused():
    module = net(line())
    module[0].register_backward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="register_backward_hook of Linear"):
        module(place(X, line(), [S0]))
    with pytest.raises(ValueError, match=r"'0.weight' is lazy.*then shard it"):
        dt.shard_module(nn.Sequential(nn.LazyLinear(6)), line(), {"*": [S0]})
    with pytest.raises(TypeError, match="a quantized tensor is no DistTensor"):
        dt.zeros(4, mesh=line(), dtype=torch.qint8)


class Row(torch.autograd.Function):
    """As transformers' masks take their elements."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, i):
        return x.index_select(0, i.view(1)).squeeze(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@on_ranks(2)
def test_vmap_over_what_captures_a_dist_tensor():
    w, v = place(X, line(), [S0]), randn(3, 4, seed=6)
    got = torch.vmap(lambda a: a @ w.T + w.sum())(v)
    torch.testing.assert_close(full(got), torch.vmap(lambda a: a @ X.T + X.sum())(v))
    with pytest.raises(NotImplementedError, match=r"inside torch.func.vmap"):
        torch.vmap(lambda a: a * 2)(w)
    with fallbacks():
        rows = torch.vmap(lambda i: Row.apply(w, i))(torch.tensor([2, 0]))
    torch.testing.assert_close(full(rows), X[[2, 0]])


@on_ranks(2)
def test_modules_to_meta_lazy_modules_and_sparse_embeddings():
    module = net(line()).to("meta")
    specs = [p.spec for p in module.parameters()]
    assert all(p.is_meta for p in module.parameters())
    assert [p.spec for p in module.to_empty(device="cpu").parameters()] == specs
    assert not any(p.is_meta for p in module.parameters())

    def lazy(_, x):
        torch.manual_seed(0)
        module = nn.LazyLinear(3).double()
        return backward(module, x)

    both(lazy)
    table, ids = randn(7, 4, seed=3), torch.tensor([1, 3, 3, 6])
    for placement in (S0, S1, R):
        for sparse in (nn.Embedding, nn.EmbeddingBag):
            grads = []
            for w in (table.clone(), place(table, line(), [placement])):
                module = sparse(7, 4, sparse=True, _weight=w)
                given = ids.view(2, 2) if sparse is nn.EmbeddingBag else ids
                module(given).square().sum().backward()
                grads.append(module.weight.grad)
            torch.testing.assert_close(full(grads[1]), grads[0].to_dense())


@on_ranks(2)
def test_copies_from_torch_and_memory_of_another():
    x = place(X, line(), [S0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises clone()
        for copied in (torch.tensor, torch.as_tensor, X.new_tensor):
            y = copied(x)
            assert y.spec is x.spec
            assert torch.equal(y.full_tensor(), X)
        assert torch.equal(torch.Tensor(x.float()).full_tensor(), X.float())
        assert torch.tensor(x, dtype=torch.float32).dtype == torch.float32
        assert torch.as_tensor(x, dtype=torch.float32).spec.dtype == torch.float32
        assert not torch.tensor(x.requires_grad_()).requires_grad
    with pytest.raises(RuntimeError, match="reached a DistTensor below"):
        torch.as_tensor(x, dtype=torch.float32)  # its gradient would be lost
    y = place(X * 2, line(), [S1])
    assert y.set_(x.detach()) is y
    assert y.spec is x.spec
    y.mul_(3)
    assert torch.equal(x.detach().full_tensor(), X * 3)
    for wrong in (X, X.untyped_storage(), x.detach().float()):
        with pytest.raises((TypeError, RuntimeError), match=r"set_ of f64\[5@"):
            y.set_(wrong)


@on_ranks(2)
def test_batched_gradients():
    v = randn(3, 5, 4, seed=4)
    x, plain = place(X, line(), [S0]).requires_grad_(), X.clone().requires_grad_()
    for weights in (v, place(v, line(), [S1])):
        (got,) = torch.autograd.grad(x.sin(), x, weights, is_grads_batched=True)
        (want,) = torch.autograd.grad(plain.sin(), plain, v, is_grads_batched=True)
        torch.testing.assert_close(full(got), want)
    got = torch.autograd.functional.jacobian(lambda a: a.square().sum(0), x, vectorize=True)
    want = torch.autograd.functional.jacobian(lambda a: a.square().sum(0), plain, vectorize=True)
    torch.testing.assert_close(full(got), want)


@on_ranks(2)
def test_a_quantized_result_stays_plain():
    x, plain = place(X, line(), [S0]).float(), X.float()
    with warnings.catch_warnings(), fallbacks():
        warnings.simplefilter("ignore")  # torch means to give them up
        q = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
        want = torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    assert type(q) is torch.Tensor
    assert torch.equal(q.int_repr(), want.int_repr())
