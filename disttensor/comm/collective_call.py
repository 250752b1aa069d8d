"""One collective of torch.distributed: recorded, compared, waited for, and its errors explained."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from disttensor.comm import blocked_wait, compare_collectives, failure_watch, log
from disttensor.comm.groups import Ended, Group
from disttensor.comm.work import Work
from disttensor.errors import MismatchError
from disttensor.observe import observers
from disttensor.torch_private import all_gather_single

Tensor = torch.Tensor
T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT, "any": dist.ReduceOp.MAX,
        "all": dist.ReduceOp.MIN}  # fmt: skip


@cache
def call_options(kind: str, async_op: bool, op: str = "") -> Any:
    """Returns the options argument of a process group's method. The methods are called directly,
    because torch.distributed's functions take a third of the time of a small collective."""
    options = getattr(c10d, kind)()
    options.asyncOp = async_op  # on NCCL: on a separate stream
    if op:
        options.reduceOp = _OPS[op]
    return options


def _announce(
    kind: str, group: Group, sent: Tensor, share: float, op: str, background: bool
) -> log.CommRecord | None:
    """Records that ``share`` of the bytes is sent, and compares ranks in debug mode."""
    entry = None
    if observers:
        nbytes = round(share * sent.nbytes)
        entry = log.record(kind, group.axes, nbytes, sent.shape, sent.dtype, background)
    if compare_collectives.enabled:
        shape = "pieces" if kind == "all_to_all" else tuple(sent.shape)  # piece sizes may differ
        compare_collectives.compare_collective(group, f"{kind}({op}) of {shape} {sent.dtype}")
    return entry


def call_error(kind: str, group: Group, error: Exception) -> Exception:
    if isinstance(group.pg, Ended):
        return group.pg.error()
    if isinstance(error, TypeError):
        return error
    return failure_watch.comm_error(
        f"{kind} over mesh axes {'+'.join(group.axes)} (ranks {list(group.ranks)}) failed on rank "
        f"{group.ranks[group.index]}: a rank of the group is gone, or called something else.", error
    )  # fmt: skip


def run(
    kind: str, group: Group, sent: Tensor, share: float, fn: Any, args: tuple[Any, ...],
    finish: Callable[[], T], op: str = "", seen: bool = True,
) -> T:  # fmt: skip
    """Records a collective, if it is ``seen``, runs it to its end, and returns the result of
    ``finish``."""
    if seen and (observers or compare_collectives.enabled):
        _announce(kind, group, sent, share, op, False)
    try:
        work = fn(*args)
        group.started[0] += 1
        if work is not None:
            wait(work, group, sent, kind, group.started[0])
    except MismatchError:
        raise
    except (RuntimeError, TypeError) as error:
        raise call_error(kind, group, error) from error
    return finish()


def wait(work: Any, group: Group, sent: Tensor, kind: str, number: int) -> None:
    if sent.is_cpu:
        blocked_wait.wait(work, group, kind, sent, number)
    else:  # on NCCL a wait with a time limit blocks the program
        work.wait()


def gather_rows(rows: Tensor, mine: Tensor, group: Group, kind: str) -> None:
    """Gathers the row ``mine`` of every member into ``rows``, in the order of the backend.
    Observers do not see the message."""
    work = all_gather_single(group.pg, rows, mine, call_options("AllgatherOptions", False))
    group.started[0] += 1
    if work is not None:
        wait(work, group, mine, kind, group.started[0])


def start(
    kind: str, group: Group, sent: Tensor, share: float, fn: Any, args: tuple[Any, ...],
    finish: Callable[[], T], op: str = "", into: T | None = None,
) -> Work[T]:  # fmt: skip
    """Starts a collective, and returns its Work. ``into``: the result of ``finish``, if known."""
    entry = None
    if observers or compare_collectives.enabled:
        entry = _announce(kind, group, sent, share, op, True)
    try:
        work = fn(*args)
    except (RuntimeError, TypeError) as error:
        raise call_error(kind, group, error) from error
    group.started[0] = number = group.started[0] + 1

    def end(kept: Any = args) -> T:  # keeps the tensors alive until the end
        if entry is not None:
            log.record_wait(entry)
        try:
            if work is not None:  # None: a collective of the user, which has ended
                wait(work, group, sent, kind, number)
        except MismatchError:
            raise
        except RuntimeError as error:
            raise call_error(kind, group, error) from error
        return finish()

    # On an accelerator the Work does not report whether it is done: the answer would differ between
    # ranks, and so would the order of the collectives of a program that acts on it. NCCL needs one
    # order.
    return Work(end, work.is_completed if sent.is_cpu and work is not None else None, into)
