"""The oracle on real ranks: run a function on plain tensors and on DistTensors and compare.

Called inside a body on ranks (``@on_ranks(2)``, or 4 as 2x2), with the same full tensors on every
rank::

    check_op(torch.add, randn(5, 3), randn(5, 3), layouts=[(S0, R), (R, P)])

compares value, shape, dtype, the gradients of every floating input, the placements and collectives
that the caller names, and the bits of replicas. Everything that communicates runs before anything
is compared, so that ranks which find a wrong number are still in step.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import disttensor as dt
from disttensor import DistTensor, Partial, Placement, ProcessMesh, Replicate, Shard, errors
from disttensor.core.placement import show
from disttensor.dispatch import strict
from tests.support.layouts import grid, summands
from tests.support.structure import replace_tensors, tensors_in

Layouts = Sequence[Sequence[Placement] | None]  # one per tensor argument; None: stays plain
MORE = int(os.environ.get("ORACLE_MORE", "1"))  # times as many layouts per case
SEED = os.environ.get("ORACLE_SEED", "")  # others than usual
MESH = os.environ.get("ORACLE_MESH", "")
DEVICE = os.environ.get("ORACLE_DEVICE", "cpu")  # of meshes and inputs
ROWS = 16  # of a message about replicas: one for each tensor, and a head
WAYS = ("leaf", "product", "view", "moved")  # how an input that requires grad comes to the function


def line() -> ProcessMesh:
    """All ranks of this world on one axis."""
    return ProcessMesh(torch.arange(dist.get_world_size()), ("x",), DEVICE)


def mesh_of_world() -> ProcessMesh:
    if MESH:  # another one for this run, as "2,1,2"
        order = torch.arange(dist.get_world_size()).reshape(*map(int, MESH.split(",")))
        return ProcessMesh(order, device_type=DEVICE)
    return grid(DEVICE) if dist.get_world_size() == 4 else line()


# Inputs -------------------------------------------------------------------------------------------


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=generator(seed, shape), dtype=dtype).to(DEVICE)


def randint(low: int, high: int, shape: Sequence[int], seed: int = 0) -> Tensor:
    return torch.randint(low, high, tuple(shape), generator=generator(seed, shape)).to(DEVICE)


def generator(*key: Any) -> torch.Generator:
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big")
    )


def place(full: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> DistTensor:
    """``full`` as a DistTensor; pending reductions are over pieces that look random, and differ."""
    pending = {a: p.reduce_op for a, p in enumerate(placements) if isinstance(p, Partial)}
    draw = generator(tuple(full.shape), show(placements), "pieces")
    mine = full.detach().clone()
    for axis, op in pending.items():  # one axis after the other: each divides what is there
        mine = summands(mine, op, mesh.shape[axis], draw)[(mesh.coordinate or (0,) * 9)[axis]]
    split = [p if isinstance(p, Shard) else Replicate() for p in placements]
    local = dt.shard_tensor(mine, mesh, split, check=False).to_local() if full.ndim else mine
    return dt.from_local(local.detach().clone(), mesh, placements, shape=full.shape)


def layouts_of(full: Tensor, mesh_ndim: int, partial: bool = True) -> list[tuple[Placement, ...]]:
    """Every combination of R, S(d) and P(sum) over the axes of a mesh."""
    one: list[Placement] = [Replicate(), *(Shard(d) for d in range(full.ndim))]
    if partial and full.dtype != torch.bool:
        one.append(Partial())
    every = list(itertools.product(one, repeat=mesh_ndim))
    if mesh_ndim == 2:  # the second axis major
        every += [(Shard(d, order=1), Shard(d, order=0)) for d in range(full.ndim)]
    return every


def some_layouts(
    tensors: Sequence[Tensor], mesh_ndim: int, most: int, key: Any, exact: Sequence[int] = ()
) -> list[Layouts]:
    """Layouts for all tensors together: all of them, or ``most`` drawn by ``key`` (alike on every
    rank).

    ``exact``: numbers of tensors whose values must be exact, as the sum of random pieces is not."""
    each = [[*layouts_of(t, mesh_ndim, i not in exact), None] for i, t in enumerate(tensors)]
    every = math.prod(map(len, each))
    draw = random.Random(repr(key))
    if every <= 2 * most:
        chosen = list(itertools.product(*each))
        chosen = chosen if every <= most else draw.sample(chosen, most)
    else:
        chosen = [tuple(draw.choice(options) for options in each) for _ in range(most)]
    return [c for c in chosen if any(x is not None for x in c)] or [tuple(e[0] for e in each)]


# Running ------------------------------------------------------------------------------------------


def enter(leaf: Tensor, way: str) -> Tensor:
    """What of a leaf the function gets. Works alike on plain tensors and DistTensors."""
    if way == "product":
        return leaf * 1.0
    if way == "view":
        return leaf.t().t() if leaf.ndim == 2 else leaf.unsqueeze(0).squeeze(0)
    return leaf


def weights(outs: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.rand(o.shape, generator=generator(i, tuple(o.shape)), dtype=torch.float64).to(o) + 0.5
        for i, o in enumerate(outs)
    ]


def differentiable(outs: Sequence[Tensor]) -> list[Tensor]:
    return [o for o in outs if o.requires_grad]


@dataclass
class Problem(AssertionError):
    """What differs, and for which case."""

    what: str

    def __str__(self) -> str:
        return self.what


@contextlib.contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Names of the functions that ran on gathered tensors, without their warnings."""
    names: list[str] = []
    real = strict.fallback
    strict.fallback = (  # type: ignore[assignment]
        lambda func, specs, why: names.append(f"{errors.name_of(func)} ({why})")
    )
    try:
        yield names
    finally:
        strict.fallback = real


