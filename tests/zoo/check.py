"""A network on ranks against plain torch: every number of its output, and the gradient of every
parameter."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import disttensor as dt

Batch = dict[str, Any]
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}  # models compute in float32 by themselves


class WrongError(Exception):
    """A value or a gradient differs."""


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(where, tensor) in an output: dicts, sequences and objects with ``items``, in order."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors(item, f"{path}[{i}]")
    elif hasattr(value, "items"):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}".strip("."))


def loss_of(output: Any) -> torch.Tensor:
    """A sum in which every number of the output counts differently."""
    total: Any = 0.0
    for _, x in tensors(output):
        if x.is_floating_point() and x.requires_grad:
            weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
            total = total + (x * weights).sum() / max(x.numel(), 1) ** 0.5
    if not isinstance(total, torch.Tensor):
        raise ValueError("no output has a gradient")
    return total


def run(model: nn.Module, batch: Batch) -> Any:
    """The output, after a backward. Random numbers, if there are any, start anew."""
    torch.manual_seed(5)
    output = model(**batch)
    loss_of(output).backward()
    return output


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, dt.DistTensor) else x).detach()


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, to the largest number. Where one is not finite, both are."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = got.to(torch.complex128), want.to(torch.complex128)
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    got, want = (x.where(x.isfinite(), 0) for x in (got, want))
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))


def compare(mine: nn.Module, output: Any, plain: nn.Module, expected: Any, most: float) -> None:
    """``most``: of a difference. Raises WrongError, which names what differs most."""
    pairs = zip(tensors(output), tensors(expected), strict=True)
    found = [(distance(whole(x), y.detach()), f"output {name}") for (name, x), (_, y) in pairs]
    grads = [p.grad for p in plain.parameters() if p.grad is not None and p.numel()]
    largest = max(float(grad.abs().max()) for grad in grads)
    for (name, p), (_, q) in zip(mine.named_parameters(), plain.named_parameters(), strict=True):
        if q.grad is None or p.grad is None:
            some = q.grad if p.grad is None else whole(p.grad)
            found.append((float("inf") if some is not None and some.any() else 0.0, f"d {name}"))
            continue
        got, want = whole(p.grad), q.grad
        rounding = not want.numel() or float(want.abs().max()) < 1e-4 * most * largest
        found.append((0.0 if rounding else distance(got, want), f"gradient of {name}"))
    wrong = sorted((pair for pair in found if not pair[0] <= most), reverse=True)
    if wrong:
        size, where = wrong[0]
        raise WrongError(f"{len(wrong)} of {len(found)} differ, most {where}: {size:.2g}")


@functools.lru_cache(maxsize=1)
def in_plain_torch(recipe: Any) -> tuple[nn.Module, Batch, Any]:
    """Kept from one axis to the next."""
    model, batch = recipe.build()
    return model, batch, run(model, batch)


def on_rank(recipe: Any, axis: str) -> int:
    """On each of two ranks. ``axis``: dp splits the batch, tp the parameters, by the proposed plan
    (dim 0 of each matrix where it proposes nothing), stage 3 both the batch and the parameters.

    Returns how many parameters are split. Raises WrongError, and what the runtime raises.
    """
    plain, _, expected = in_plain_torch(recipe)
    dtype = next(p.dtype for p in plain.parameters() if p.is_floating_point())
    model, mine, splits = placed(recipe, axis)
    compare(model, run(model, mine), plain, expected, TOLERANCE[dtype])
    return splits


def placed(recipe: Any, axis: str) -> tuple[nn.Module, Batch, int]:
    """The model and the batch on the mesh, and how many parameters are split."""
    plain, batch, _ = in_plain_torch(recipe)
    try:
        model = copy.deepcopy(plain)
    except (RuntimeError, TypeError):  # it keeps what it computed, or has no copy
        model = recipe.build()[0]
    return model, *place(model, batch, axis)


def place(model: nn.Module, batch: Batch, axis: str) -> tuple[Batch, int]:
    """Places the model. Returns the batch on its mesh, and how many parameters are split."""
    mesh = dt.ProcessMesh([0, 1], ("tp",) if axis == "tp" else ("dp",))
    plan = dict(dt.plans.megatron(model, "tp", mesh)) if axis == "tp" else {}
    if axis == "tp" and not any(map(_splits, plan.values())):
        plan = {name: [dt.Shard(0)] for name, p in model.named_parameters() if p.ndim > 1}
    if axis == "stage 3":
        dt.shard_data_parallel(model, mesh, shard_axis="dp")
    else:
        dt.shard_module(model, mesh, plan)
    cut = dt.Replicate() if axis == "tp" else dt.Shard(0)
    mine = {
        key: dt.shard_tensor(x, mesh, [cut if x.ndim else dt.Replicate()])
        for key, x in batch.items()
    }
    return mine, sum(map(_splits, plan.values()))


def compiled_on_rank(recipe: Any, axis: str, backend: str) -> tuple[int, list[str], list[str]]:
    """On each of two ranks, under ``dt.compile``: the second and the third call have the bits of
    the first, which runs eagerly, and the numbers of plain torch. Returns how many calls were
    compiled, why others were not, and the breaks. Raises WrongError."""
    plain, _, expected = in_plain_torch(recipe)
    dtype = next(p.dtype for p in plain.parameters() if p.is_floating_point())
    model, batch, _ = placed(recipe, axis)
    torch._dynamo.reset()
    forward = dt.compile(model, backend=backend).forward
    first: Any = None
    for _ in range(3):
        model.zero_grad()
        output = run(model, batch)
        found = [(f"output {name}", whole(x)) for name, x in tensors(output)]
        found += [
            (f"gradient of {name}", whole(p.grad))
            for name, p in model.named_parameters()
            if p.grad is not None
        ]
        first = first or {name: x.clone() for name, x in found}
        wrong = [name for name, x in found if name not in first or not same_bits(x, first[name])]
        if wrong or len(found) != len(first):
            raise WrongError(f"{len(wrong)} of {len(found)} of {len(first)} differ: {wrong[:3]}")
    compare(model, output, plain, expected, TOLERANCE[dtype])
    return forward.replays, forward.why(), forward.breaks()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN is NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _splits(placements: Any) -> bool:
    return any(isinstance(p, dt.Shard) for p in placements)
