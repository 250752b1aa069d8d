"""Picklable objects, and values that only some ranks have: for set-up and checks, not for data.

What a few ranks know (of a tensor on their mesh, mostly) goes to all others of the world. Every
rank takes part, as a sender or a receiver, so that the numbers of messages stay in step.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from disttensor import callbacks
from disttensor.comm import collectives, p2p
from disttensor.comm.groups import Group
from disttensor.comm.process_group import is_fake, world

Tensor = torch.Tensor


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every member's picklable ``value``, in mesh order."""
    if group.size == 1:
        return [value]
    out: list[Any] = [None] * group.size
    # how much is sent differs between ranks, and is not counted
    unknown = torch.empty(0, device="cpu")
    fn: Any = dist.all_gather_object
    if is_fake():
        out, fn = [value] * group.size, _nothing
    args = out, value, group.pg
    return collectives.run("all_gather", group, unknown, 0, fn, args, lambda: group.to_members(out))


def _nothing(*_: Any) -> None:
    """A collective of a fake process group."""


def told(numbers: Tensor, mine: Sequence[float]) -> list[float]:
    """What ranks have told each other, for Python. ``mine``: what this rank said, which is all that
    there is in a fake process group."""
    return list(mine) if is_fake() else numbers.tolist()


def others(ranks: Sequence[int]) -> list[int]:
    """The ranks of the world that are not among ``ranks``."""
    inside = set(ranks)
    return [r for r in range(world()[1]) if r not in inside]


def send_object(value: Any, ranks: Sequence[int], device: torch.device) -> None:
    """Called by all ``ranks`` with one picklable value: every other rank of the world gets it by
    ``recv_object``."""
    rest = others(ranks)
    if not rest:
        return
    tag = p2p.next_tag()
    if world()[0] != ranks[0]:
        return
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([len(payload)], device=device)
    for i, part in enumerate((size, payload)):  # of two sizes, and so with two tags
        p2p.send(part, rest, tag + i, f"an object of ranks {list(ranks)}")


@contextlib.contextmanager
def sends_error(ranks: Sequence[int], device: torch.device) -> Iterator[None]:
    """Sends an error of the block, as ``send_object`` does: ``recv_object`` raises it on the other
    ranks, which wait for the result of the block."""
    try:
        yield
    except Exception as error:
        sent: Exception = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # some classes cannot be pickled
            sent = pickle.loads(pickle.dumps(error))
        send_object(sent, ranks, device)
        raise


def recv_object(ranks: Sequence[int], device: torch.device) -> Any:
    """Called by all ranks but ``ranks``: what those send. Raises it if it is an error."""
    callbacks.before_metadata_receive.get()()
    tag, label = p2p.next_tag(), f"an object of ranks {list(ranks)}"

    def part(i: int, n: int, dtype: torch.dtype) -> Tensor:
        return p2p.receive((n,), dtype, device, ranks[0], tag + i, label).wait()

    size = int(part(0, 1, torch.int64))
    value = pickle.loads(part(1, size, torch.uint8).cpu().numpy().tobytes())
    if isinstance(value, Exception):
        raise value
    return value


def broadcast_value(
    value: Tensor | None,
    ranks: Sequence[int],
    device: torch.device,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The plain ``value`` that ``ranks`` hold, on every rank of the world; None on the others."""
    rest = others(ranks)
    if not rest:
        assert value is not None
        return value
    tag, label = p2p.next_tag(), f"the value of a tensor on ranks {list(ranks)}"
    if value is None:
        return p2p.receive(shape, dtype, device, ranks[0], tag, label).wait()
    if world()[0] == ranks[0]:
        p2p.send(value.detach(), rest, tag, label)
    return value


def digest(x: Tensor) -> str:
    """Of the bytes: NaN equals itself, -0.0 is not 0.0."""
    x = x.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data: Any = x.reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
