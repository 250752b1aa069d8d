"""The world of the fuzzer's programs: the names that they use, on plain tensors or on DistTensors.

Data depend on the number of a tensor only, never on its placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import DistTensor, Partial, Placement, ProcessMesh, Replicate, Shard
from disttensor.attention import Balanced
from tests.support import oracle

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Program:
    """``lines``: statements; ``end``: how gradients are asked for; ``leaves``: names whose
    gradients are compared."""

    lines: tuple[str, ...]
    end: str = "backward"
    name: str = "program"

    def __str__(self) -> str:
        return "\n".join(["# " + self.name, *self.lines, f"# then: {self.end}"])


def numbers(number: int, shape: Sequence[int], high: int | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(
        int.from_bytes(
            hashlib.blake2b(repr((number, tuple(shape))).encode(), digest_size=6).digest(), "big"
        )
    )
    if high is not None:
        return torch.randint(0, high, tuple(shape), generator=draw)
    return torch.randn(tuple(shape), generator=draw, dtype=torch.float64)


KINDS = {
    "R": Replicate(),
    "P": Partial(),
    "Pavg": Partial("avg"),
    "Pmax": Partial("max"),
    "S0": Shard(0),
    "S1": Shard(1),
    "S2": Shard(2),
    "S3": Shard(3),
    **{f"B{d}": Balanced(d) for d in range(4)},
}


def placements(text: str) -> list[Placement]:
    return [KINDS[word] for word in text.split()]


@dataclass
class World:
    """The names that programs use beside torch and F; without a mesh they are about plain
    tensors."""

    mesh: ProcessMesh | None = None
    jitter: float = 0.0
    leaves: dict[int, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def names(self) -> dict[str, Any]:
        own = (
            "leaf",
            "data",
            "index",
            "plain",
            "const",
            "to",
            "full",
            "again",
            "mapped",
            "ckpt",
            "hook",
            "keep",
            "newleaf",
            "act",
        )
        return {"torch": torch, "F": F, **{name: getattr(self, name) for name in own}}

    def _given(self, value: Tensor, where: str) -> Any:
        if self.jitter and value.dtype.is_floating_point:
            value = value + self.jitter * torch.sin(
                torch.arange(value.numel(), dtype=torch.float64) * 7.3
            ).view(value.shape)
        return value if self.mesh is None else oracle.place(value, self.mesh, placements(where))

    def leaf(self, number: int, shape: Sequence[int], where: str) -> Any:
        x = self._given(numbers(number, shape), where).requires_grad_()
        self.leaves[number] = x
        return x

    def data(self, number: int, shape: Sequence[int], where: str) -> Any:
        return self._given(numbers(number, shape), where)

    def index(self, number: int, shape: Sequence[int], high: int, where: str) -> Any:
        value = numbers(number, shape, high)
        return value if where == "plain" else self._given(value, where)

    def plain(self, number: int, shape: Sequence[int]) -> Any:
        """A plain leaf, DistTensors or not."""
        x = numbers(number, shape).requires_grad_()
        self.leaves[number] = x
        return x

    def const(self, number: int, shape: Sequence[int]) -> Any:
        return numbers(number, shape)

    def to(self, x: Any, where: str) -> Any:
        if isinstance(x, DistTensor):
            return dt.reshard(x, self.mesh, placements(where))
        return x.view_as(x)

    def full(self, x: Any) -> Any:
        return x.full_tensor() if isinstance(x, DistTensor) else x

    def again(self, x: Any) -> Any:
        """Out and in: to_local, from_local."""
        if isinstance(x, DistTensor):
            return dt.from_local(x.to_local(), x.process_mesh, x.placements, shape=x.shape)
        return x.view_as(x)

    def mapped(self, x: Any) -> Any:
        """local_map of something linear and elementwise."""
        if isinstance(x, DistTensor):
            return dt.local_map(
                lambda t: t * 2.0, out_placements=list(x.placements), out_shapes=x.shape
            )(x)
        return x * 2.0

    def ckpt(self, fn: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(fn, *args, use_reentrant=False)

    def hook(self, x: Any, fn: Callable[[Any], Any]) -> None:
        x.register_hook(fn)

    def keep(self, x: Any) -> None:
        x.retain_grad()
        self.kept.append(x)

    def act(self, name: str, x: Any) -> None:
        """Does nothing: see ``fuzz_one_rank``."""

    def newleaf(self, number: int, x: Any) -> Any:
        y = x.detach().requires_grad_()
        self.leaves[number] = y
        return y


def execute(program: Program, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """(variables, gradients) after the program. Raises what it raises."""
    env = world.names()
    fixed = set(env)
    for i, line in enumerate(program.lines):
        exec(compile(line, f"<{program.name} line {i}: {line}>", "exec"), env)
    values = {k: v for k, v in env.items() if k not in fixed and isinstance(v, Tensor)}
    loss = env["loss"]
    leaves = {f"leaf {n}": x for n, x in world.leaves.items()}
    grads: dict[str, Any] = {}
    if program.end == "grad":
        targets = {**leaves, **{f"kept {i}": x for i, x in enumerate(world.kept)}}
        got = torch.autograd.grad(loss, list(targets.values()), allow_unused=True)
        return values, dict(zip(targets, got, strict=True))
    if program.end == "double":
        got = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        parts = [(g * g).sum() for g in got if g is not None and g.requires_grad]
        grads |= {
            f"first of {n}": None if g is None else g.detach()
            for n, g in zip(leaves, got, strict=True)
        }
        second = sum(parts[1:], start=parts[0]) if parts else None
        if second is not None:
            second.backward()
    elif program.end == "twice":
        loss.backward(retain_graph=True)
        for x in world.leaves.values():
            _ = x.grad
        loss.backward()
    else:
        loss.backward()
    grads |= {n: x.grad for n, x in leaves.items()}
    grads |= {f"kept {i}": x.grad for i, x in enumerate(world.kept)}
    return values, grads


def steady(program: Program) -> bool:
    """Do values and gradients of plain tensors stay put when the inputs change by rounding errors?
    (No ties at kinks.)"""

    def run(jitter: float) -> list[Any]:
        values, grads = execute(program, World(jitter=jitter))
        return [*values.values(), *grads.values()]

    return stays_put(run)


def stays_put(run: Callable[[float], list[Any]]) -> bool:
    """Does ``run(jitter)`` give the same tame numbers for no jitter and for a little?"""
    try:
        pairs = list(zip(run(0.0), run(1e-13), strict=True))
    except (RuntimeError, NameError, TypeError, ValueError, IndexError):
        return False
    for a, b in pairs:
        if a is None or b is None or not a.numel():
            continue
        a, b = a.detach().double(), b.detach().double()
        if a.shape != b.shape or not bool(a.isfinite().all()) or float(a.abs().max()) > 1e4:
            return False
        if not torch.allclose(a, b, rtol=1e-10, atol=1e-10):
            return False
    return True
