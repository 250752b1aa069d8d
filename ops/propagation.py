"""assign: chooses the letter that each mesh axis splits. This module infers all placements, from
shapes and layouts alone.

The choices on an axis are, in the order that decides a tie:

    1. a letter of the results by which an input is already split: every tensor with the letter is
       then split there; of several letters, first the letter of the largest input
    2. flow: a pending reduction passes through, if every term of the call has one
    3. another letter of an input that is split on this axis: its dim is exchanged for this one
    4. a reduced letter by which an input is split: the result is pending
    5. none: all inputs are replicated

If one letter that is free to be split (it has no halo, and need not divide its dim) splits all
split inputs on an axis, and no input is pending there, this letter is the only choice. Replicated
and pending inputs alone never make an axis split a letter.

Of all choices on all axes together the one is taken whose *traffic* is least: the bytes that one
rank receives so that the inputs follow it, and in the backward so that their gradients go back
(``ops/traffic.py``), with the halo of a letter whose dim is read beyond the piece. The latency of
collectives, the readers of the results, and the reduction of the gradients of replicated inputs do
not count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disttensor.core.layout import Axes, Layout, lies_whole, replicated
from ops.factors import Arg, Factors, Letter
from ops.traffic import traffic

LESS = 1e-6  # bytes: equal sums of shares may differ by rounding


@dataclass(frozen=True, slots=True)
class Flow:
    """A Partial that passes through on an axis, in the arguments ``keep``."""

    op: str
    keep: frozenset[int]


@dataclass(slots=True)
class Decision:
    """``input_layouts``: the layouts to which the inputs are resharded; ``output_layouts``: of the
    results.

    ``varying_axes[i]``: the axes over which input i is replicated while the call varies, so that
    its gradient is a contribution. ``split``: letter -> axes that split it. ``compared``: it was
    chosen among several by their traffic, which depends on sizes.
    """

    input_layouts: list[Layout]
    output_layouts: list[Layout]
    varying_axes: list[Axes]
    split: dict[Letter, Axes]
    compared: bool = False


def assign(
    f: Factors, args: Sequence[Arg], mesh_shape: Axes, fixed: bool = False
) -> Decision | None:
    """Returns the cheapest placements for the call. With ``fixed`` the targets of an in-place
    function keep their layouts (the choice follows the first argument); None if the rule cannot do
    that."""
    if f.per_item:
        return _assign_items(f, args, mesh_shape, fixed)
    if not f.co_split and all(lies_whole(arg.layout) for arg in args):
        given, whole = [arg.layout for arg in args], [replicated(len(dims)) for dims in f.outputs]
        return Decision(given, whole, [()] * len(args), {})
    majors = [tuple(d[0] if isinstance(d, tuple) else d for d in dims) for dims in f.inputs]
    usable = splittable(f)
    shards: list[list[tuple[int, Letter]]] = [[] for _ in mesh_shape]
    pending: list[list[tuple[int, str]]] = [[] for _ in mesh_shape]
    for t, arg in enumerate(args):
        layout = arg.layout
        for d, axes in enumerate(layout.dims):
            for a in axes:
                if a not in f.co_split.get(majors[t][d], ()):
                    shards[a].append((t, majors[t][d]))
        if t not in f.metadata_only:
            for a, op in layout.partial:
                pending[a].append((t, op))

    held = {
        letter: axes
        for t in f.side_writes
        for letter, axes in zip(majors[t], args[t].layout.dims, strict=True)
    }
    options: list[Sequence[Any]] = []
    for a in range(len(mesh_shape)):
        firm = [letter for letter, axes in held.items() if a in axes]
        if fixed:
            ok, picked = _forced(f, args[0].layout, majors[0], usable, a)
            if not ok:
                return None
            options.append((picked,))
        elif firm or (not shards[a] and not pending[a]):
            options.append(firm or (None,))
        else:
            free = usable - held.keys()
            options.append(_options(f, args, majors, free, shards[a], pending[a]))
    decision = _cheapest(f, args, mesh_shape, majors, options, pending, fixed)
    if decision is None:
        return None
    if fixed and any(decision.input_layouts[t] != args[t].layout for t in f.targets):
        return None
    return decision


def _cheapest(
    f: Factors, args: Sequence[Arg], mesh_shape: Axes, majors: list[tuple[Letter, ...]],
    options: list[Sequence[Any]], pending: list[list[tuple[int, str]]], fixed: bool,
) -> Decision | None:  # fmt: skip
    """Returns the decision with the least traffic among all combinations of the axes' options; None
    if none splits the letters in ``divisible_only`` without remainder."""
    best: Decision | None = None
    least = math.inf
    firm = {0} if fixed else f.side_writes
    every = (
        (choice, split)
        for choice in itertools.product(*options)
        if _splits_evenly(f, choice, mesh_shape)
        for split in _splits(choice, args, majors, firm, f.co_split)
    )
    alone = all(len(some) == 1 for some in options)
    for choice, split in every:
        decision = _decide(f, args, majors, choice, split, pending, fixed)
        if alone and all(len(axes) == 1 for axes in split.values()):
            return decision
        moved = sum(
            traffic(arg, want, varying, mesh_shape)
            for arg, want, varying in zip(
                args, decision.input_layouts, decision.varying_axes, strict=True
            )
        )
        for letter, axes in decision.split.items():
            if letter in f.halo:
                moved += f.halo[letter](math.prod(mesh_shape[a] for a in axes))
        decision.compared = True
        if moved < least - LESS:
            best, least = decision, moved
        if least <= LESS:
            break  # no decision moves less
    return best


def _splits_evenly(f: Factors, choice: Sequence[Any], mesh_shape: Axes) -> bool:
    """Returns True if each letter in ``divisible_only`` is split without remainder, or not."""
    parts: dict[Letter, int] = {}
    for n, picked in zip(mesh_shape, choice, strict=True):
        if picked in f.divisible_only:
            parts[picked] = parts.get(picked, 1) * n
    return all(f.sizes[letter] % n == 0 for letter, n in parts.items())


def _assign_items(
    f: Factors, args: Sequence[Arg], mesh_shape: Axes, fixed: bool
) -> Decision | None:
    """Decides each item separately; equal items (the same Factors and layouts) once. Arguments of
    no item are replicated, and need no gradient: torch has none for a tensor shared by the elements
    of lists."""
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
    """Returns the letters that an axis may split: in every output or reduced, not whole, never a
    minor part of a dim."""
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
    return present - f.unsplittable - minor - {None}


def _forced(
    f: Factors, target: Layout, majors: tuple[Letter, ...], usable: set[Letter], a: int
) -> tuple[bool, Any]:
    for axis, op in target.partial:
        if axis == a:
            linear = bool(f.linear_terms) and op in ("sum", "avg")
            fits = linear or (f.moves and len(f.inputs) == 1)
            return fits, Flow(op, frozenset())
    d = target.dim_of(a)
    if d is None:
        return True, None
    return majors[d] in usable and majors[d] not in f.reduced, majors[d]


def _options(
    f: Factors, args: Sequence[Arg], majors: list[tuple[Letter, ...]], usable: set[Letter],
    shards: list[tuple[int, Letter]], pending: list[tuple[int, str]],
) -> list[Any]:  # fmt: skip
    """Returns the choices of an axis on which some inputs are split or pending; on a tie, the
    earlier one wins."""
    letters = {letter for _, letter in shards}
    if not pending and len(letters) == 1 and letters <= usable - f.halo.keys() - f.divisible_only:
        return list(letters)
    sized = sorted(shards, key=lambda shard: -args[shard[0]].nbytes)
    found = list(dict.fromkeys(letter for _, letter in sized if letter in usable))
    others = dict.fromkeys(
        letter for t, _ in sized for letter in majors[t] if letter in usable - f.halo.keys()
    )
    return [
        *(letter for letter in found if letter not in f.reduced),
        *_flows(f, args, pending),
        *(letter for letter in others if letter not in f.reduced and letter not in found),
        *(letter for letter in found if letter in f.reduced),
        None,
    ]


def _flows(f: Factors, args: Sequence[Arg], pending: list[tuple[int, str]]) -> Iterator[Flow]:
    """Yields each ``Flow`` by which a pending reduction passes through: all arguments of a
    movement, or one of each term, stay Partial, with one reduction. The largest arguments come
    first."""
    ops = {op for _, op in pending}
    if len(ops) != 1:
        return
    (op,) = ops
    tensors = sorted({t for t, _ in pending}, key=lambda t: (-args[t].nbytes, t))
    if f.moves and len(tensors) == len(f.inputs):
        yield Flow(op, frozenset(tensors))
    elif f.linear_terms and op in ("sum", "avg"):
        operands = ([t for t in tensors if t in term] for term in f.linear_terms)
        for keep in itertools.product(*operands):
            yield Flow(op, frozenset(keep))


def _decide(
    f: Factors, args: Sequence[Arg], majors: list[tuple[Letter, ...]], choice: Sequence[Any],
    split: dict[Letter, Axes], pending: list[list[tuple[int, str]]], fixed: bool,
) -> Decision:  # fmt: skip
    partial_in: list[list[tuple[int, str]]] = [[] for _ in args]
    partial_out: list[list[tuple[int, str]]] = [[] for _ in f.outputs]
    active = []
    for a, picked in enumerate(choice):
        if picked is None:
            continue
        active.append(a)
        if isinstance(picked, Flow):
            for t in _joined(f, pending[a], picked.op) if fixed else picked.keep:
                partial_in[t].append((a, picked.op))
            for out in partial_out:
                out.append((a, picked.op))
        elif picked in f.reduced and f.reduced[picked] != "inner":
            op = f.reduced[picked]
            for i, dims in enumerate(f.outputs):
                if picked not in dims:
                    partial_out[i].append((a, op))
            for term in f.linear_terms:
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
    """Returns the operand of each term that stays Partial in an in-place call on a Partial target;
    operands that are not Partial join."""
    has = {t for t, o in pending if o == op}
    return [min(term & has, default=min(term)) for term in f.linear_terms] or [0]


def _splits(
    choice: Sequence[Any], args: Sequence[Arg], majors: list[tuple[Letter, ...]],
    firm: Collection[int], co_split: Mapping[Letter, Axes],
) -> Iterator[dict[Letter, Axes]]:  # fmt: skip
    """Yields dicts letter -> axes that split it, major first. If several axes split a letter, all
    their orders are tried, first the order of an argument that must keep its layout (``firm``), or
    of the largest argument that has most of these axes."""
    split: dict[Letter, Axes] = dict(co_split)
    for a, picked in enumerate(choice):
        if picked is not None and not isinstance(picked, Flow):
            split[picked] = (*split.get(picked, ()), a)
    if all(len(axes) == 1 for axes in split.values()):
        yield split
        return
    orders = []
    for letter, axes in split.items():
        best: Axes = ()
        rank = (False, 0, -1)
        for t, arg in enumerate(args):
            for d, major in enumerate(majors[t]):
                mine = tuple(a for a in arg.layout.dims[d] if a in axes) if major == letter else ()
                if mine and (t in firm, len(mine), arg.nbytes) > rank:
                    best, rank = mine, (t in firm, len(mine), arg.nbytes)
        whole = best + tuple(a for a in axes if a not in best)
        orders.append([whole] if rank[0] else list(itertools.permutations(whole)))
    for each in itertools.product(*orders):
        yield dict(zip(split, each, strict=True))


# Calls that differ only in sizes -----------------------------------------------------------------


def of_any_size(f: Factors, decision: Decision, shapes: Sequence[Axes]) -> bool:
    """Returns True if the decision is valid for other sizes of the letters: it did not compare
    bytes, and all dims of a letter have one size. For rules with ``sizes="letters"``."""
    if decision.compared or f.per_item or f.divisible_only or f.halo or f.co_split:
        return False
    if f.shapes is not None or sizes_of(f, shapes) != f.sizes:
        return False
    for dims, shape in zip(f.inputs, shapes, strict=True):
        for letter, n in zip(dims, shape, strict=True):
            if type(letter) is tuple or (letter is None and n != 1):
                return False
    return not any(type(letter) is tuple for dims in f.outputs for letter in dims)


def sizes_of(f: Factors, shapes: Sequence[Axes]) -> dict[Letter, int] | None:
    """Returns the sizes of the letters in tensors of these shapes; None if a letter has two."""
    sizes: dict[Letter, int] = {}
    for dims, shape in zip(f.inputs, shapes, strict=True):
        for letter, n in zip(dims, shape, strict=True):
            if letter is not None and sizes.setdefault(letter, n) != n:
                return None
    return sizes
