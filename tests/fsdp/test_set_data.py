"""``p.data = value`` and ``p.set_(value)`` under shard_data_parallel, of a value in another layout;
parameters that keep their dtype, and parameters without sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import STAGES, full, line, mlp, squares, usable, ways

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_data_of_another_layout_is_resharded(stage: int | None) -> None:
    model = dt.shard_data_parallel(mlp(), line(), **ways(stage))
    squares(model, dt.shard_tensor(randn(5, 6), line(), [S0]))
    value = randn(7, 6, seed=3)
    for placement in (S1, R, S0):
        for change in ("data", "set_"):
            p: Any = model[0].weight
            spec, given = p.spec, dt.shard_tensor(value, line(), [placement])
            with torch.no_grad():
                p.set_(given) if change == "set_" else setattr(p, "data", given)
            assert p is model[0].weight and p.spec is spec and torch.equal(full(p), value)
            usable(model)
            if placement is S1:  # in one process it would have the new values
                with torch.no_grad():
                    p.mul_(2)
                with pytest.raises(RuntimeError, match="set_"):
                    given + 1
    with pytest.raises(RuntimeError, match="the mesh, the shape and the dtype stay"):
        model[0].weight.data = dt.ones(3, mesh=line())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_vectors_are_written_back(stage: int | None) -> None:
    model = dt.shard_data_parallel(mlp(), line(), **ways(stage))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    found = torch.cat([full(p).flatten() for p in model.parameters()])
    assert torch.equal(found, full(vector) * 2)
    usable(model)


class Double(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_parametrizations_can_be_removed(stage: int | None) -> None:
    model = nn.Linear(4, 6).double()
    parametrize.register_parametrization(model, "weight", Double())
    value = model.weight.detach()
    dt.shard_data_parallel(model, line(), **ways(stage))
    parametrize.remove_parametrizations(model, "weight", leave_parametrized=True)
    assert torch.allclose(full(model.weight), full(dt.shard_tensor(value, line(), src_rank=0)))


@on_ranks(2)
def test_numbers_of_8_bits_keep_their_dtype() -> None:
    model = nn.Linear(4, 6)
    model.code = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    dt.shard_data_parallel(model, line(), param_dtype=torch.bfloat16)
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append((m.code.dtype, m.weight.dtype)))
    model(dt.ones(3, 4, mesh=line(), placements=[S0]))
    assert seen == [(torch.float8_e4m3fn, torch.bfloat16)]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_lazy_parameters_are_named(stage: int | None) -> None:
    with pytest.raises(ValueError, match=r"'0.weight' is lazy.*call the module once"):
        dt.shard_data_parallel(nn.Sequential(nn.LazyLinear(3)), line(), **ways(stage))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_write_to_one_parameter_between_two_forwards(stage: int | None) -> None:
    """Other parameters of the segment keep the values that the first graph has saved."""

    def losses(model: nn.Module, x: Any) -> list[Any]:
        first: Any = model[0]
        total = model(x).square().sum()
        with torch.no_grad():
            first.weight.add_(0.1)
        total = total + model(x).square().sum()
        total.backward()
        return [full(total), *[full(p.grad) for p in model.parameters()]]

    torch.manual_seed(0)
    plain = mlp()
    torch.manual_seed(0)
    model = dt.shard_data_parallel(mlp(), line(), **ways(stage))
    x = randn(5, 6)
    want, got = losses(plain, x), losses(model, dt.shard_tensor(x, line(), [S0]))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    y = model(dt.shard_tensor(x, line(), [S0])).square().sum()
    with torch.no_grad():
        model[2].weight.add_(0.1)  # saved by the graph
    if stage is not None:
        model(dt.shard_tensor(x, line(), [S0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
