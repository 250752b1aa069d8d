"""One OpInfo on the ranks of a world: its calls on plain tensors and on DistTensors, compared.

The ranks tell each other through the store, not by a collective, how a case ended. So a rank that
failed alone, or hangs, is found within ``PATIENCE`` seconds, and named with its function
(tests/opinfo/opinfo.py).
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import pickle
import random
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import disttensor as dt
from disttensor import DistTensor, Partial, Placement, ProcessMesh, Replicate, Shard
from disttensor.attention import Balanced
from tests.opinfo.opinfo_call import (
    FORMS,
    OPS,
    Call,
    Outcome,
    amount,
    close,
    common_methods_invocations,
    dense,
    full_of,
    rounds,
    same,
    sample_inputs,
    seed,
    structure,
)
from tests.support import oracle
from tests.support.structure import replace_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
UNSET = re.compile(r"empty|resize")  # functions whose results hold whatever was in memory

LIMIT = 120.0  # seconds for one OpInfo
PATIENCE = 60.0  # seconds that a rank waits for the other at the end of a case
DRAWS = 2  # layouts of a sample on a mesh of several axes

# By name: the placement of tensor i of a call on a mesh of one axis (replicated where it has no
# dims).
LAYOUTS = {
    "R": lambda i: Replicate(),
    "S0": lambda i: Shard(0),
    "S-1": lambda i: Shard(-1),
    "S0,R": lambda i: Replicate() if i else Shard(0),
    "R,S0": lambda i: Shard(0) if i else Replicate(),
    "B0": lambda i: Balanced(0),
}
Layouts = list[tuple[Placement, ...]]


@dataclass
class Result:
    """What came of one OpInfo in one dtype. ``failures``: (case, what differs)."""

    name: str
    dtype: str
    cases: int = 0
    gradients: int = 0  # cases with gradients
    gathered: int = 0  # cases whose inputs were gathered, for want of a rule
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


def on_rank(jobs: Sequence[tuple[str, str]], most: int, notes: str, run: str) -> None:
    """Check these (OpInfo, dtype) with the other ranks. Each rank notes in a file what it began,
    and what came of it."""
    mine = f"{notes}.{dist.get_rank()}"
    with open(mine, "a") as file, open(mine + "-stack", "w") as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, dtype in jobs:
            print(json.dumps({"began": [name, dtype]}), file=file, flush=True)
            faulthandler.dump_traceback_later(LIMIT, exit=True, file=stack)
            start = time.monotonic()
            result = check(name, dtype, most, run)
            result.seconds = time.monotonic() - start
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps({"done": asdict(result)}), file=file, flush=True)


def check(name: str, dtype: str, most: int, run: str = "") -> Result:
    """One OpInfo on the ranks of this world, in every form that it has."""
    op, result, mesh = OPS[name], Result(name, dtype), oracle.mesh_of_world()
    funcs = (op.op, op.inplace_variant, op.op if op.supports_out else None)
    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded):
        for n, (given, sample) in enumerate(samples_of(op, getattr(torch, dtype), most)):
            for form, func in zip(FORMS, funcs, strict=True):
                if func is None or (form != "call" and sample.broadcasts_input):
                    continue
                try:
                    call = Call(func, given, form, sample.output_process_fn_grad)
                except Exception:  # what torch refuses is no case
                    continue
                for label, layouts in layouts_for(call, mesh, f"{name} {dtype} {n}"):
                    case = f"{form} {n} [{label}]"
                    with oracle.fallbacks() as fell:
                        problem, digests = compare(call, layouts, mesh, bool(UNSET.search(name)))
                    problem = agree(
                        f"{run}/{name}/{dtype}/{case}", problem, [] if name in UNSTEADY else digests
                    )
                    result.cases += 1
                    result.gradients += any(g is not None for g in call.outcome.grads)
                    result.gathered += bool(fell)
                    if problem:
                        result.failures.append((case, problem))
    return result


def unseeded(op: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of what op_db puts around random functions, which sets the seed."""
    return op(*args, **kwargs)


# Samples and layouts ------------------------------------------------------------------------------


