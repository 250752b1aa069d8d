"""assign: which letter each mesh axis splits. The whole inference of placements is here, pure.

The axes are decided one after the other, in mesh order. On each axis the choices are: a letter that
some input is split by on this axis (every tensor with the letter is then split there), *flow* (a
pending reduction passes through), or nothing (all inputs are whole). A replicated input alone never
makes an axis split something.

What is minimised on an axis is the bytes that one of its n ranks receives so that the inputs follow
the choice, from global sizes (what other axes split does not count):

    (n - 1) / n * the sum over the inputs of
        2 size                 P that does not flow -> R: an all-reduce
        size                   P -> the chosen letter: a reduce-scatter
        size                   another letter -> R: an all-gather
        size / n               another letter -> the chosen one: an all-to-all
    + the halo of the letter, where its dim is read beyond the piece

Nothing else counts: not the latency of a collective, not what reads the results. On a tie the order
is a letter of the results, flow, a reduced letter, nothing; then the letter of the largest input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disttensor.layout import Axes, Layout, replicated
from ops.factors import Arg, Factors, Letter


@dataclass(frozen=True, slots=True)
class Flow:
    """A Partial that passes through on an axis."""

    op: str


@dataclass(slots=True)
class Decision:
    """``input_layouts``: what each input is redistributed to; ``output_layouts``: what comes out.

    ``varying_axes[i]``: the axes over which input i is replicated while the call varies, so that
    its gradient is a contribution. ``split``: letter -> axes that split it.
    """

    input_layouts: list[Layout]
    output_layouts: list[Layout]
    varying_axes: list[Axes]
    split: dict[Letter, Axes]


def assign(
    f: Factors, args: Sequence[Arg], mesh_shape: Axes, fixed: bool = False
) -> Decision | None:
    """The cheapest placements for the call. With ``fixed`` the targets of an in-place function keep
    their layouts (the choice follows the first argument); None if the rule cannot do that."""
    if f.per_item:
        return _assign_items(f, args, mesh_shape, fixed)
    majors = [tuple(d[0] if isinstance(d, tuple) else d for d in dims) for dims in f.inputs]
    usable = splittable(f)
    shards: list[list[tuple[int, Letter]]] = [[] for _ in mesh_shape]
    pending: list[list[tuple[int, str]]] = [[] for _ in mesh_shape]
    for t, arg in enumerate(args):
        layout = arg.layout
        for d, axes in enumerate(layout.dims):
            for a in axes:
                shards[a].append((t, majors[t][d]))
        if t not in f.metadata_only:
            for a, op in layout.partial:
                pending[a].append((t, op))

    choice: list[Any] = [None] * len(mesh_shape)
    parts: dict[Letter, int] = {}
    for a, n in enumerate(mesh_shape):
        if fixed:
            ok, picked = _forced(f, args[0].layout, majors[0], usable, a)
            if not ok:
                return None
        elif not shards[a] and not pending[a]:
            continue
        else:
            picked = _pick(f, args, majors, usable, shards[a], pending[a], a, n, parts)
        if picked is not None and not isinstance(picked, Flow):
            parts[picked] = parts.get(picked, 1) * n
            if picked in f.even and f.sizes[picked] % parts[picked]:
                return None
        choice[a] = picked
    decision = _decide(f, args, majors, choice, pending, fixed)
    if fixed and any(decision.input_layouts[t] != args[t].layout for t in f.targets):
        return None
    return decision


def _assign_items(
    f: Factors, args: Sequence[Arg], mesh_shape: Axes, fixed: bool
) -> Decision | None:
    """Each item on its own; equal ones (the same Factors and layouts) are decided once. What no
    item takes is replicated, and needs no gradient: torch has none for a tensor shared by the
    elements of lists."""
    input_layouts = [replicated(len(arg.shape)) for arg in args]
    varying: list[Axes] = [()] * len(args)
    output_layouts: list[Layout] = []
    seen: dict[Any, Decision | None] = {}
    for item, members in f.per_item:
        mine = [args[t] for t in members]
        key = (id(item), *[arg.layout for arg in mine])
        if key not in seen:
            seen[key] = assign(item, mine, mesh_shape, fixed)
        decision = seen[key]
        if decision is None:
            return None
        for t, want, axes in zip(
            members, decision.input_layouts, decision.varying_axes, strict=True
        ):
            input_layouts[t], varying[t] = want, axes
        output_layouts += decision.output_layouts
    if fixed and any(input_layouts[t] != args[t].layout for t in f.targets):
        return None
    return Decision(input_layouts, output_layouts if f.outputs else [], varying, {})


def splittable(f: Factors) -> set[Letter]:
    """Letters that an axis may split: in every output or reduced, not whole, never a minor part of
    a dim."""
    minor: set[Letter] = set()
    present: set[Letter] = set(f.reduced)
    for i, dims in enumerate(f.outputs):
        tops = {d[0] if isinstance(d, tuple) else d for d in dims}
        present = present | tops if i == 0 else present & (tops | set(f.reduced))
    for dims in (*f.inputs, *f.outputs):
        seen: set[Letter] = set()
        for d in dims:
            if isinstance(d, tuple):
                minor.update(d[1:])
                d = d[0] if d else None
            if d in seen:
                minor.add(d)  # a diagonal
            seen.add(d)
    return present - f.whole - minor - {None}


def _forced(
    f: Factors, target: Layout, majors: tuple[Letter, ...], usable: set[Letter], a: int
) -> tuple[bool, Any]:
    for axis, op in target.partial:
        if axis == a:
            fits = (bool(f.terms) and op in ("sum", "avg")) or (f.moves and len(f.inputs) == 1)
            return fits, Flow(op)
    d = target.dim_of(a)
    if d is None:
        return True, None
    return majors[d] in usable and majors[d] not in f.reduced, majors[d]


def _pick(
    f: Factors, args: Sequence[Arg], majors: list[tuple[Letter, ...]], usable: set[Letter],
    shards: list[tuple[int, Letter]], pending: list[tuple[int, str]], a: int, n: int,
    parts: dict[Letter, int],
) -> Any:  # fmt: skip
    candidates: list[Letter] = []
    for _, letter in shards:
        if letter not in usable or letter in candidates:
            continue
        if letter not in f.even or f.sizes[letter] % (parts.get(letter, 1) * n) == 0:
            candidates.append(letter)
    alone = len(candidates) == 1 and all(letter == candidates[0] for _, letter in shards)
    if not pending and alone and candidates[0] not in f.halo:
        return candidates[0]
    state: dict[int, Any] = dict(shards)
    best: Any = None
    best_key: tuple[float, ...] = (
        _move(args, majors, state, dict(pending), None, frozenset(), n),
        3.0,
        0.0,
    )
    for letter in candidates:
        size = -max(args[t].nbytes for t, own_letter in shards if own_letter == letter)
        kind = 2.0 if letter in f.reduced else 0.0
        moved = _move(args, majors, state, dict(pending), letter, frozenset(), n)
        if letter in f.halo:
            moved += f.halo[letter](parts.get(letter, 1) * n)
        key = (moved, kind, float(size))
        if key < best_key:
            best, best_key = letter, key
    flow = _keepers(f, args, pending)
    if flow is not None:
        key = (_move(args, majors, state, dict(pending), None, flow, n), 1.0, 0.0)
        if key < best_key:
            best = Flow(pending[0][1])
    return best


def _move(
    args: Sequence[Arg], majors: list[tuple[Letter, ...]], state: dict[int, Letter],
    pending: dict[int, str],
    letter: Letter, keepers: frozenset[int], n: int,
) -> float:  # fmt: skip
    """Bytes that one rank moves so that all arguments follow the choice on this axis."""
    total = 0.0
    for t, op in pending.items():
        if t not in keepers and op:
            total += args[t].nbytes * (1 if letter is not None and letter in majors[t] else 2)
    for t, current in state.items():
        if current != letter or letter is None:
            total += args[t].nbytes / (n if letter is not None and letter in majors[t] else 1)
    return total * (n - 1) / n


def _keepers(
    f: Factors, args: Sequence[Arg], pending: list[tuple[int, str]]
) -> frozenset[int] | None:
    """The arguments that stay Partial if the reduction flows: one for each term, all with one
    reduction."""
    ops = {op for _, op in pending}
    if len(ops) != 1:
        return None
    tensors = {t for t, _ in pending}
    if f.moves and len(tensors) == len(f.inputs):
        return frozenset(tensors)
    if not f.terms or not ops <= {"sum", "avg"}:
        return None
    keep = []
    for term in f.terms:
        mine = [t for t in term if t in tensors]
        if not mine:
            return None
        keep.append(max(mine, key=lambda t: args[t].nbytes))
    return frozenset(keep)


def _decide(
    f: Factors, args: Sequence[Arg], majors: list[tuple[Letter, ...]], choice: list[Any],
    pending: list[list[tuple[int, str]]], fixed: bool,
) -> Decision:  # fmt: skip
    split: dict[Letter, Axes] = {}
    for a, picked in enumerate(choice):
        if picked is not None and not isinstance(picked, Flow):
            split[picked] = (*split.get(picked, ()), a)
    for letter, axes in split.items():
        if len(axes) > 1:
            split[letter] = _order(letter, axes, args[:1] if fixed else args, majors)

    partial_in: list[list[tuple[int, str]]] = [[] for _ in args]
    partial_out: list[list[tuple[int, str]]] = [[] for _ in f.outputs]
    active = []
    for a, picked in enumerate(choice):
        if picked is None:
            continue
        active.append(a)
        if isinstance(picked, Flow):
            keep = _keepers(f, args, pending[a]) if not fixed else _joined(f, pending[a], picked.op)
            for t in keep or ():
                partial_in[t].append((a, picked.op))
            for out in partial_out:
                out.append((a, picked.op))
        elif picked in f.reduced and f.reduced[picked] != "inner":
            op = f.reduced[picked]
            for i, dims in enumerate(f.outputs):
                if picked not in dims:
                    partial_out[i].append((a, op))
            for term in f.terms:
                if not any(picked in majors[t] for t in term):
                    partial_in[min(term)].append((a, op))  # joins: the first rank adds it

    input_layouts: list[Layout] = []
    varying: list[Axes] = []
    for t in range(len(args)):
        if t in f.metadata_only:
            input_layouts.append(args[t].layout)
            varying.append(())
            continue
        dims = tuple(split.get(letter, ()) if letter is not None else () for letter in majors[t])
        want = Layout(dims, tuple(partial_in[t]))
        input_layouts.append(want)
        taken = want.varies()
        varying.append(tuple(a for a in active if a not in taken))
    output_layouts = []
    for i, out_dims in enumerate(f.outputs):
        tops = (d[0] if isinstance(d, tuple) and d else d for d in out_dims)
        output_layouts.append(
            Layout(
                tuple(split.get(t, ()) if t is not None and t != () else () for t in tops),
                tuple(partial_out[i]),
            )
        )
    return Decision(input_layouts, output_layouts, varying, split)


def _joined(f: Factors, pending: list[tuple[int, str]], op: str) -> list[int]:
    """In place on a Partial target: in each term one operand must be Partial; those that are not,
    join."""
    has = {t for t, o in pending if o == op}
    return [next((t for t in sorted(term) if t in has), min(term)) for term in f.terms] or [0]


def _order(
    letter: Letter, axes: Axes, args: Sequence[Arg], majors: list[tuple[Letter, ...]]
) -> Axes:
    """Several axes on one factor: in the order of the largest argument that has some of them, new
    ones last."""
    best: Axes = ()
    size = -1
    for t, arg in enumerate(args):
        for d, major in enumerate(majors[t]):
            mine = tuple(a for a in arg.layout.dims[d] if a in axes) if major == letter else ()
            if mine and (len(mine), arg.nbytes) > (len(best), size):
                best, size = mine, arg.nbytes
    return best + tuple(a for a in axes if a not in best)
