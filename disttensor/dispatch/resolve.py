"""Resolves how a call is run. ``plan_call`` makes a plan of the Resolution, ``explain`` prints it.

The ways, in the order in which they are tried: a handler (functions that compute nothing),
``out=``; if there is a rule: the call with numbers read from tensors, one call for each mesh
(lists), the rule; the Python body of the function; the fallback. The fallback gathers everything,
which is always correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from disttensor.cache import Cache
from disttensor.checks import has_own_operators
from disttensor.core.layout import replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.dispatch import balanced, foreach
from disttensor.dispatch.function_body import body_of
from disttensor.dispatch.key import key_without_sizes, of_no_mesh
from disttensor.errors import name_of
from disttensor.pytree import collect, substitute
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from ops.factors import Arg, Factors, NoRule
from ops.infer import decide
from ops.propagation import Decision, of_any_size, sizes_of
from ops.registry import RULES, Rule
from ops.signatures import Form, form_of, read_numbers

Tensor = torch.Tensor
Function = Callable[..., Any]

HANDLERS: dict[Function, Function] = {}  # functions with a handler instead of a rule
OF_KEY: set[Function] = set()  # functions whose result depends on the key of the call only


def handler(*funcs: Function) -> Callable[[Function], Function]:
    """Registers a handler of these functions, for calls with a DistTensor among the arguments."""

    def decorate(answer: Function) -> Function:
        for func in funcs:
            HANDLERS[func] = answer
        return answer

    return decorate


class CallByRule(NamedTuple):
    """A call whose rule is known.

    form      the call in its one form: tensors are counted in this form.
    tensors   the tensor arguments, in order.
    specs     of these tensors (a regular tensor counts as replicated).
    factors   of this call, or of a call that differs in the sizes of letters only.
    shapes    of the results.
    """

    func: Function
    form: Form
    tensors: Sequence[Tensor]
    specs: list[DistSpec]
    rule: Rule
    factors: Factors
    decision: Decision
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The way to run a call: "handler", "out", "numbers", "each_mesh", "rule", "decompose" or
    "gather".
    ``why``: the reason why no rule is used. ``expected``: a gather gives no warning (an in-place
    function whose target could not keep its placement by the rule)."""

    way: str
    why: str = ""
    call: CallByRule | None = None
    expected: bool = False


# Decisions by rule, shape of the mesh, and key without sizes: for calls of these shapes on any
# mesh, as the meshes of stages, or of any shapes (None).
DECISIONS: Cache[Any, tuple[Factors, Decision]] = Cache(8192, lasting=True)


def resolve(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], key: Any = None
) -> Resolution:
    """Returns how a call of ``func`` is run; ``key``: of the call, if it has one. Raises the rule's
    errors for wrong arguments, and ValueError if tensors are on two meshes."""
    if func in HANDLERS:
        return Resolution("handler")
    if "out" in kwargs:
        return Resolution("out")
    rule = RULES.get(func)
    if rule is None:
        return _without_rule(func, "no rule")
    if read_numbers(func, args, kwargs) is not None:
        return Resolution("numbers")
    if foreach.meshes_of(func, args, kwargs) > 1:
        return Resolution("each_mesh")
    form = form_of(func, args, kwargs)
    tensors = collect(form[:2], [])
    specs = specs_of(func, tensors)
    mesh, shapes = specs[0].mesh, tuple([s.shape for s in specs])
    kind = None
    if key is not None and of_no_mesh(func, key):
        kind = rule, mesh.shape, key_without_sizes(key)
        known = DECISIONS.get((kind, shapes))
        sizes = None if known is None else known[0].sizes
        if known is None and rule.sizes == "letters":
            known = DECISIONS.get((kind, None))
            sizes = None if known is None else sizes_of(known[0], shapes)
        if known is not None and sizes is not None:
            results = known[0].output_shapes(sizes)
            return Resolution(
                "rule", call=CallByRule(func, form, tensors, specs, rule, *known, results)
            )
    layouts = bare = [s.layout for s in specs]
    own = any(layout.custom for layout in layouts)
    if own and not all(map(balanced.is_known, layouts)):
        why = "rules know Shard, Replicate and Partial; a placement of another type is gathered"
        return Resolution("gather", why)
    if own:
        bare = [balanced.without_balanced(layout) for layout in layouts]
    given = [
        Arg(s.shape, dtype=s.dtype, layout=layout, index=i)
        for i, (s, layout) in enumerate(zip(specs, bare, strict=True))
    ]
    each = iter(given)
    asked, named = substitute(form[:2], lambda t: next(each))
    try:
        factors, decision = decide(func, asked, named, given, mesh.shape, mesh.device.type)
    except NoRule as reason:
        return _without_rule(func, str(reason))
    if decision is not None and own:
        decision = balanced.keep_balanced(factors, decision, layouts, writes=rule.inplace)
    if decision is None:
        why = (
            "the rule cannot keep the placement of the tensor that is written, which gets its "
            "piece afterwards"
        )
        return Resolution("gather", why, expected=True)
    for t, layout in zip(tensors, decision.input_layouts, strict=True):
        if type(t) is not DistTensor and has_own_operators(t) and layout != replicated(t.ndim):
            name = type(t).__name__
            return Resolution("gather", f"a {name} among the arguments stays whole")
    if kind is not None and not own:
        any_size = rule.sizes == "letters" and of_any_size(factors, decision, shapes)
        DECISIONS[kind, None if any_size else shapes] = factors, decision
    results = factors.output_shapes()
    call = CallByRule(func, form, tensors, specs, rule, factors, decision, results)
    return Resolution("rule", call=call)


def _without_rule(func: Function, why: str) -> Resolution:
    return Resolution("gather" if body_of(func) is None else "decompose", why)


def specs_of(func: Function, tensors: Sequence[Tensor]) -> list[DistSpec]:
    """Returns the specs of the tensors of a call, in order."""
    mesh = mesh_of_call(func, tensors)
    return [t.spec if type(t) is DistTensor else regular_spec(t, mesh) for t in tensors]


def mesh_of_call(func: Function, tensors: Sequence[Tensor]) -> ProcessMesh:
    """Returns the mesh of the call. Raises ValueError if there are two: no mesh is guessed."""
    dist = [
        t if type(t) is DistTensor else wait_for(t) for t in tensors if isinstance(t, DistTensor)
    ]
    mesh = dist[0].spec.mesh
    refuse_torch_dtensors(func, tensors)
    for t in dist[1:]:
        if t.spec.mesh is not mesh:
            free = ", which sends nothing from a sub-mesh to its whole mesh"
            raise ValueError(
                f"{name_of(func)}: tensors on two meshes: {dist[0].spec!r} on {mesh!r} and "
                f"{t.spec!r} on {t.spec.mesh!r}. Bring one over first: reshard(x, mesh, placements)"
                f"{free if t.spec.mesh.root is mesh.root else ''}"
            )
    return mesh


def refuse_torch_dtensors(func: Function, tensors: Sequence[Tensor]) -> None:
    """Raises ValueError for a DTensor, which would count as a regular tensor."""
    # by name: importing DTensor takes longer than importing disttensor
    if any(type(t).__name__ == "DTensor" for t in tensors):
        raise ValueError(
            f"{name_of(func)}: a torch DTensor among DistTensors: convert it with "
            "from_dtensor(x), which copies nothing"
        )


def regular_spec(x: Tensor, mesh: ProcessMesh) -> DistSpec:
    """Returns the spec of a regular tensor among DistTensors: replicated."""
    return DistSpec(mesh, replicated(x.ndim), x.shape, x.dtype)