def samples_of(op: Any, dtype: torch.dtype, most: int) -> Iterator[tuple[Any, Any]]:
    """((args, kwargs), sample), the same on every rank: at most ``most``, from the first to the
    last."""
    asks = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for sample in sample_inputs(op, dtype, most, 400, asks):
        # Some samples come out of a set: their order differs between processes.
        given: list[Any] = [((sample.input, *sample.args), dict(sample.kwargs))]
        try:
            pickle.dumps(given)
        except Exception:  # with a function among the arguments
            yield given[0], sample
            continue
        dist.broadcast_object_list(given, 0)
        on_device = replace_tensors(
            given[0], lambda t: t.detach().to(oracle.DEVICE).requires_grad_(t.requires_grad)
        )
        yield on_device if oracle.DEVICE != "cpu" else given[0], sample


def layouts_for(call: Call, mesh: ProcessMesh, key: str) -> Iterator[tuple[str, Layouts]]:
    """Layouts of the tensors and of what ``out=`` is given: those of ``LAYOUTS``, or some drawn by
    ``key``."""
    tensors = [*call.tensors, *call.targets]
    if not call.tensors:
        return
    if mesh.ndim > 1:
        draw = random.Random(key)
        for _ in range(DRAWS):
            each = [draw.choice(oracle.layouts_of(t, mesh.ndim, whole(t))) for t in call.tensors]
            each += [draw.choice(oracle.layouts_of(t, mesh.ndim, False)) for t in call.targets]
            yield ", ".join(oracle.show(p) for p in each), each
        return
    seen = set()
    for label, place in LAYOUTS.items():
        each = []
        for i, t in enumerate(tensors):
            p = place(i) if t.ndim else Replicate()
            each.append((type(p)(p.dim % t.ndim) if isinstance(p, Shard) else p,))
        if tuple(each) not in seen:
            seen.add(tuple(each))
            yield label, each


def whole(t: Tensor) -> bool:
    """May its values be those of a sum of pieces, exactly? No sum is -0.0."""
    if not rounds(t) or t.layout is not torch.strided:
        return t.layout is torch.strided and t.dtype != torch.bool
    parts = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    odd = parts.isinf() | parts.isnan() | (parts.abs() > 1e30) | ((parts == 0) & parts.signbit())
    return not bool(odd.any())


def place(full: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> DistTensor:
    """``full`` as a DistTensor. The pieces of a sum are 2 x, -x and zeros: they add up without
    rounding."""
    mine = full.detach().clone()
    shares = (2, -1)
    for axis, p in enumerate(placements):
        if isinstance(p, Partial):
            rank = mesh.coordinate[axis] if mesh.coordinate else 0
            mine = mine * (shares[rank] if rank < len(shares) else 0)
            shares = (0, 1)
    split = [Replicate() if isinstance(p, Partial) else p for p in placements]
    if all(p == q for p, q in zip(split, placements, strict=True)):
        return dt.shard_tensor(mine, mesh, split, check=False)
    local = dt.shard_tensor(mine, mesh, split, check=False).to_local()
    return dt.from_local(local.detach().clone(), mesh, placements, shape=full.shape)


# Of these the bits hang on where the memory of the inputs begins, in one process too (LAPACK's
# gelsy).
UNSTEADY = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}

# One case -----------------------------------------------------------------------------------------


def compare(call: Call, layouts: Layouts, mesh: ProcessMesh, unset: bool) -> tuple[str, list[Any]]:
    """(what differs or "", digests of what must be alike on replicas). All communication comes
    first."""
    seed(1)
    dt.manual_seed(1)
    try:
        n = len(call.tensors)
        pairs = zip(call.tensors, layouts[:n], strict=True)
        leaves = [place(t, mesh, p).requires_grad_(call.asks(t)) for t, p in pairs]
        targets = [place(t, mesh, p) for t, p in zip(call.targets, layouts[n:], strict=True)]
        got = call.run(leaves, targets)
        grads = [None if g is None else full_of(g) for g in got.grads]
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:300]}{oracle._frames(error)}"
        return f"raised {text}", []
    outs, wanted = oracle.tensors_in(got.result), oracle.tensors_in(call.outcome.result)
    digests = [digest_of(t) for t in [*([] if unset else outs), *got.grads, *grads]]
    return form_differs(call, got, outs, wanted) or value_differs(call, got, grads, unset), digests