def check_op(
    func: Callable[..., Any], *args: Any, layouts: Layouts, mesh: ProcessMesh | None = None,
    grad: bool = True,
    ways: Sequence[str] = ("leaf",), inplace: bool = False, outputs: Sequence[Any] | None = None,
    comms: Sequence[str] | None = None, may_fall_back: bool = False, rtol: float = 1e-9,
    atol: float = 1e-9,
    weigh: str = "full", frozen: Sequence[int] = (), **kwargs: Any,
) -> None:  # fmt: skip
    """``func(*args, **kwargs)`` on full tensors and on DistTensors in ``layouts``: the same,
    gradients too.

    ways      how each tensor that can require grad comes (repeated as needed): as a "leaf", a
              "product" of one, a "view" of one, "moved" from another layout; a tensor whose layout
              is None is a plain leaf
    inplace   the first tensor is written: it is entered as a product, and must keep its placement
    outputs   expected placements of each result; comms: expected kinds of the forward's collectives
    frozen    numbers of the tensors that are no input of the gradient
    weigh     "full": the loss is made of full_tensor() of the results; "dist": of the DistTensors
    """
    mesh = mesh or mesh_of_world()
    given = tensors_in((args, kwargs))
    if any(t.dtype in (torch.float32, torch.bfloat16) for t in given):
        rtol, atol = max(rtol, 2e-5), max(atol, 2e-5)
    floating = [grad and t.dtype.is_floating_point and i not in frozen for i, t in enumerate(given)]
    ways = [
        "product" if inplace and i == 0 and floating[i] else ways[i % len(ways)]
        for i in range(len(given))
    ]

    def run(leaves: list[Tensor], inner: list[Tensor]) -> tuple[Any, list[Tensor], list[Any]]:
        numbers = iter(inner)
        new_args, new_kwargs = replace_tensors((tuple(args), kwargs), lambda _: next(numbers))
        with log:
            result = func(*new_args, **new_kwargs)
        outs = tensors_in(result) if isinstance(result, (Tensor, list, tuple, dict)) else []
        ends = [o for o in outs if o.requires_grad]
        fulls = [o.full_tensor() if isinstance(o, DistTensor) else o for o in outs]
        if ends:
            w = weights([f.detach() for f, o in zip(fulls, outs, strict=True) if o.requires_grad])
            ends = (
                ends
                if weigh == "dist"
                else [f for f, o in zip(fulls, outs, strict=True) if o.requires_grad]
            )
            loss = sum(
                ((e * v).sum() for e, v in zip(ends, w, strict=True)),
                start=torch.zeros((), dtype=torch.float64, device=DEVICE),
            )
            loss.backward()
        return result, [f.detach() for f in fulls], [leaf.grad for leaf in leaves]

    log = dt.debugging.record_comms()
    leaves = [t.detach().clone().requires_grad_(f) for t, f in zip(given, floating, strict=True)]
    inner = [enter(x, w) if f else x for x, w, f in zip(leaves, ways, floating, strict=True)]
    before = [x.detach().clone() for x in inner]
    plain, plain_values, plain_grads = run(leaves, inner)
    written = [not torch.equal(x.detach(), b) for x, b in zip(inner, before, strict=True)]

    d_leaves: list[Tensor] = []
    d_inner: list[Tensor] = []
    error, result, values, grads, fulls, after, held = "", None, [], [], [], [], []
    try:
        for i, (t, want) in enumerate(zip(given, layouts, strict=True)):
            if want is None:
                x: Tensor = t.detach().clone().requires_grad_(floating[i])
                d_leaves.append(x)
                d_inner.append(enter(x, ways[i]) if floating[i] else x)
                continue
            here = want
            moved = ways[i] == "moved" and floating[i]
            if moved:
                here = random.Random(repr((tuple(t.shape), show(want)))).choice(
                    layouts_of(t, mesh.ndim)
                )
            x = place(t, mesh, here).requires_grad_(floating[i])
            d_leaves.append(x)
            y = dt.reshard(x, mesh, want) if moved else enter(x, ways[i]) if floating[i] else x
            if inplace and i == 0 and not floating[i]:
                y = x.clone()
                inner[0] = leaves[0].clone()
            d_inner.append(y)
        held = [_piece(x).clone() for x in d_inner]
        with fallbacks() as fell:
            result, values, grads = run(d_leaves, d_inner)
        fulls = [g.full_tensor() if isinstance(g, DistTensor) else g for g in grads]
        after = [  # what plain left alone is compared on each rank: nothing to gather
            _piece(x)
            if not w
            else x.detach().full_tensor()
            if isinstance(x, DistTensor)
            else x.detach()
            for x, w in zip(d_inner, written, strict=True)
        ]
    except Exception as e:
        error = f"{type(e).__name__}: {str(e)[:400]}{_frames(e)}"
    outs = tensors_in(result)
    compare_replicas([*outs, *grads, *fulls], error)

    # Nothing below communicates.
    if fell and not may_fall_back:
        raise Problem(f"fell back: {', '.join(sorted(set(fell)))}")
    if not isinstance(plain, (Tensor, list, tuple, dict)):
        near = (
            isinstance(plain, float)
            and isinstance(result, float)
            and math.isclose(result, plain, rel_tol=rtol)
        )
        if not near and (result != plain or type(result) is not type(plain)):
            raise Problem(f"gave {result!r} in place of {plain!r}")
        return
    if _shape_of(result) != _shape_of(plain):
        raise Problem(f"results have the structure {_shape_of(result)}, not {_shape_of(plain)}")
    for i, (o, full, p, p_out) in enumerate(
        zip(outs, values, plain_values, tensors_in(plain), strict=True)
    ):
        if not isinstance(o, DistTensor):
            raise Problem(f"result {i} is a {type(o).__name__}")
        if tuple(o.shape) != tuple(p.shape) or o.dtype != p.dtype:
            raise Problem(f"result {i} is {o.spec!r}, plain {p.dtype} {list(p.shape)}")
        if tuple(o.to_local().shape) != tuple(o.spec.local_shape) or o.to_local().dtype != o.dtype:
            raise Problem(
                f"result {i}: {o.spec!r} but the local is {o.to_local().dtype} "
                f"{list(o.to_local().shape)}"
            )
        if o.requires_grad != p_out.requires_grad and o.numel():
            raise Problem(
                f"result {i}: requires_grad is {o.requires_grad}, plain {p_out.requires_grad}"
            )
        _close(full, p, f"result {i} ({o.spec!r})", rtol, atol)
    for i, (g, full_g, p_g) in enumerate(zip(grads, fulls, plain_grads, strict=True)):
        if p_g is None or g is None:
            if (p_g is None) != (g is None) and p_g is not None and bool(p_g.any()):
                raise Problem(f"gradient of input {i} is {g!r}, plain {p_g!r}")
            continue
        if isinstance(g, DistTensor) != isinstance(d_leaves[i], DistTensor):
            raise Problem(f"gradient of input {i} is a {type(g).__name__}")
        _close(full_g, p_g, f"gradient of input {i} ({getattr(g, 'spec', 'plain')!r})", rtol, atol)
    for i, (a, b, h, w) in enumerate(zip(after, inner, held, written, strict=True)):
        want = b.detach() if w else h
        _close(a, want, f"input {i} after the call", rtol if w else 0.0, atol if w else 0.0)
    if inplace:
        target = tensors_in(result)[0]
        if target is not d_inner[0]:
            raise Problem("in place, but the result is another tensor")
        if target.placements != tuple(layouts[0] or ()):
            raise Problem(f"in place: {show(layouts[0] or ())} became {show(target.placements)}")
    if outputs is not None:
        got = [o.placements for o in outs]
        if got != [tuple(o) for o in outputs]:
            raise Problem(
                f"placements are {[show(p) for p in got]}, expected {[show(p) for p in outputs]}"
            )
    if comms is not None:
        kinds = [r.kind for r in log if r.phase == "forward"]
        if kinds != list(comms):
            raise Problem(f"communicated {kinds}, expected {list(comms)}\n{log}")


