"""Announcements: what only the ranks of a mesh can know of a tensor, told to all others of the
world.

Shapes that depend on data, and values that everyone asks for. Every rank of the world takes part,
whether it tells or hears, so that the messages of all ranks are in step.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch

from disttensor.cache import cached
from disttensor.comm import collectives, p2p
from disttensor.layout import Layout


class Tensor(NamedTuple):
    """All that others need to know of a tensor of the mesh."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    requires_grad: bool


@cached(256)
def others(mesh: Any) -> list[int]:
    """The ranks of the world that are not in ``mesh``."""
    inside = set(mesh.ranks)
    return [r for r in range(collectives.world()[1]) if r not in inside]


def tell(mesh: Any, value: Any) -> None:
    """Called by all ranks of ``mesh`` with one picklable value: it reaches every other rank of the
    world."""
    rest = others(mesh)
    if not rest:
        return
    tag = p2p.next_tag()
    if collectives.world()[0] != mesh.ranks[0]:
        return
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(mesh.device)
    size = torch.tensor([len(payload)], device=mesh.device)
    for rank in rest:
        for part in (size, payload):
            p2p.send(part, rank, tag, f"an announcement of {mesh!r}")


def hear(mesh: Any) -> Any:
    """Called by all ranks outside ``mesh``: what its ranks tell."""
    tag, source, label = p2p.next_tag(), mesh.ranks[0], f"an announcement of {mesh!r}"

    def part(n: int, dtype: torch.dtype) -> torch.Tensor:
        return p2p.receive((n,), dtype, mesh.device, source, tag, label).wait()

    size = int(part(1, torch.int64))
    return pickle.loads(part(size, torch.uint8).cpu().numpy().tobytes())


def spread(mesh: Any, value: torch.Tensor | None, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """The plain ``value`` that the ranks of ``mesh`` hold, on every rank of the world."""
    rest = others(mesh)
    if not rest:
        assert value is not None
        return value
    tag, label = p2p.next_tag(), f"the value of a tensor on {mesh!r}"
    if value is None:
        return p2p.receive(shape, dtype, mesh.device, mesh.ranks[0], tag, label).wait()
    if collectives.world()[0] == mesh.ranks[0]:
        for rank in rest:
            p2p.send(value.detach(), rank, tag, label)
    return value


def described(value: Any) -> Any:
    """A result with a Tensor in place of each DistTensor: what ``tell`` sends of it."""
    spec = getattr(value, "spec", None)
    if spec is not None:
        return Tensor(tuple(spec.shape), spec.dtype, spec.layout, value.requires_grad)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return (
            [described(v) for v in value] if type(value) is list else tuple(map(described, value))
        )
    return value
