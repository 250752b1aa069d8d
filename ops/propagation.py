"""assign: give mesh axes to factors. The whole inference of placements is here; it is pure.

Per mesh axis one of: a factor (every tensor with that letter is split there), *flow* (a pending
reduction passes through) or nothing (all whole). The choice that moves the fewest bytes wins; on a
tie pass-through before flow before reduced before whole, then the letter of the largest operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disttensor.layout import Axes, Layout, replicated
from ops.factors import Arg, Factors, Letter


class Flow:
    """A Partial that passes through on an axis."""

    __slots__ = ("op",)

    def __init__(self, op: str) -> None:
        self.op = op


@dataclass(slots=True)
class Decision:
    """Layouts wanted of each input and given to each output; ``varying[i]``: axes over which input
    i is replicated while the call varies, where its gradient is a contribution; ``split``: letter
    -> axes."""

    wants: list[Layout]
    gives: list[Layout]
    varying: list[Axes]
    split: dict[Letter, Axes]


def assign(
    f: Factors, args: Sequence[Arg], mesh_shape: Axes, fixed: bool = False
) -> Decision | None:
    """The cheapest placements for the call. With ``fixed`` the targets of an in-place function keep
    their layouts (the choice follows the first argument); None if the rule cannot do that."""
    if f.parts:
        return _assign_parts(f, args, mesh_shape, fixed)
    majors = [tuple(d[0] if isinstance(d, tuple) else d for d in dims) for dims in f.inputs]
    usable = splittable(f)
    held: list[list[tuple[int, Letter]]] = [[] for _ in mesh_shape]
    pending: list[list[tuple[int, str]]] = [[] for _ in mesh_shape]
    for t, arg in enumerate(args):
        layout = arg.layout
        for d, axes in enumerate(layout.dims):
            for a in axes:
                held[a].append((t, majors[t][d]))
        if t not in f.ignored:
            for a, op in layout.partial:
                pending[a].append((t, op))

    choice: list[Any] = [None] * len(mesh_shape)
    parts: dict[Letter, int] = {}
    for a, n in enumerate(mesh_shape):
        if fixed:
            ok, picked = _forced(f, args[0].layout, majors[0], usable, a)
            if not ok:
                return None
        elif not held[a] and not pending[a]:
            continue
        else:
            picked = _pick(f, args, majors, usable, held[a], pending[a], a, n, parts)
        if picked is not None and not isinstance(picked, Flow):
            parts[picked] = parts.get(picked, 1) * n
            if picked in f.even and f.sizes[picked] % parts[picked]:
                return None
        choice[a] = picked
    decision = _decide(f, args, majors, choice, pending, fixed)
    if fixed and any(decision.wants[t] != args[t].layout for t in f.targets):
        return None
    return decision


def _assign_parts(
    f: Factors, args: Sequence[Arg], mesh_shape: Axes, fixed: bool
) -> Decision | None:
    """Each part on its own; equal parts (the same Factors and layouts) are decided once. What no
    part takes is replicated, and needs no gradient: torch has none for a tensor shared by the
    elements of lists."""
    wants = [replicated(len(arg.shape)) for arg in args]
    varying: list[Axes] = [()] * len(args)
    gives: list[Layout] = []
    seen: dict[Any, Decision | None] = {}
    for part, members in f.parts:
        mine = [args[t] for t in members]
        key = (id(part), *[arg.layout for arg in mine])
        if key not in seen:
            seen[key] = assign(part, mine, mesh_shape, fixed)
        decision = seen[key]
        if decision is None:
            return None
        for t, want, axes in zip(members, decision.wants, decision.varying, strict=True):
            wants[t], varying[t] = want, axes
        gives += decision.gives
    if fixed and any(wants[t] != args[t].layout for t in f.targets):
        return None
    return Decision(wants, gives if f.outputs else [], varying, {})


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
    held: list[tuple[int, Letter]], pending: list[tuple[int, str]], a: int, n: int,
    parts: dict[Letter, int],
) -> Any:  # fmt: skip
    candidates: list[Letter] = []
    for _, letter in held:
        if letter not in usable or letter in candidates:
            continue
        if letter not in f.even or f.sizes[letter] % (parts.get(letter, 1) * n) == 0:
            candidates.append(letter)
    alone = len(candidates) == 1 and all(letter == candidates[0] for _, letter in held)
    if not pending and alone and candidates[0] not in f.halo:
        return candidates[0]
    state: dict[int, Any] = dict(held)
    best: Any = None
    best_key: tuple[float, ...] = (
        _move(args, majors, state, dict(pending), None, frozenset(), n),
        3.0,
        0.0,
    )
    for letter in candidates:
        size = -max(args[t].nbytes for t, held_letter in held if held_letter == letter)
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

    wants: list[Layout] = []
    varying: list[Axes] = []
    for t in range(len(args)):
        if t in f.ignored:
            wants.append(args[t].layout)
            varying.append(())
            continue
        dims = tuple(split.get(letter, ()) if letter is not None else () for letter in majors[t])
        want = Layout(dims, tuple(partial_in[t]))
        wants.append(want)
        if active:
            busy = want.varies()
            varying.append(tuple(a for a in active if a not in busy))
        else:
            varying.append(())
    gives = []
    for i, out_dims in enumerate(f.outputs):
        tops = (d[0] if isinstance(d, tuple) and d else d for d in out_dims)
        gives.append(
            Layout(
                tuple(split.get(t, ()) if t is not None and t != () else () for t in tops),
                tuple(partial_out[i]),
            )
        )
    return Decision(wants, gives, varying, split)


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
