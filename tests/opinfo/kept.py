"""Which functions keep a sharding without communication, where that is natural.

    python -m tests.opinfo.kept                       a table of every OpInfo in float32
    python -m tests.opinfo.kept --ops add,bmm --all   a line for each sample and dim

A dim of the first tensor is *independent* in a call if the call on slices along it (the other
tensors sliced too, or whole) gives slices of the results: put together along a dim of each, they
are what the call on the whole gives, wherever the cut is. This is found with plain torch. On a mesh
of two ranks the call must then keep ``Shard`` on that dim, of each result, with zero bytes moved;
one rank is enough to see that: the other one is not there (torch's fake process group).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttensor as dt
from disttensor import Replicate, Shard
from tests.opinfo.opinfo_call import replace, rounds, sample_inputs, seed
from tests.opinfo.opinfo_check import OPS, common_methods_invocations, unseeded
from tests.support import oracle

# Functions that read outside their memory if a matrix and what was made of it are cut apart: only
# batch dims are tried.
TRUSTING = (
    "lu_unpack",
    "linalg.lu_solve",
    "lu_solve",
    "linalg.ldl_solve",
    "ormqr",
    "linalg.householder_product",
    "_segment_reduce.lengths",
    "_segment_reduce.offsets",
)
TRIED = 16  # samples of an OpInfo that are looked at, from the first to the last
MOST_TRIES = 150  # ways to slice the other tensors of a call
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Independent:
    """``ins[i]``: the dim along which tensor i is sliced (None: whole); ``outs[j]``: that of result
    j."""

    ins: Dims
    outs: Dims


@dataclass
class Row:
    """An OpInfo. ``dims``: what was found of (sample, dim of the first tensor): "" where the
    sharding is kept."""

    name: str
    dims: list[tuple[int, int, int, str]] = field(
        default_factory=list
    )  # sample, dim, rank, problem

    def of(self, which: int) -> list[str]:
        """The problems of the first independent dim of each sample (0), of the second (1)."""
        by_sample: dict[int, list[str]] = {}
        for sample, _, _, problem in self.dims:
            by_sample.setdefault(sample, []).append(problem)
        return [found[which] for found in by_sample.values() if len(found) > which]

    def kept(self, which: int) -> bool | None:
        found = self.of(which)
        return None if not found else not any(found)


# Plain torch 2.15 divides by zero where the heads of k and v are cut to fewer than those of q.
KILLS = {"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"}


# What is independent ------------------------------------------------------------------------------


def independent(
    func: Any, given: Any, dim: int, chance: bool, trusting: bool
) -> Iterator[Independent]:
    """The ways in which ``dim`` of the first tensor is independent. ``chance``: only shapes can be
    compared."""
    tensors = oracle.tensors_in(given)
    n = tensors[0].shape[dim]
    whole = results(func, given, tensors)
    if n < 2 or not whole:
        return
    for ins in [(dim,) * len(tensors)] if trusting else ways(tensors, dim, n):
        cuts = {(n + 1) // 2, 1}
        outs: Dims | None = None
        for cut in sorted(cuts):
            try:
                parts = [
                    results(func, given, sliced(tensors, ins, part, n))
                    for part in ((0, cut), (cut, n))
                ]
            except Exception:
                break
            found = joined(whole, parts, chance, outs)
            if found is None:
                break
            outs = found
        else:
            if outs is not None:
                yield Independent(ins, outs)


def results(func: Any, given: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    seed(1)
    args, kwargs = replace(given, iter([t.clone() for t in tensors]))
    with torch.no_grad():
        return list(oracle.tensors_in(func(*args, **kwargs)))


def sliced(tensors: Sequence[Tensor], ins: Dims, part: tuple[int, int], n: int) -> list[Tensor]:
    return [
        t if d is None else t.narrow(d, part[0], part[1] - part[0]).contiguous()
        for t, d in zip(tensors, ins, strict=True)
    ]


def ways(tensors: Sequence[Tensor], dim: int, n: int) -> Iterator[Dims]:
    """Dims by which to slice all tensors, the likeliest first: as the first one from the right,
    from the left."""
    first = tensors[0].ndim
    choices: list[list[int | None]] = [[dim]]
    for t in tensors[1:]:
        fits = [d for d, s in enumerate(t.shape) if s == n]
        likely = [d for d in (dim - first + t.ndim, dim) if d in fits]
        choices.append(list(dict.fromkeys([*likely, *fits, None])))
    return itertools.islice(itertools.product(*choices), MOST_TRIES)


def joined(
    whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], chance: bool, before: Dims | None
) -> Dims | None:
    """The dims along which the parts make the whole; None if there are none."""
    dims: list[int | None] = []
    for j, (w, *ps) in enumerate(itertools.zip_longest(whole, *parts)):
        if (
            w is None
            or w.layout is not torch.strided
            or any(p is None or p.ndim != w.ndim or p.dtype != w.dtype for p in ps)
        ):
            return None
        for d in range(w.ndim) if before is None else [before[j]]:
            if fits([p.shape for p in ps], w.shape, d) and (chance or alike(torch.cat(ps, d), w)):
                dims.append(d)
                break
        else:
            return None
    return tuple(dims)


def fits(parts: Sequence[Sequence[int]], whole: Sequence[int], dim: int) -> bool:
    """Do shapes of parts make that of the whole along ``dim``?"""
    rest = {(*s[:dim], *s[dim + 1 :]) for s in (*parts, whole)}
    return len(rest) == 1 and sum(s[dim] for s in parts) == whole[dim] > 1


def alike(a: Tensor, b: Tensor) -> bool:
    if not rounds(b):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


# What is kept -------------------------------------------------------------------------------------


def keeps(func: Any, given: Any, way: Independent, mesh: Any) -> str:
    """ "" if the call keeps the sharding and moves nothing, else what it does."""
    tensors = oracle.tensors_in(given)
    placed = [
        dt.from_local(t.detach().chunk(2,
            d)[0].contiguous() if d is not None else t.detach().clone(), mesh,
                      [Replicate() if d is None else Shard(d)], shape=t.shape)
        for t, d in zip(tensors, way.ins, strict=True)
    ]  # fmt: skip
    args, kwargs = replace(given, iter(placed))
    with dt.debugging.record_comms() as log, oracle.fallbacks() as fell:
        try:
            outs = oracle.tensors_in(func(*args, **kwargs))
        except Exception as error:
            return f"raises {type(error).__name__}: {str(error)[:120]}"
    if fell:
        return f"gathers: {fell[0] if isinstance(fell, list) else ''}"
    if log.total_bytes:
        return f"moves {log.total_bytes} bytes: {', '.join(log.counts())}"
    for j, (o, d) in enumerate(zip(outs, way.outs, strict=True)):
        if not isinstance(o, dt.DistTensor):
            return f"result {j} is a plain tensor"
        if o.placements != (Shard(d),):
            return f"result {j} is {o.spec!r}, not S({d})"
    return ""


def measure(name: str, most: int, mesh: Any) -> Row:
    op, row = OPS[name], Row(name)
    for n, sample in enumerate(sample_inputs(op, torch.float32, TRIED, 200, False)):
        if len({sample for sample, *_ in row.dims}) == most:
            break
        given = ((sample.input, *sample.args), dict(sample.kwargs))
        tensors = oracle.tensors_in(given)
        if not tensors or any(t.layout is not torch.strided for t in tensors):
            continue
        try:
            outs = results(op.op, given, tensors)
            if any(t.numel() == 0 for t in (tensors[0], *outs)):
                continue  # nothing to keep
            seed(2)
            args, kwargs = replace(given, iter([t.clone() for t in tensors]))
            again = oracle.tensors_in(op.op(*args, **kwargs))
            chance = not all(
                a.shape == b.shape and alike(a, b) for a, b in zip(outs, again, strict=True)
            )
        except Exception:
            continue
        for dim in range(tensors[0].ndim - 2 * (name in TRUSTING)):
            found = list(itertools.islice(tried(op.op, given, dim, chance, name in TRUSTING), 3))
            problems = [keeps(op.op, given, way, mesh) for way in found]
            if problems:
                row.dims.append((n, dim, tensors[0].ndim, "" if "" in problems else problems[0]))
    return row


def tried(func: Any, given: Any, dim: int, chance: bool, trusting: bool) -> Iterator[Independent]:
    try:
        yield from independent(func, given, dim, chance, trusting)
    except Exception:
        return


def world() -> Any:
    """A mesh of two ranks of which this process is the first, and the other is not there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return dt.ProcessMesh([0, 1], ("x",))


