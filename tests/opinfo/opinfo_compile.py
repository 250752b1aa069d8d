"""One case of an OpInfo under ``dt.compile``, with a backend that keeps numbers: the bits of the
calls one by one.

    python -m tests.opinfo.opinfo_compile aot_eager 0/8  # every 8th OpInfo from the first, 2 ranks
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

import disttensor as dt
from disttensor import ProcessMesh, Replicate, Shard
from disttensor.autograd import grad_types
from tests.opinfo import opinfo
from tests.opinfo.opinfo_call import (
    OPS,
    Call,
    close,
    common_methods_invocations,
    dense,
    full_of,
    seed,
)
from tests.opinfo.opinfo_check import UNSET, bits, place, samples_of, unseeded
from tests.support import oracle, pool

ROUND = {"rows": (Shard(0),), "second": (Replicate(), Shard(0))}  # placements, in turn


def differing(call: Call, layout: Sequence[Any], mesh: ProcessMesh, backend: str) -> Any:
    """What differs in any bit between an eager call and two under ``dt.compile``, and how many of
    these were compiled. Rounding may differ where AOTAutograd decomposes a function, and after a
    reshard, whose result has other strides."""
    func, found, numbers = call.func, [], []
    fast: Any = dt.compile(lambda *args, **kwargs: func(*args, **kwargs), backend=backend)
    for run in (func, fast, fast):
        dt.manual_seed(1)
        leaves = []
        for i, t in enumerate(call.tensors):
            at = layout[i % len(layout)] if t.ndim else Replicate()
            leaves.append(place(t, mesh, (at,)).requires_grad_(call.asks(t)))
        try:
            specs, values = outcome(call, run, leaves)
        except Exception as error:
            found.append([f"{type(error).__name__}: {str(error)[:200]}"])
            continue
        found.append([*specs, *[None if x is None else bits(x) for x in values]])
        numbers.append((specs, values))
    call.func = func
    same = found[0] == found[1] == found[2]
    if not same and len(numbers) == 3 and all(map(are_close, numbers[1:], numbers)):
        same = reshards(fast) or decomposed(call, backend)
    if same:
        return "", fast.replays
    return [a for a in found if type(a[0]) is str or a != found[0]], fast.replays


def outcome(call: Call, run: Any, leaves: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """The specs of the results, and the values and gradients. A compiler gives zeros in place of no
    gradient."""
    seed(1)
    call.func = run
    got = call.run(leaves, [])
    outs = oracle.tensors_in(got.result)
    grads = [None if g is None else full_of(g) for g in got.grads]
    given = [g if g is not None and g.any() else None for g in grads]
    return [repr(getattr(x, "spec", "")) for x in outs], [*map(full_of, outs), *given]


def are_close(a: Any, b: Any) -> bool:
    pairs = zip(a[1], b[1], strict=True)
    same = (x is y if x is None or y is None else close(*dense([x, y])) for x, y in pairs)
    return bool(a[0] == b[0] and all(same))


def reshards(fast: Any) -> bool:
    """A compiled program contains a reshard."""
    lines = [line for program in fast.recorded() for line in program.lines]
    return any(x.call and x.call.func is grad_types._apply_transition for x in lines)


def decomposed(call: Call, backend: str) -> bool:
    """Compiled plain PyTorch does not have the bits of eager calls either."""
    func, found = call.func, []
    for run in (func, torch.compile(func, backend=backend, dynamic=False)):
        leaves = [t.detach().clone().requires_grad_(call.asks(t)) for t in call.tensors]
        found.append([None if x is None else bits(x) for x in outcome(call, run, leaves)[1]])
    call.func = func
    return bool(found[0] != found[1])


def on_rank(names: Sequence[str], backend: str, most: int) -> tuple[list[str], int, int]:
    """(what differs, compiled calls, cases) of these OpInfos in float32."""
    reports, replays, cases, mesh = [], 0, 0, oracle.mesh_of_world()
    with (
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded),
        warnings.catch_warnings(),
        oracle.fallbacks(),
    ):
        warnings.simplefilter("ignore")
        for name in names:
            op = OPS[name]
            for n, (given, sample) in enumerate(samples_of(op, torch.float32, most)):
                for label, layout in ROUND.items():
                    try:
                        call = Call(op.op, given, "call", sample.output_process_fn_grad)
                    except Exception:  # torch refuses it
                        continue
                    dense = all(t.layout is torch.strided for t in call.tensors)
                    if not call.tensors or not dense or UNSET.search(name):
                        continue
                    problem, count = differing(call, layout, mesh, backend)
                    cases, replays = cases + 1, replays + count
                    if problem:
                        reports.append(f"{name} {n} {label}: {str(problem)[:500]}")
    return reports, replays, cases


if __name__ == "__main__":
    from tests.opinfo import opinfo_compile  # not __main__: the ranks find its functions by name

    part, count = map(int, sys.argv[2].split("/"))
    jobs = [name for name, _ in opinfo.jobs_of(sorted(OPS), ["float32"])][part::count]
    pool.warning_filters[:] = ["ignore"]
    for at in range(0, len(jobs), 20):
        run = functools.partial(opinfo_compile.on_rank, jobs[at : at + 20], sys.argv[1], 1)
        for rank, (reports, replays, cases) in enumerate(pool.run_on_ranks(2, run, timeout=600)):
            print(rank, jobs[at], f"{cases} cases, {replays} compiled calls", *reports, sep="\n  ")
    pool.stop()
