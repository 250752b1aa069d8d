"""The same training loop in one process and on ranks, under shard_data_parallel: losses, gradients
and parameters are compared.

A case is a function that makes a float64 model and a step (forward, loss, backward) of that model;
both run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import DistTensor, Partial, ProcessMesh, Replicate, Shard
from tests.support.oracle import randn

Tensor = torch.Tensor
Step = Callable[[nn.Module, Any], Tensor]
STAGES = (1, 2, 3, None)  # None: plain data parallelism
R, S0, S1 = Replicate(), Shard(0), Shard(1)
EACH = ["0", "2", "4"]  # a segment for each layer of ``mlp``
stages = pytest.mark.parametrize("stage", STAGES)


def mesh_of(shape: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None = None) -> Any:
    order = torch.arange(torch.Size(shape).numel()) if ranks is None else torch.tensor(ranks)
    return ProcessMesh(order.reshape(*shape), tuple(names))


def line() -> Any:
    return mesh_of((2,), ("fsdp",))


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)
    ).to(dtype)


def ways(stage: int | None) -> dict[str, Any]:
    """Options of shard_data_parallel."""
    return {"shard_axis": None} if stage is None else {"stage": stage}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def full(x: Any) -> Any:
    if x is None:
        return None
    return (x.full_tensor() if isinstance(x, DistTensor) else x).detach().clone()


def squares(model: nn.Module, x: Any) -> Tensor:
    loss = model(x).square().sum()
    loss.backward()
    return loss


def gradients(model: nn.Module) -> dict[str, Any]:
    """name -> whole gradient or None; every rank of the mesh asks for the same ones."""
    return {name: full(p.grad) for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, Any]:
    return {name: full(p) for name, p in model.named_parameters()}


def train(
    model: nn.Module, step: Step, batches: Sequence[Any], optimizer: Any = sgd, zero: Any = True
) -> list[Any]:
    """Per step: loss, gradients; then the parameters. ``zero``: set_to_none, or None for no
    zero_grad."""
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    out: list[Any] = []
    for batch in batches:
        if zero is not None:
            opt.zero_grad(set_to_none=zero)
        loss = step(model, batch)
        out.append((full(loss), gradients(model)))
        opt.step()
    return [*out, values(model)]


def check(
    make: Callable[[], nn.Module], step: Step = squares, *, mesh: ProcessMesh,
    split: Sequence[Any] | None = None,
    shape: Sequence[int] = (5, 6), steps: int = 3, optimizer: Any = sgd, zero: Any = True,
    plan: Mapping[str, Any] | None = None, batches: Any = None, tolerance: float = 1e-9,
    **options: Any,
) -> nn.Module:  # fmt: skip
    """Train in one process and on ``mesh``; ``split``: placements of the batches. Gives the module
    on the ranks."""
    batches = batches or [randn(*shape, seed=i) for i in range(steps)]
    torch.manual_seed(0)
    want = train(make(), step, batches, optimizer, zero)
    torch.manual_seed(0)
    model = make()
    if plan is not None:
        dt.shard_module(model, mesh, plan)
    dt.shard_data_parallel(model, mesh, **options)
    held = list(model.parameters())
    placed = [dt.shard_tensor(b, mesh, split or over(mesh)) for b in batches]
    got = train(model, step, placed, optimizer, zero)
    compare(got, want, tolerance)
    at_rest(model, held)
    return model


def over(mesh: ProcessMesh) -> list[Any]:
    """Batches over all axes but "tp"."""
    return [Replicate() if name == "tp" else Shard(0) for name in mesh.dim_names]


def compare(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def engine(model: nn.Module) -> Any:
    return model.__dict__["_data_parallel"]


def at_rest(model: nn.Module, held: Sequence[Any]) -> None:
    """The module holds its shards, nothing is gathered, no gradient is left behind."""
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    for segment in engine(model).segments:
        assert not segment.is_visible and not segment.busy, segment.name
        if not segment.persist:
            assert not any(
                b.is_gathered or b.memory.untyped_storage().nbytes() for b in segment.buffers
            )
        for param in segment.params:
            assert not param.is_copy or not param.has_grads(), param.name
    for p in held:
        assert p.grad is None or not any(isinstance(x, Partial) for x in p.grad.placements)


def usable(model: nn.Module, make: Callable[[], nn.Module] = mlp) -> None:
    """The next step is right, whatever happened before."""
    plain = make()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(full(q))
            q.grad = None
    x = randn(5, 6, seed=9)
    want = squares(plain, x).detach(), gradients(plain)
    got = full(squares(model, dt.shard_tensor(x, line(), [S0]))), gradients(model)
    compare(got, want)
    at_rest(model, list(model.parameters()))
