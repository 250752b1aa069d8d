"""What a rank outside a mesh knows of a call, compared with the ranks inside, for every function of
PyTorch's op_db.

    python -m tests.opinfo.opinfo_outside                  every OpInfo; prints where ranks disagree
    python -m tests.opinfo.opinfo_outside --ops add,sort

Rank 0 and 1 compute, rank 2 is outside. Every tensor of a sample comes as if it had crossed from
another mesh, so that it shows which transfers a backward of each result would reach. All ranks must
say the same: what is reached, requires_grad, shape, dtype, layout, what is written in place, and
how many random calls there were. Nothing is sent: the three ranks run one after the other, each in
a process of its own with a fake process group.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import disttensor as dt
from disttensor import Partial, ProcessMesh
from disttensor.autograd import token
from disttensor.autograd.cross_mesh import cross_mesh_transfer
from disttensor.autograd.grad_types import GradType
from disttensor.comm import objects
from disttensor.random import counter
from disttensor.tensor.dist_tensor import wrap
from tests.fuzz import fuzz_stages
from tests.opinfo import opinfo_check
from tests.opinfo.opinfo_call import Call, replace
from tests.support import oracle, pool

INSIDE, OUTSIDE = [0, 1], [2]
OPS = opinfo_check.OPS
# Values that rank 2 cannot have: Python asks for them
ASKS = (
    "what the others tell",
    "returns a Python value",
    "holds metadata only",
    "a regular tensor that requires grad",
)


def arrived(full: Tensor, mesh: ProcessMesh, place: Any, tag: int) -> Any:
    """``full`` on ``mesh`` as if it had come from the rank outside, by the transfer ``tag``."""
    x = opinfo_check.place(full.detach(), mesh, place)
    src = dt.shard_tensor(torch.zeros(1), ProcessMesh(OUTSIDE, ("y",))).spec
    if not full.requires_grad:
        return x
    blank = token.no_grad_token(torch.device("cpu"))
    with torch.enable_grad():
        local = cross_mesh_transfer(blank, x.local, GradType(src), GradType(x.spec), tag)
    return wrap(local, x.spec)


def seen(call: Call, form: str, mesh: ProcessMesh, layouts: Sequence[Any]) -> Any:
    """What this rank sees of the call: a text for an error, else a line for each tensor."""
    torch.manual_seed(1)
    dt.manual_seed(1)
    pairs = zip(call.tensors, layouts, strict=False)
    inner = [arrived(t, mesh, p, 2 * i) for i, (t, p) in enumerate(pairs)]
    if form == "in place":
        inner[0] = inner[0].clone()
    args, kwargs = replace(call.given, iter(inner))
    try:
        with oracle.fallbacks():
            result = call.func(*args, **kwargs)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    lines = [tree(result)]
    for kind, tensors in (("result", oracle.tensors_in(result)), ("input", inner)):
        for i, t in enumerate(tensors):
            spec = getattr(t, "spec", None)
            if spec is None:
                lines.append(f"{kind} {i}: plain {list(t.shape)}")
                continue
            tags = sorted(tag for tag, _, _ in fuzz_stages.transfers(t))
            lines.append(
                f"{kind} {i}: {spec!r} {t.dtype} requires_grad={t.requires_grad} reaches {tags}"
            )
    return [*lines, f"random {random_calls()}"]


def random_calls() -> Any:
    return counter.get_state()[1]


def tree(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(str, map(tree, value)))})"
    return type(value).__name__


def layouts_for(call: Call, mesh: ProcessMesh) -> Iterator[tuple[str, Any]]:
    yield from opinfo_check.layouts_for(call, mesh, "")
    if call.tensors and all(t.dtype == torch.float64 for t in call.tensors):
        yield "P", [(Partial(),)] * len(call.tensors)


def on_rank(rank: int, names: Sequence[str], most: int) -> dict[str, Any]:
    """What ``rank`` of a world of 3, in which nothing is sent, sees of every case."""
    found: dict[str, Any] = {}
    silent = mock.patch.object(
        objects, "recv_object", side_effect=RuntimeError("what the others tell")
    )
    with pool.fake_world(3, rank), silent, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = ProcessMesh(INSIDE, ("x",))
        for name in names:
            op = OPS[name]
            try:
                with mock.patch.object(dist, "broadcast_object_list"):
                    samples = list(opinfo_check.samples_of(op, torch.float64, most))
            except Exception:
                continue
            forms = (("call", op.op), ("in place", op.inplace_variant))
            for (n, (given, sample)), (form, func) in itertools.product(enumerate(samples), forms):
                if func is None or (form != "call" and sample.broadcasts_input):
                    continue
                try:
                    call = Call(func, given, form, sample.output_process_fn_grad)
                except Exception:
                    continue
                shapes = [list(t.shape) for t in call.tensors]
                for label, layouts in layouts_for(call, mesh):
                    try:
                        view = seen(call, form, mesh, layouts)
                    except Exception as error:  # no tensors that can be placed
                        view = f"raised {type(error).__name__}: {error}"
                    found[f"{name}: {form} {n} [{label}] {shapes}"] = view
    return found


def judged(views: list[Any]) -> str:
    if all(isinstance(v, str) for v in views) or views[0] == views[1] == views[2]:
        return ""
    if any(isinstance(v, str) for v in views):
        if any(isinstance(v, str) and any(text in v for text in ASKS) for v in views):
            return ""
        if isinstance(views[0], str) and not isinstance(views[2], str):
            return ""  # values that nobody sent are no values for this function
        words = [v[:300] if isinstance(v, str) else "no error" for v in views]
        return "\n".join(f"  rank {r}: {v}" for r, v in enumerate(words))
    out = []
    for lines in itertools.zip_longest(*views):
        if len(set(lines)) > 1:
            out += [f"  rank {r}: {line}" for r, line in enumerate(lines)]
    return "\n".join(out[:9])


def main(names: Sequence[str], most: int = 3, told: int = 2) -> int:
    """How many cases the ranks see differently; the first ``told`` of each function are printed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as ranks:
        views = list(ranks.map(on_rank, range(3), [names] * 3, [most] * 3))
    counts: Counter[str] = Counter()
    for case, first in views[0].items():
        text = judged([first, *(v.get(case, "absent") for v in views[1:])])
        if text:
            counts[case.split(":")[0]] += 1
            if counts[case.split(":")[0]] <= told:
                print(f"{case}\n{text}", flush=True)
    print(f"{len(views[0])} cases of {len(names)} functions; disagreements: {dict(counts)}")
    return sum(counts.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="")
    parser.add_argument("--most", type=int, default=3)
    options = parser.parse_args()
    from tests.opinfo import opinfo_outside

    chosen = options.ops.split(",") if options.ops else sorted(OPS)
    raise SystemExit(bool(opinfo_outside.main(chosen, options.most)))
