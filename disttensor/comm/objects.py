"""Exchanges facts, and values that only some ranks have: for set-up and checks only.

Facts that a few ranks know (mostly about a tensor on their mesh) are sent to all other ranks of the
world. Every rank takes part, as a sender or a receiver, so that message numbers stay equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from disttensor import callbacks, observe
from disttensor.comm import p2p, safe_pickle, wire
from disttensor.comm.collective_call import gather_rows, run
from disttensor.comm.groups import Group
from disttensor.comm.process_group import is_fake, world
from disttensor.errors import MismatchError
from disttensor.torch_private import object_device

Tensor = torch.Tensor
T = TypeVar("T")


def gather_objects(
    value: Any, group: Group, any_class: bool = False, seen: bool = True
) -> list[Any]:
    """Returns every member's ``value``, in mesh order: facts, as ``safe_pickle`` lists their
    classes. ``any_class``: it may contain picklable objects of the user. ``seen``: by observers."""
    for o in observe.seeing_calls() if seen else ():
        o.exchange_objects()
    if group.size == 1:
        return [value]
    out: list[Any] = []
    # sizes differ between ranks and are not counted
    unknown = torch.empty(0, device="cpu")

    def fn() -> None:
        if is_fake():
            out[:] = [value] * group.size
        else:
            rows = _all_gather_bytes(pickle.dumps(value), group)
            out[:] = [safe_pickle.loads(row, any_class) for row in rows]

    return run("all_gather", group, unknown, 0, fn, (), lambda: group.to_members(out), seen=seen)


def _all_gather_bytes(mine: bytes, group: Group) -> list[bytes]:
    """Returns the bytes of every member, in the order of the backend."""
    data = _as_tensor(mine).to(object_device(group.pg))
    sizes = data.new_empty(group.size, dtype=torch.int64)
    gather_rows(sizes, sizes.new_tensor([len(mine)]), group, "exchange of facts")
    lengths = sizes.tolist()
    rows = data.new_empty(group.size, max(lengths))
    padded = torch.cat((data, data.new_zeros(max(lengths) - len(mine))))
    gather_rows(rows.view(-1), padded, group, "exchange of facts")
    return [row[:n].cpu().numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def gather_results(
    who: str, group: Group, run: Callable[[], T], kinds: Sequence[type[Exception]] = (),
    any_class: bool = False, seen: bool = True,
) -> list[T]:  # fmt: skip
    """Returns ``run()`` of every member, in mesh order. An error of one rank is raised on all, of
    the first class of ``kinds`` that it is an instance of, else of the last. Without ``kinds`` its
    own rank raises it unchanged, and the others RuntimeError. ``who``: the call, in errors.
    ``any_class``, ``seen``: as in ``gather_objects``. Raises MismatchError if the members are at
    different calls.
    """
    value, failure, error = None, None, None
    try:
        value = run()
    except Exception as caught:
        error, fitting = caught, [kind for kind in kinds if isinstance(caught, kind)]
        kind = (*fitting, *kinds[-1:], RuntimeError)[0]
        name = "" if type(caught) is kind else f"{type(caught).__name__}: "
        failure = kind, f"{name}{caught}"
    everyone = gather_objects((who, failure, value), group, any_class, seen)
    if any(theirs != who for theirs, *_ in everyone):
        calls = [f"rank {r}: {w}" for r, (w, *_) in zip(group.ranks, everyone, strict=True)]
        raise MismatchError(
            f"all ranks make the same calls in the same order, but they are at {', '.join(calls)}"
        )
    for rank, (_, failed, _) in zip(group.ranks, everyone, strict=True):
        if failed is not None:
            if error is not None and not kinds:
                raise error
            where = f" (rank {rank})" if group.size > 1 else ""
            raise failed[0](f"{who}{where}: {failed[1]}") from error
    return [theirs for *_, theirs in everyone]


def run_on_all_ranks(
    who: str, group: Group, run: Callable[[], T], kinds: Sequence[type[Exception]] = (),
    seen: bool = True,
) -> T:  # fmt: skip
    """Returns ``run()``; an error of one rank is raised on all, as by ``gather_results``."""
    results: list[T] = []
    gather_results(who, group, lambda: results.append(run()), kinds, seen=seen)
    return results[0]


def received_numbers(numbers: Tensor, mine: Sequence[float]) -> list[float]:
    """Returns exchanged numbers as a list. In a fake process group, where nothing is received,
    these are ``mine``, the numbers of this rank."""
    return list(mine) if is_fake() else numbers.tolist()


def other_ranks(ranks: Sequence[int]) -> list[int]:
    """Returns the ranks of the world that are not among ``ranks``."""
    inside = set(ranks)
    return [r for r in range(world()[1]) if r not in inside]


def send_object(
    value: Any, ranks: Sequence[int], device: torch.device, any_class: bool = False
) -> None:
    """Sends facts to every other rank of the world, which calls ``recv_object``. All ``ranks`` call
    this with the same value. ``any_class``: as in ``gather_objects``."""
    rest = other_ranks(ranks)
    if not rest:
        return
    data, failure = pickle.dumps(value), None
    try:
        safe_pickle.loads(data, any_class)
    except pickle.UnpicklingError as error:  # the other ranks wait: they get the error
        failure = error
        data = pickle.dumps(failure)
    tag = p2p.next_tag()
    if world()[0] == ranks[0]:
        payload = _as_tensor(data).to(device)
        size = torch.tensor([len(payload)], device=device)
        for i, part in enumerate((size, payload)):  # two sizes, so two tags
            p2p.send(part, rest, tag + i, f"an object of ranks {list(ranks)}")
    if failure is not None:
        raise failure


@contextlib.contextmanager
def send_errors(ranks: Sequence[int], device: torch.device) -> Iterator[None]:
    """Sends an error of the block, as ``send_object`` does: ``recv_object`` raises it on the other
    ranks, which wait for the result of the block."""
    try:
        yield
    except Exception as error:
        sent: Exception = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # some cannot be sent
            sent = safe_pickle.loads(pickle.dumps(error))
        send_object(sent, ranks, device)
        raise


def recv_object(ranks: Sequence[int], device: torch.device, any_class: bool = False) -> Any:
    """Returns, or raises if it is an error, the object that ``ranks`` send to all other ranks.
    ``any_class``: as in ``gather_objects``."""
    callbacks.before_metadata_receive.get()()
    tag, label = p2p.next_tag(), f"an object of ranks {list(ranks)}"

    def part(i: int, n: int, dtype: torch.dtype) -> Tensor:
        return p2p.receive((n,), dtype, device, ranks[0], tag + i, label).wait()

    size = int(part(0, 1, torch.int64))
    data = part(1, size, torch.uint8).cpu().numpy().tobytes()
    value = safe_pickle.loads(data, any_class)
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
    """Returns the regular tensor ``value`` of ``ranks`` on every rank; other ranks pass None."""
    rest = other_ranks(ranks)
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
    """Hashes the bytes of x: NaN equals itself, -0.0 differs from 0.0."""
    data: Any = bytes_of(x).numpy()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def bytes_of(x: Tensor) -> Tensor:
    """Returns the bytes of x on the CPU, in order of the elements. They may share its memory."""
    return wire.as_bytes(wire.dense(x).cpu())