def share(rows: Sequence[Row], which: int) -> tuple[int, int]:
    """(kept, all) of those that have such a dim."""
    found = [r.kept(which) for r in rows if r.kept(which) is not None]
    return sum(map(bool, found)), len(found)


def table(rows: Sequence[Row]) -> str:
    lines = []
    word = {None: "-", True: "kept", False: "LOST"}
    for r in rows:
        if r.dims:
            why = next((p for w in (0, 1) for p in r.of(w) if p), "")
            lines.append(f"{r.name:45} {word[r.kept(0)]:5} {word[r.kept(1)]:5} {why}".rstrip())
    for which, what in enumerate(("first", "second")):
        kept, every = share(rows, which)
        lines.append(
            f"{what} independent dim: kept by {kept} of {every}, {kept / max(every, 1):.1%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo.kept", description=__doc__)
    parser.add_argument("--ops", help="names, separated by commas (all)")
    parser.add_argument(
        "--most", type=int, default=4, help="samples with an independent dim, of each OpInfo (4)"
    )
    parser.add_argument("--all", action="store_true", help="a line for each sample and dim")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args(argv)
    mesh = world()
    rows = []
    with (
        warnings.catch_warnings(),
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded),
    ):
        warnings.simplefilter("ignore")
        for name in options.ops.split(",") if options.ops else OPS:
            if name in KILLS or torch.float32 not in OPS[name].supported_dtypes("cpu"):
                continue
            start = time.monotonic()
            if options.times:
                print("..", name, flush=True)
            rows.append(measure(name, options.most, mesh))
            if options.times and time.monotonic() - start > 0.5:
                print(name, round(time.monotonic() - start, 1), flush=True)
    if options.all:
        for r in rows:
            print(
                *(f"{r.name} sample {n} dim {d} of {k}: {p or 'kept'}" for n, d, k, p in r.dims),
                sep="\n",
            )
    print(table(rows))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(r) for r in rows], file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
