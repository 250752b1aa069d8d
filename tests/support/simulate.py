"""The oracle of rules, without processes: run a rule's local function at every coordinate.

``check_rule(torch.sum, torch.randn(5, 6), 1, layouts=[[Shard(0), Replicate()]])`` compares with the
plain function: values, gradients, the shape of each local piece. ``check_rule(torch.sum, x, 1)``
does so for many random layouts. One thread per coordinate; collectives meet at a barrier, so ranks
that disagree are an error, not a hang.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from disttensor.core.layout import Layout, box_at
from disttensor.core.placement import Partial, Placement, Replicate, Shard, show
from ops.factors import Arg, Factors
from ops.infer import decide
from ops.local import LocalCall, LocalPiece
from ops.propagation import Decision
from ops.registry import RULES
from ops.signatures import form_of, read_numbers
from tests.support.layouts import assemble, cut
from tests.support.structure import flat, replace_tensors
from tests.support.thread_ranks import Coordinate, SimulatedCollectives, World


@dataclass
class Simulated:
    """What one simulated call did. ``values[c]``: the results at coordinate c, flat; ``log``: the
    collectives of one rank, (kind, axes, number of elements), forward then backward. ``full``:
    results put together."""

    decision: Decision
    factors: Factors
    values: dict[Coordinate, list[Any]]
    full: list[Any]
    gradients: list[Any] = field(default_factory=list)
    log: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)
    arguments: dict[Coordinate, list[Tensor]] = field(default_factory=dict)  # after the call
    second: list[Any] = field(default_factory=list)

    def outputs(self, mesh_ndim: int) -> tuple[tuple[Placement, ...], ...]:
        return tuple(g.placements(mesh_ndim) for g in self.decision.output_layouts)


def plan(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    layouts: Sequence[Sequence[Placement]],
    mesh_shape: Coordinate,
) -> tuple[list[Tensor], Factors, Decision | None, bool]:
    """(tensors of the call, factors, decision, in place)."""
    args, kwargs, _ = form_of(func, args, kwargs)
    tensors: list[Tensor] = []
    placed: list[Arg] = []

    def to_arg(t: Tensor) -> Arg:
        i = len(tensors)
        arg = Arg(t.shape, layouts[i], t.dtype)
        tensors.append(t)
        placed.append(arg.placed(len(mesh_shape), i))
        return placed[-1]

    rule_args = replace_tensors(args, to_arg)
    rule_kwargs = {k: replace_tensors(v, to_arg) for k, v in kwargs.items()}
    factors, decision = decide(func, rule_args, rule_kwargs, placed, mesh_shape)
    return tensors, factors, decision, RULES[func].inplace


def simulate(
    func: Any,
    *args: Any,
    layouts: Sequence[Sequence[Placement]],
    mesh_shape: Coordinate = (2, 2),
    grad: bool = False,
    cotangents: Sequence[Any] | None = None,
    frozen: Sequence[int] = (),
    second: Sequence[Any] = (),
    **kwargs: Any,
) -> Simulated | None:
    """Run ``func`` on the pieces that its rule wants; None if the rule gives no decision (in place
    by a copy).

    ``layouts``: the placements each tensor arrives with, in order of appearance (a reshard to what
    the rule wants is taken as done). With ``grad``, gradients for ``cotangents`` of the flat
    results, put together by their types; ``frozen`` tensors require none. ``second``: cotangents of
    the gradients, for the gradients of those (of the tensors, then of the cotangents). Raises
    NoRule where the rule does not cover the call, AssertionError where ranks or shapes disagree.
    """
    args, kwargs, _ = form_of(func, args, kwargs)  # type: ignore[assignment]
    tensors, factors, decision, inplace = plan(func, args, kwargs, layouts, mesh_shape)
    if decision is None:
        return None
    world = World(mesh_shape)
    cuts = []
    for i, (t, w) in enumerate(zip(tensors, decision.input_layouts, strict=True)):
        came = [isinstance(p, Partial) for p in layouts[i]]
        joins = [a for a, op in w.partial if op == "sum" and not came[a]]
        cuts.append(cut(t, w, mesh_shape, seed=i, joins=joins))
    shapes = factors.output_shapes()
    values: dict[Coordinate, list[Any]] = {}
    grads: dict[Coordinate, list[Any]] = {}
    seconds: dict[Coordinate, list[Any]] = {}
    flags: dict[Coordinate, list[bool]] = {}
    graphs: dict[Coordinate, list[bool]] = {}  # of first gradients
    arguments: dict[Coordinate, list[Tensor]] = {}
    collectives = {c: SimulatedCollectives(world, c) for c in world.all}

    def piece(shape: Sequence[int], layout: Layout, c: Coordinate, dtype: Any = None) -> LocalPiece:
        return LocalPiece(tuple(shape), box_at(shape, layout.dims, mesh_shape, c), layout, dtype)

    def one_rank(c: Coordinate) -> None:
        leaves = [p[c] for p in cuts]
        wanted = [
            i
            for i, t in enumerate(tensors)
            if grad and t.is_floating_point() and i not in factors.metadata_only and i not in frozen
        ]
        for i in wanted:
            leaves[i].requires_grad_()
        used = [t.clone() if inplace and t.requires_grad else t for t in leaves]
        given = iter(used)
        call = LocalCall(
            func=func,
            split=decision.split,
            mesh_shape=mesh_shape,
            coordinate=c,
            collectives=collectives[c],
            inputs=[
                piece(t.shape, w, c, t.dtype)
                for t, w in zip(tensors, decision.input_layouts, strict=True)
            ],
            outputs=[piece(s, g, c) for s, g in zip(shapes, decision.output_layouts, strict=True)],
        )
        local = factors.local(call) if factors.local is not None else func
        out = flat(
            local(
                *replace_tensors(args, lambda _: next(given)),
                **replace_tensors(kwargs, lambda _: next(given)),
            )
        )
        values[c] = [v.detach().clone() if isinstance(v, Tensor) else v for v in out]
        for j, (v, p) in enumerate(zip(out, call.outputs, strict=True)):
            if isinstance(v, Tensor) and tuple(v.shape) != p.local_shape:
                raise AssertionError(
                    f"result {j} at {c}: the local has shape {tuple(v.shape)}, "
                    f"its layout says {p.local_shape} of {p.shape}"
                )
        flags[c] = [isinstance(v, Tensor) and v.requires_grad for v in out]
        arguments[c] = [t.detach() for t in used]
        if grad and wanted:
            seeds = [
                (v, _seed(g, layout, mesh_shape, c).requires_grad_(bool(second)))
                for v, g, layout in zip(
                    out, cotangents or [None] * len(out), decision.output_layouts, strict=True
                )
                if isinstance(v, Tensor) and v.requires_grad and g is not None
            ]
            got: Sequence[Any] = [None] * len(wanted)
            if seeds:
                got = torch.autograd.grad(
                    [v for v, _ in seeds],
                    [leaves[i] for i in wanted],
                    [s for _, s in seeds],
                    allow_unused=True,
                    create_graph=bool(second),
                )
            if second:
                once = torch.autograd.grad(
                    [v for v, _ in seeds], [leaves[i] for i in wanted],
                    [s.detach() for _, s in seeds], allow_unused=True, create_graph=True,
                )  # fmt: skip
                graphs[c] = [g is not None and g.requires_grad for g in once]
                sources = [leaves[i] for i in wanted] + [s for _, s in seeds]
                pairs = [
                    (g, cut(second[i], decision.input_layouts[i], mesh_shape, seed=i)[c])
                    for i, g in zip(wanted, got, strict=True)
                    if g is not None
                ]
                again = torch.autograd.grad(
                    [g for g, _ in pairs], sources, [s for _, s in pairs], allow_unused=True
                )
                seconds[c] = [
                    torch.zeros_like(x) if g is None else g.detach()
                    for x, g in zip(sources, again, strict=True)
                ]
            found = dict(zip(wanted, got, strict=True))
            grads[c] = [
                None
                if i not in found
                else torch.zeros_like(leaf)
                if found[i] is None
                else found[i].detach()
                for i, leaf in enumerate(leaves)
            ]

    world.run(one_rank)
    result = Simulated(decision, factors, values, [], [], collectives[world.all[0]].log)
    for j, (shape, layout) in enumerate(zip(shapes, decision.output_layouts, strict=True)):
        parts = {c: v[j] for c, v in values.items()}
        if isinstance(next(iter(parts.values())), Tensor):
            result.full.append(assemble(parts, shape, layout, mesh_shape, f"result {j}"))
        else:
            assert len(set(parts.values())) == 1, f"result {j} differs: {parts}"
            result.full.append(next(iter(parts.values())))
    result.arguments = arguments
    assert len({tuple(f) for f in flags.values()}) == 1, f"ranks disagree what has a graph: {flags}"
    alike = {tuple(g) for g in graphs.values()}
    assert len(alike) < 2, f"ranks disagree which first gradient has a graph: {graphs}"
    for i, t in enumerate(tensors if grads else ()):
        result.gradients.append(_gradient(i, t, grads, decision, mesh_shape))
    if seconds:
        wanted = [i for i, g in enumerate(result.gradients) if g is not None]
        for n, i in enumerate(wanted):
            mine = {c: {i: g[n]} for c, g in seconds.items()}
            result.second.append(_gradient(i, tensors[i], mine, decision, mesh_shape))
        live = [j for j, flag in enumerate(next(iter(flags.values()))) if flag]
        for n, j in enumerate(live, len(wanted)):
            layout = decision.output_layouts[j]
            parts = {c: g[n] for c, g in seconds.items()}
            result.second.append(
                assemble(
                    parts, shapes[j], Layout(layout.dims), mesh_shape,
                    f"second gradient of cotangent {j}", summed=sorted(layout.partial_axes),
                )
            )  # fmt: skip
    return result


def _seed(g: Tensor, layout: Layout, mesh_shape: Coordinate, c: Coordinate) -> Tensor:
    """The gradient of a result's local: its piece, or the whole one (1/n of it where an average is
    pending)."""
    for axis, op in layout.partial:
        g = g / mesh_shape[axis] if op == "avg" else g
    return g[box_at(g.shape, layout.dims, mesh_shape, c).slices].clone()


def _gradient(
    i: int,
    t: Tensor,
    grads: dict[Coordinate, Any],
    decision: Decision,
    mesh_shape: Coordinate,
) -> Any:
    parts = {c: g[i] for c, g in grads.items()}
    if next(iter(parts.values())) is None:
        return None
    want = decision.input_layouts[i]
    full = assemble(
        parts,
        t.shape,
        Layout(want.dims),
        mesh_shape,
        f"gradient {i}",
        summed=decision.varying_axes[i],
    )
    for axis, op in want.partial:
        full = full * mesh_shape[axis] if op == "avg" else full
    return full


def random_placements(
    ndim: int, mesh_ndim: int, rng: random.Random, partial: Sequence[str] = ()
) -> list[Placement]:
    kinds: list[Any] = [
        Replicate(),
        *(Shard(d) for d in range(ndim)),
        *(Shard(d) for d in range(ndim)),
    ]
    return [rng.choice(kinds + [Partial(op) for op in partial]) for _ in range(mesh_ndim)]


def _layout_sets(
    tensors: Sequence[Tensor], mesh_shape: Coordinate, tries: int, partial: Sequence[str], seed: int
) -> Iterator[list[list[Placement]]]:
    rng = random.Random(seed)
    for _ in range(tries):
        yield [
            random_placements(
                t.ndim, len(mesh_shape), rng, () if t.dtype == torch.bool else partial
            )
            for t in tensors
        ]


def check_rule(
    func: Any,
    *args: Any,
    layouts: Sequence[Sequence[Placement]] | None = None,
    mesh_shape: Coordinate = (2, 2),
    grad: bool = True,
    partial: Sequence[str] = ("sum",),
    tries: int = 24,
    seed: int = 0,
    rtol: float = 1e-9,
    atol: float = 1e-10,
    exact_dtype: bool = True,
    frozen: Sequence[int] = (),
    twice: bool = False,
    **kwargs: Any,
) -> list[Simulated]:
    """Does the rule of ``func`` give what the plain function gives? Values, gradients, local
    shapes, dtypes.

    args, kwargs  full tensors (float64 for gradients) and constants, as one would call ``func``
    layouts       placements of each tensor in order of appearance; without it ``tries`` random
                  sets, with Partial of the reductions in ``partial`` among them
    frozen        numbers of tensors that require no gradient
    twice         the gradients' gradients too
    Gives what was simulated, one for each layout set that the rule decided (in place, some are left
    to a copy). Raises AssertionError with the layouts in it, NoRule where the rule does not cover
    the call.
    """
    args, kwargs = read_numbers(func, args, kwargs) or (args, kwargs)  # type: ignore[assignment]
    args, kwargs, _ = form_of(func, args, kwargs)  # type: ignore[assignment]
    tensors: list[Tensor] = []
    replace_tensors((args, kwargs), lambda t: tensors.append(t) or t)
    copies = [
        t.detach().clone().requires_grad_(grad and t.is_floating_point() and i not in frozen)
        for i, t in enumerate(tensors)
    ]
    given = iter(
        [c.clone() if c.requires_grad else c for c in copies]
    )  # no leaves: func may write its argument
    expected = flat(
        func(
            *replace_tensors(args, lambda _: next(given)),
            **replace_tensors(kwargs, lambda _: next(given)),
        )
    )
    generator = torch.Generator().manual_seed(seed)
    cotangents = [
        torch.rand(v.shape, dtype=v.dtype, generator=generator) + 0.5
        if isinstance(v, Tensor) and v.requires_grad
        else None
        for v in expected
    ]
    live = [(v, g) for v, g in zip(expected, cotangents, strict=True) if g is not None]
    wanted = [c for c in copies if c.requires_grad]
    with_grad = grad and bool(live) and bool(wanted)
    reference: list[Any] = []
    if with_grad:
        for _, g in live:
            g.requires_grad_(twice)
        reference = list(
            torch.autograd.grad(
                [v for v, _ in live], wanted, [g for _, g in live],
                allow_unused=True, create_graph=twice,
            )
        )  # fmt: skip
    second: list[Any] = []
    expected_second: list[Any] = []
    if twice:
        second = [
            torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
            for t in tensors
        ]
        seeds = [s for s, c in zip(second, copies, strict=True) if c.requires_grad]
        pairs = [(g, s) for g, s in zip(reference, seeds, strict=True) if g is not None]
        sources = [*wanted, *(g for _, g in live)]
        got_second = torch.autograd.grad(
            [g for g, _ in pairs], sources, [s for _, s in pairs], allow_unused=True
        )
        expected_second = [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(sources, got_second, strict=True)
        ]
        reference = [None if g is None else g.detach() for g in reference]
        cotangents = [None if g is None else g.detach() for g in cotangents]
    iterator = iter(reference)
    gradients = [next(iterator, None) if c.requires_grad else None for c in copies]
    done = []
    for case in (
        [layouts]
        if layouts is not None
        else _layout_sets(tensors, mesh_shape, tries, partial, seed)
    ):
        try:
            got = simulate(
                func,
                *args,
                layouts=case,
                mesh_shape=mesh_shape,
                grad=with_grad,
                cotangents=cotangents,
                frozen=frozen,
                second=second,
                **kwargs,
            )
            if got is None:
                continue
            _compare(
                got, expected, tensors, gradients if with_grad else [], rtol, atol, exact_dtype
            )
            for i, (mine, plain) in enumerate(zip(got.second, expected_second, strict=True)):
                torch.testing.assert_close(
                    mine, plain, rtol=rtol, atol=atol, equal_nan=True,
                    msg=lambda m, i=i, a=mine, b=plain: f"second {i}: {m}\ngot {a}\nexpected {b}",
                )  # fmt: skip
        except (AssertionError, RuntimeError, IndexError, TypeError, ValueError) as error:
            name = getattr(func, "__name__", func)
            where = ", ".join(
                f"{list(t.shape)} {show(p)}" for t, p in zip(tensors, case, strict=True)
            )
            raise AssertionError(f"{name} on mesh {mesh_shape} of {where}: {error}") from error
        done.append(got)
    return done


def _compare(
    got: Simulated,
    expected: Sequence[Any],
    tensors: Sequence[Tensor],
    gradients: Sequence[Any],
    rtol: float,
    atol: float,
    exact_dtype: bool,
) -> None:
    n = len(next(iter(got.values.values()), [()])) and len(got.decision.output_layouts)
    assert n == len(expected), f"{len(expected)} results, the rule says {n}"
    for j, (mine, plain) in enumerate(zip(got.full, expected, strict=True)):
        if not isinstance(plain, Tensor):
            assert mine == plain, f"result {j}: {mine} instead of {plain}"
            continue
        rounds = plain.is_floating_point() or plain.is_complex()
        torch.testing.assert_close(
            mine,
            plain.detach(),
            rtol=rtol if rounds else 0,
            check_dtype=exact_dtype,
            atol=atol if rounds else 0,
            equal_nan=True,
            msg=lambda m, j=j: f"result {j}: {m}\ngot {mine}\nexpected {plain}",
        )
    for i, (mine, plain) in enumerate(
        zip(got.gradients, gradients, strict=True) if gradients else ()
    ):
        if mine is None or any(
            op not in ("sum", "avg") for _, op in got.decision.input_layouts[i].partial
        ):
            continue
        plain = torch.zeros_like(tensors[i]) if plain is None else plain
        torch.testing.assert_close(
            mine,
            plain,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda m, i=i: f"gradient {i}: {m}\ngot {mine}\nexpected {plain}",
        )