def _piece(x: Tensor) -> Tensor:
    return x.detach().to_local() if isinstance(x, DistTensor) else x.detach()


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *[_shape_of(v) for v in value])
    return value


def _close(got: Tensor, want: Tensor, what: str, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    if want.dtype in (torch.bfloat16, torch.float16):
        rtol = atol = 2e-2
    elif want.dtype == torch.float32:
        rtol, atol = max(rtol, 2e-5), max(atol, 2e-5)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Problem(
            f"{what}: {got.dtype} {list(got.shape)}, plain {want.dtype} {list(want.shape)}"
        )
    if not torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
        bad = ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
        where = bad.nonzero()[:3].tolist()
        ratio = (got[bad] / want[bad]).flatten()[:3].tolist() if got.dtype.is_floating_point else []
        raise Problem(
            f"{what}: {int(bad.sum())} of {bad.numel()} differ, at {where}: "
            f"{got[bad].flatten()[:3].tolist()}, plain {want[bad].flatten()[:3].tolist()} (ratio "
            f"{[round(r, 4) for r in ratio]})"
        )


def _digest(x: Tensor) -> str:
    raw = torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest() + str(tuple(x.shape))


def compare_replicas(tensors: Sequence[Any], error: str = "") -> None:
    """Ranks that hold the same piece hold the same bits. Raises on every rank alike, also where one
    has an error."""
    mine = []
    for t in tensors:
        if isinstance(t, DistTensor):
            place = t.process_mesh.coordinate or ()
            varies = t.spec.layout.varies()
            mine.append(
                (
                    repr(t.spec),
                    tuple(c for a, c in enumerate(place) if a in varies),
                    _digest(t.to_local()),
                )
            )
        else:
            mine.append(("plain", (), _digest(t) if isinstance(t, Tensor) else repr(t)))
    if _agree(mine, error):
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (error, mine))
    for rank, (error, _) in enumerate(everyone):
        if error:
            raise Problem(f"{error} (rank {rank})")
    for i, entries in enumerate(zip(*(m for _, m in everyone), strict=True)):
        specs = {e[0] for e in entries}
        if len(specs) > 1:
            raise Problem(f"tensor {i}: ranks hold different specs: {specs}")
        seen: dict[Any, str] = {}
        for rank, (spec, where, digest) in enumerate(entries):
            if seen.setdefault(where, digest) != digest:
                raise Problem(f"tensor {i} ({spec}): replicas differ in bits (rank {rank})")