def form_differs(call: Call, got: Outcome, outs: list[Tensor], wanted: list[Tensor]) -> str:
    """Structure, shapes, types, pieces."""
    want = call.outcome
    if structure(got.result) != structure(want.result):
        return f"gives {structure(got.result)}, plain {structure(want.result)}"
    if not wanted and not call.random and not same(got.result, want.result):
        return f"gives {got.result!r}, plain {want.result!r}"
    for i, (o, p) in enumerate(zip(outs, wanted, strict=True)):
        if tuple(o.shape) != tuple(p.shape):
            return f"shape: result {i} is {list(o.shape)}, plain {list(p.shape)}"
        if o.dtype != p.dtype:
            return f"dtype: result {i} is {o.dtype}, plain {p.dtype}"
        if not isinstance(o, DistTensor):
            if p.layout is torch.strided:
                return f"type: result {i} is a plain tensor"
            continue
        if tuple(o.to_local().shape) != tuple(o.spec.local_shape):
            return f"local shape: result {i} is {o.spec!r} with {list(o.to_local().shape)}"
        if o.requires_grad != p.requires_grad and o.numel() and call.differentiable:
            return f"requires_grad: result {i} has {o.requires_grad}, plain {p.requires_grad}"
    return ""


def value_differs(call: Call, got: Outcome, grads: list[Any], unset: bool) -> str:
    """Values of the results, then gradients of the inputs."""
    exact = not call.random and not unset
    slack: Outcome | None = None
    for what, mine, theirs in (
        ("value of result", got.fulls, call.outcome.fulls),
        ("gradient of input", grads, call.outcome.grads),
    ):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a is None or b is None:
                if (a is None) != (b is None) and bool((a if b is None else b).any()):
                    return f"{what} {i}: {'missing' if a is None else 'plain has none'}"
                continue
            if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
                return f"{what} {i}: {a.dtype} {list(a.shape)}, plain {b.dtype} {list(b.shape)}"
            a, b = dense([a, b])
            if not exact or close(a, b):
                continue
            slack = slack or call.slack()
            more = (slack.grads if what.startswith("grad") else slack.fulls)[i]
            if more is None or not rounds(b) or not close(a, b, more * 20):
                return f"{what} {i}: {amount(a, b)}"
    return ""


def agree(key: str, problem: str, digests: list[Any]) -> str:
    """The problem of the case, the same on every rank. Raises RuntimeError where a rank does not
    come."""
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[me], pickle.dumps((problem, digests)))
    try:
        store.wait(keys, datetime.timedelta(seconds=PATIENCE))
    except RuntimeError:
        raise RuntimeError(f"out of step after {key}: {problem or 'passed here'}") from None
    everyone = [pickle.loads(store.get(k)) for k in keys]
    for rank, (text, _) in enumerate(everyone):
        if text:
            return text if everyone[0][0] else f"{text} (on rank {rank} only)"
    for i, entries in enumerate(zip(*(d for _, d in everyone), strict=True)):
        if len({e[0] for e in entries}) > 1:
            return f"placement of tensor {i} differs between ranks: {[e[0] for e in entries]}"
        seen: dict[Any, Any] = {}
        if any(seen.setdefault(where, data) != data for _, where, data in entries):
            return f"replicas of tensor {i} ({entries[0][0]}) differ"
    return ""


def digest_of(t: Any) -> tuple[str, Any, str]:
    """(spec, which piece of it, bits)."""
    if isinstance(t, DistTensor):
        varies, place = t.spec.layout.varies(), t.process_mesh.coordinate or ()
        where = tuple(c for a, c in enumerate(place) if a in varies)
        return repr(t.spec), where, bits(t.to_local())
    return "plain", (), bits(t) if isinstance(t, Tensor) else repr(t)


def bits(t: Tensor) -> str:
    if t.is_cuda:  # kernels that add by atomics give other bits each time
        return ""
    return oracle._digest(dense([t.detach()])[0].resolve_conj().resolve_neg())
