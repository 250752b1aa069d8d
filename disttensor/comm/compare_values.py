"""Compares regular tensors that count as one global value, where they enter the program.

A batch of a rank's own (a loader with a DistributedSampler), or parameters of another seed, would
train replicas apart without a word. The ranks compare shapes, dtypes and a few elements, at the
calls 1, 2, 4, 8, ... of each line: the numbers of calls are equal on all ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from disttensor.comm.groups import Group
from disttensor.comm.objects import digest, gather_results
from disttensor.comm.process_group import is_fake
from disttensor.errors import user_line
from disttensor.torch_private import has_data, without_function_modes, without_modes

Tensor = torch.Tensor
_MOST = 64  # elements of a tensor that are compared
_TOLERANCE = 1e-2  # of the spread: ranks may compute one value with other roundings


def is_due(calls: int) -> bool:
    """Returns True for the calls 1, 2, 4, 8, ..."""
    return not calls & (calls - 1)


Sample = tuple[str, list[float]]  # of a tensor: shape and dtype, some elements


def are_alike(one: Sequence[Sample], other: Sequence[Sample]) -> bool:
    """Returns True if the tensors of two ranks differ by roundings at most."""
    if [kind for kind, _ in one] != [kind for kind, _ in other]:
        return False
    pairs = zip(one, other, strict=True)
    return all(a == b or _are_close(a, b, _roundings(kind)) for (kind, a), (_, b) in pairs)


def compare_values(who: str, values: Sequence[Tensor], group: Group) -> list[str]:
    """Returns an error for each of ``values``, regular tensors that count as global values: "" if
    the members have the same, else how they differ by shape, by dtype, or clearly by elements.
    Sends one message, which observers do not see."""
    if is_fake():
        return [""] * len(values)
    mine = [_sample(x) for x in values]
    with without_function_modes(), without_modes():
        everyone = gather_results(who, group, lambda: mine, seen=False)
    first, texts = everyone[0], [""] * len(values)
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        for i in range(len(values)):
            one, other = first[i : i + 1], theirs[i : i + 1]
            if not texts[i] and (len(first) != len(theirs) or not are_alike(one, other)):
                same = [kind for kind, _ in one] == [kind for kind, _ in other]
                shown = [_text(x[0] if x else None, same) for x in (one, other)]
                texts[i] = _error(who, group.ranks[0], shown[0], rank, shown[1])
    return texts


def _sample(x: Tensor) -> Sample:
    """Returns shape and dtype, and elements from the first to the last."""
    if not _is_readable(x):
        return _kind(x), []
    with without_function_modes():  # modes, as one that records a forward, see no read
        flat = x.detach()
        flat = torch.view_as_real(flat.resolve_conj()) if x.is_complex() else flat
        flat, last = flat.reshape(-1), flat.numel() - 1
        places = torch.linspace(0, last, min(last + 1, _MOST), dtype=torch.float64, device="cpu")
        return _kind(x), flat[places.long().to(flat.device)].double().tolist()


def digest_of(x: Tensor) -> tuple[str, str]:
    """Returns shape and dtype, and a digest of the values."""
    with without_function_modes():
        return _kind(x), digest(x) if _is_readable(x) else ""


def _kind(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


def _is_readable(x: Tensor) -> bool:
    """Returns True for a dense tensor with values: no tracer's, sparse, nested or quantized one."""
    odd = x.layout is not torch.strided or x.is_nested or x.is_quantized
    return not odd and bool(x.numel()) and not x.is_meta and has_data(x)


def _are_close(one: Sequence[float], other: Sequence[float], roundings: float) -> bool:
    """Returns True if the values differ by a part of their spread, and by ``roundings`` of the
    largest, at most. One large value says little of the spread of the others."""
    finite = [v for v in one if math.isfinite(v)] if roundings else []
    middle = statistics.median(finite or [0.0])
    spread = statistics.fmean([abs(v - middle) for v in finite] or [0.0])
    bound = _TOLERANCE * spread + roundings * max(map(abs, finite), default=0.0)
    return all(
        a == b or (a != a and b != b) or abs(a - b) <= bound
        for a, b in zip(one, other, strict=True)
    )


def _roundings(kind: str) -> float:
    """Returns how far, relative to a value, two ranks' results of one computation may differ."""
    dtype = getattr(torch, kind.rpartition(".")[2])
    rounds = dtype.is_floating_point or dtype.is_complex
    return min(64 * torch.finfo(dtype).eps, _TOLERANCE) if rounds else 0.0


def _text(x: Sample | None, same: bool) -> str:
    if x is None:
        return "one of another number of tensors"
    shown = ", ".join(f"{v:.4g}" for v in x[1][:3])
    return f"[{shown}, ...] in {x[0]}" if same else x[0]


def _error(who: str, first: int, one: str, rank: int, other: str) -> str:
    return (
        f"{who} at {user_line()}: a regular tensor is one global value, the same on every rank, "
        f"but it is {one} on rank {first}, and {other} on rank {rank}. If each rank has a batch of "
        "its own, give all ranks one batch: dt.shard_loader(loader, mesh) takes the place of a "
        "DistributedSampler and splits it; dt.from_local makes one tensor of pieces. If "
        "it is drawn or initialized, seed all ranks alike; src_rank=0 of dt.shard_tensor takes the "
        "value of one rank"
    )