def _agree(mine: Sequence[tuple[str, Any, str]], error: str) -> bool:
    """Whether no rank has an error and replicas are alike, by one short message: most often they
    are, and pickles are slow. The same answer on every rank."""
    rows = [[int(bool(error)), len(mine), 0]]
    rows += [
        [_number(spec), _number((spec, where)), _number(digest)] for spec, where, digest in mine
    ]
    if len(rows) > ROWS:
        rows[0][0] = 1
    sent = torch.tensor(rows[:ROWS] + [[0, 0, 0]] * (ROWS - len(rows)))
    got = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(got, sent)
    everyone = [rows.tolist() for rows in got]
    if any(e[0] != [0, everyone[0][0][1], 0] for e in everyone):
        return False
    pieces: dict[tuple[int, int], int] = {}
    return all(
        spec == everyone[0][i][0] and pieces.setdefault((i, where), digest) == digest
        for e in everyone
        for i, (spec, where, digest) in enumerate(e)
    )


def _number(value: Any) -> int:
    raw = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "big", signed=True)


# Many cases, and programs -------------------------------------------------------------------------


@dataclass
class Case:
    """One line of a table: a function, its arguments, and how to check it."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


def case(name: str, func: Callable[..., Any], *args: Any, **options: Any) -> Case:
    return Case(name, func, args, options)


def check_cases(cases: Sequence[Case], most: int = 12) -> None:
    """Every case in ``most`` layouts and with inputs entering in several ways; failures are named
    together."""
    mesh = mesh_of_world()
    failures = []
    for c in cases:
        options = dict(c.options)
        most_of_this = options.pop("most", most) * MORE
        found = 0
        chosen = options.pop("layouts", None) or some_layouts(
            tensors_in((c.args, options)),
            mesh.ndim,
            most_of_this,
            c.name + SEED,
            options.get("frozen", ()),
        )
        for n, layouts in enumerate(chosen):
            if options.get("inplace") and layouts[0] is None:
                continue
            draw = random.Random(f"{c.name} {n}{SEED}")
            ways = [draw.choice(WAYS) for _ in layouts] if n % 3 else ["leaf"]
            weigh = draw.choice(["full", "dist"])
            try:
                check_op(
                    c.func, *c.args, layouts=layouts, mesh=mesh, ways=ways, weigh=weigh, **options
                )
            except Problem as error:
                found += 1
                if found <= 2:
                    shown = ", ".join("plain" if p is None else show(p) for p in layouts)
                    failures.append(f"{c.name} [{shown}] {'/'.join(ways)} {weigh}: {error}")
        if found > 2:
            failures.append(f"{c.name}: and {found - 2} more of {len(chosen)} layouts")
    assert not failures, f"{len(failures)} lines\n" + "\n".join(failures)


def _frames(error: BaseException) -> str:
    tb = error.__traceback__
    frames = []
    while tb is not None:
        frames.append(f"{tb.tb_frame.f_code.co_filename.split('/')[-1]}:{tb.tb_lineno}")
        tb = tb.tb_next
    return f" [{' '.join(frames[-4:])}]"


def check_program(
    program: Callable[..., Any], params: Sequence[tuple[Tensor, Sequence[Placement]]], *args: Any,
    mesh: ProcessMesh | None = None,
    layouts: Layouts = (), steps: int = 1, rtol: float = 1e-9, atol: float = 1e-9,
) -> list[Any]:  # fmt: skip
    """``program(*params, *args)`` gives a scalar loss: the same loss and gradients as on plain
    tensors.

    params: (full value, placements) of leaves; args: full tensors in ``layouts`` that need no
    gradient. ``steps`` > 1 accumulates as many backward passes. Gives the DistTensor leaves back.
    """
    mesh = mesh or mesh_of_world()
    plain = [t.detach().clone().requires_grad_() for t, _ in params]
    ours = [place(t, mesh, p).requires_grad_() for t, p in params]
    d_args = [
        a if p is None else place(a, mesh, p)
        for a, p in zip(args, layouts or [None] * len(args), strict=True)
    ]
    for _ in range(steps):
        loss = program(*plain, *args)
        loss.backward()
        d_loss = program(*ours, *d_args)
        d_loss.backward()
    value = d_loss.detach().full_tensor() if isinstance(d_loss, DistTensor) else d_loss.detach()
    grads = [x.grad for x in ours]
    fulls = [None if g is None else g.full_tensor() for g in grads]
    compare_replicas([value, *grads, *fulls])
    _close(value, loss.detach(), "loss", rtol, atol)
    for i, (full, p) in enumerate(zip(fulls, plain, strict=True)):
        if (full is None) != (p.grad is None):
            raise Problem(f"gradient of parameter {i} is {full!r}, plain {p.grad!r}")
        if full is not None:
            _close(full, p.grad, f"gradient of parameter {i} ({grads[i].spec!r})", rtol, atol)
    return ours
