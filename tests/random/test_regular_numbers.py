"""Numbers that torch draws for regular tensors in calls on DistTensors: equal on all ranks, however
torch's own generators stand, and the generators stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributions import Distribution
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from disttensor.api.create import from_fn
from disttensor.random import counter
from disttensor.random.draws import fork_generators
from tests.support.oracle import grid, line
from tests.support.pool import on_ranks, run_on_ranks

D = torch.distributions
R, S0 = Replicate(), Shard(0)


class NoisyGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g + torch.randn_like(g)


class NoisyGradOfContext(NoisyGrad):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(True)


def backward_of(kind: Any, layers: int = 1, recompute: bool = False) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        v = x.detach().requires_grad_()
        y = v
        for _ in range(layers):
            y = checkpoint(kind.apply, y, use_reentrant=False) if recompute else kind.apply(y)
        y.sum().backward(retain_graph=True)
        first = v.grad.full_tensor().clone()
        y.sum().backward()
        return torch.stack([y.detach().full_tensor(), first, v.grad.full_tensor()])

    return run


def pruned(how: Any, **options: Any) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        module = nn.Module()
        module.weight = nn.Parameter(x.detach())
        how(module, "weight", 0.5, **options)
        return module.weight_mask

    return run


def into(function: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
    """The call with ``out=``, a tensor of the layout of x and of a dtype."""
    dtype = options.pop("dtype", torch.float64)
    return lambda x: function(*args, **options, out=torch.zeros_like(x[:, 0], dtype=dtype))


# Each gets a DistTensor of 0.3, 6 x 5.
CALLS: dict[str, Callable[[Any], Any]] = {
    "custom function": backward_of(NoisyGrad),
    "two custom functions": backward_of(NoisyGrad, 2),
    "custom function with a context": backward_of(NoisyGradOfContext),
    "recomputed custom function": backward_of(NoisyGrad, 2, recompute=True),
    "svd_lowrank": lambda x: torch.svd_lowrank(x + torch.eye(6, 5), 3)[1],
    "pca_lowrank": lambda x: torch.pca_lowrank(x + torch.eye(6, 5), 3)[1],
    "lobpcg": lambda x: torch.lobpcg(x @ x.T + torch.eye(6).double(), k=1, niter=2)[1],
    "random_structured": pruned(prune.random_structured, dim=1),
    "random_unstructured": pruned(prune.random_unstructured),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        torch.arange(180.0).view(6, 5, 6) * x[:, :, None], 2, output_size=(3, 3)
    ),
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda x: nn.init.sparse_(x, 0.4),
    "rand": into(torch.rand, 6),
    "randn": into(torch.randn, (6,)),
    "normal": into(torch.normal, 1.0, 2.0, (6,)),
    "normal of a tensor": into(torch.normal, torch.zeros(6).double(), 2.0),
    "randint": into(torch.randint, 3, 70, (6,), dtype=torch.int32),
    "randperm": into(torch.randperm, 6, dtype=torch.int64),
    "bernoulli": into(torch.bernoulli, torch.full((6,), 0.5).double()),
    "multinomial": into(torch.multinomial, torch.ones(9), 6, dtype=torch.int64),
    "poisson": lambda x: torch.poisson(x * 9),
    "binomial": lambda x: torch.binomial(x * 0 + 9, x),
}  # fmt: skip

# Each gets a row of 0.3 of 5 elements.
DISTRIBUTIONS: dict[str, Callable[[Any], Distribution]] = {
    "Bernoulli": D.Bernoulli, "Categorical": D.Categorical, "Dirichlet": D.Dirichlet,
    "Beta": lambda x: D.Beta(x, x), "Binomial": lambda x: D.Binomial(9, x),
    "Cauchy": lambda x: D.Cauchy(x, x), "Chi2": D.Chi2,
    "ContinuousBernoulli": D.ContinuousBernoulli, "Exponential": D.Exponential,
    "FisherSnedecor": lambda x: D.FisherSnedecor(x + 1, x + 2), "Gamma": lambda x: D.Gamma(x, x),
    "GeneralizedPareto": lambda x: D.GeneralizedPareto(x, x, x), "Geometric": D.Geometric,
    "Gumbel": lambda x: D.Gumbel(x, x), "HalfCauchy": D.HalfCauchy, "HalfNormal": D.HalfNormal,
    "Independent": lambda x: D.Independent(D.Normal(x, x), 1),
    "InverseGamma": lambda x: D.InverseGamma(x + 3, x),
    "Kumaraswamy": lambda x: D.Kumaraswamy(x, x), "Laplace": lambda x: D.Laplace(x, x),
    "LKJCholesky": lambda x: D.LKJCholesky(3, x[:1]), "LogNormal": lambda x: D.LogNormal(x, x),
    "LogisticNormal": lambda x: D.LogisticNormal(x, x),
    "LowRank": lambda x: D.LowRankMultivariateNormal(x, x[:, None], x),
    "Mixture": lambda x: D.MixtureSameFamily(D.Categorical(x), D.Normal(x, x)),
    "Multinomial": lambda x: D.Multinomial(9, x),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, torch.eye(5).double()),
    "NegativeBinomial": lambda x: D.NegativeBinomial(x + 5, x), "Normal": lambda x: D.Normal(x, x),
    "OneHot": D.OneHotCategorical, "OneHotGradient": D.OneHotCategoricalStraightThrough,
    "Pareto": lambda x: D.Pareto(x, x), "Poisson": D.Poisson,
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(x[:1], x),
    "RelaxedOneHot": lambda x: D.RelaxedOneHotCategorical(x[:1], x),
    "StudentT": D.StudentT, "Uniform": lambda x: D.Uniform(x, x + 1),
    "Transformed": lambda x: D.TransformedDistribution(
        D.Uniform(x, x + 1), [D.transforms.ExpTransform()]),
    "VonMises": lambda x: D.VonMises(x, x), "Weibull": lambda x: D.Weibull(x, x),
    "Wishart": lambda x: D.Wishart(x[:1] + 5, torch.eye(3).double()),
}  # fmt: skip


def sampled(name: str) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        made = DISTRIBUTIONS[name](x[0])
        drawn = [made.sample()]
        if made.has_rsample:
            drawn.append(made.rsample((3,)))
        return torch.cat([v.full_tensor().double().flatten() for v in drawn])

    return run


ALL = CALLS | {f"{name}.sample": sampled(name) for name in DISTRIBUTIONS}


def drawn(placements: Any) -> dict[str, Tensor]:
    """Draws by each call twice. Each rank has drawn other numbers of its own before."""
    mesh, out = line(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, call in ALL.items():
            torch.manual_seed(3)
            torch.rand(mesh.coordinate[0])  # type: ignore[index]
            before = torch.default_generator.get_state()
            x = dt.shard_tensor(torch.full((6, 5), 0.3).double(), mesh, placements)
            twice = [call(x.clone()), call(x.clone())]
            assert torch.equal(before, torch.default_generator.get_state()), name
            values = [(v.full_tensor() if isinstance(v, dt.DistTensor) else v) for v in twice]
            out[name] = torch.stack(values).detach().double()
            if name not in ("lobpcg", "svd_lowrank", "pca_lowrank"):  # almost the same results
                assert not torch.equal(*values), f"{name} repeats its numbers"
            out[f"count after {name}"] = torch.tensor(counter.get_state()[1])
    return out


@pytest.mark.parametrize("placements", [[R], [S0]], ids=str)
def test_all_ranks_and_meshes_draw_the_same_numbers(placements: Any) -> None:
    (alone,) = run_on_ranks(1, drawn, placements)
    ranks = run_on_ranks(2, drawn, placements)
    for name, want in alone.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        if name != "rrelu" or placements == [R]:  # its pieces differ, as those of dropout
            torch.testing.assert_close(ranks[0][name], want, msg=name)


@on_ranks(2)
def test_blocks_that_nest_draw_different_numbers() -> None:
    mesh = line()
    x = dt.ones(40, mesh=mesh)
    found = []
    for _ in range(2):
        with fork_generators(mesh):
            found.append(torch.rand(40))
            with fork_generators(mesh):
                found.append(torch.rand(40))
            with dt.random.rng("fast"):
                found.append(torch.rand_like(x).full_tensor())
            found.append(torch.rand(40))
    for i, first in enumerate(found):
        assert not any(torch.equal(first, other) for other in found[i + 1 :])


OFF_MESH = (
    "custom function", "gumbel_softmax", "random_structured", "randn", "binomial", "rsample",
    "svd_lowrank",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@on_ranks(2)
def test_a_rank_off_the_mesh_counts_the_same_calls() -> None:
    x = dt.shard_tensor(torch.full((6, 5), 0.3).double(), ProcessMesh([0]), [R])
    for name in OFF_MESH:
        torch.manual_seed(3)
        torch.rand(dist.get_rank())
        if name == "custom function":
            NoisyGrad.apply(x)
        elif name == "rsample":
            D.Gumbel(x[0], x[0], validate_args=False).rsample()
        else:
            CALLS[name](x)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, counter.get_state())
        assert everyone[0] == everyone[1], name
        assert everyone[0][1] > 0, name


def noise(shape: Any, *, dtype: Any, device: Any) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


@on_ranks(4)
def test_a_rank_with_an_empty_piece_of_a_users_factory_counts_the_same_calls() -> None:
    mesh = grid()
    for placements in ((S0, S0), (R, S0), (S0, Shard(1))):
        for shape in ((1, 3), (2, 1), (0, 3)):
            torch.manual_seed(3)
            made = from_fn(noise, mesh, placements, shape)
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, counter.get_state())
            assert everyone == [(3, int(made.numel() > 0))] * 4, (placements, shape)


@on_ranks(2)
def test_out_has_the_precision_and_the_errors_of_torch() -> None:
    x = dt.zeros(5, mesh=line(), placements=[S0], dtype=torch.float64)
    assert torch.equal(
        torch.linspace(0, 0.3, 5, out=x).full_tensor(),
        torch.linspace(0, 0.3, 5, dtype=torch.float64),
    )
    a, b = torch.rand(3), torch.rand(3)
    both = dt.zeros(3, mesh=line()), dt.zeros(3, mesh=line(), dtype=torch.int64)
    torch.max(torch.stack([a, b]), 0, out=both)
    assert torch.equal(both[0].full_tensor(), torch.maximum(a, b))
    with pytest.raises(RuntimeError, match=r"can't be cast|Float"):
        torch.add(a, b, out=dt.zeros(3, mesh=line(), dtype=torch.int64))
    with pytest.raises(RuntimeError, match="shape"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.randn(4, out=x)


@on_ranks(2)
def test_compare_regular_names_the_call_and_the_ranks() -> None:
    x = dt.ones(4, mesh=line(), placements=[S0])
    same, own = torch.arange(4.0), torch.full((4,), float(dist.get_rank()))
    with dt.debugging.compare_regular():
        F.linear(x + same, torch.eye(4), bias=same).sum()
        own.clone().copy_(x)
        torch.add(x, same, out=own.clone())
        with pytest.raises(dt.errors.MismatchError, match=r"add.* at .*regular tensor 1 differs"):
            x + own
        with pytest.raises(dt.errors.MismatchError, match=r"linear.* at .*regular tensor 2"):
            F.linear(x, torch.eye(4), bias=own)


@on_ranks(2)
def test_a_seed_given_again_restarts_ranks_that_have_drawn() -> None:
    x = dt.ones(20, mesh=line())
    for seed in (torch.manual_seed, torch.default_generator.manual_seed):
        found = []
        for _ in range(2):
            seed(5)
            torch.rand(dist.get_rank())
            found.append(torch.rand_like(x).full_tensor())
            torch.rand_like(x)
        assert torch.equal(*found)
    count = counter.get_state()
    torch.Generator().manual_seed(5)
    assert counter.get_state() == count
