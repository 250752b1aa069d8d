"""Resolves how a call is run. ``plan_call`` makes a plan of the Resolution, ``explain`` prints it.

The ways, in the order in which they are tried: a handler (functions that compute nothing),
``out=``; if there is a rule: the call with numbers read from tensors, one call for each mesh
(lists), the rule; the Python body of the function; the fallback. The fallback gathers everything,
which is always correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from disttensor.cache import Cache
from disttensor.checks import has_own_operators
from disttensor.core.layout import Axes, Layout, replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.dispatch import balanced, foreach
from disttensor.dispatch.decompose import body_of
from disttensor.dispatch.key import key_without_sizes, of_no_mesh
from disttensor.dispatch.local_context import MeshCollectives
from disttensor.errors import name_of
from disttensor.pytree import collect, substitute
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from disttensor.tensor.reshard import is_local_relabel
from ops.factors import Arg, Factors, NoRule
from ops.infer import decide
from ops.local import LocalCall
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


@dataclass(slots=True)
class RulePlan:
    """Everything about a call by rule that does not depend on data.

    form             the call in its one form: tensors are counted in this form.
    factors          of this call, or of a call that differs in the sizes of letters only.
    specs            of the tensor arguments, in order (a regular tensor counts as replicated).
    shapes           of the results.
    input_specs[i]   the spec that tensor argument i is resharded to, or None.
    varying_axes[i]  the axes over which its use varies (sorted).
    output_specs     of the results; the first run shows their dtypes.
    """

    func: Function
    form: Form
    rule: Rule
    factors: Factors
    decision: Decision
    mesh: ProcessMesh
    specs: list[DistSpec]
    shapes: tuple[tuple[int, ...], ...]
    input_specs: list[DistSpec | None] = field(init=False)
    varying_axes: list[Axes] = field(init=False)
    output_specs: list[DistSpec] = field(init=False)

    def __post_init__(self) -> None:
        mesh = self.mesh
        self.input_specs = [
            None if s.layout == w else s.with_layout(w)
            for s, w in zip(self.specs, self.decision.input_layouts, strict=True)
        ]
        self.varying_axes = [
            tuple([a for a in axes if mesh.shape[a] > 1]) for axes in self.decision.varying_axes
        ]
        dtype = self.specs[0].dtype if self.specs else torch.get_default_dtype()
        self.output_specs = [
            DistSpec(mesh, layout, shape, dtype)
            for layout, shape in zip(self.decision.output_layouts, self.shapes, strict=True)
        ]

    @property
    def redistributes(self) -> bool:
        return any(w is not None for w in self.input_specs)

    @property
    def any_varying(self) -> bool:
        return any(self.varying_axes)

    @property
    def reuses(self) -> list[bool]:
        """For each tensor argument: True if it is pending, and an earlier reduction may be read
        instead. All False for a call that writes, or returns a view."""
        if self.rule.inplace or self.factors.view:
            return [False] * len(self.specs)
        return [bool(s.layout.partial) for s in self.specs]

    @property
    def reduces(self) -> list[bool]:
        """For each tensor argument: True if the call only reduces its pending sums."""
        return [
            bool(s.layout.partial)
            and w == Layout(s.layout.dims)
            and all(op == "sum" for _, op in s.layout.partial)
            and not is_local_relabel(s, s.with_layout(w))
            for s, w in zip(self.specs, self.decision.input_layouts, strict=True)
        ]

    def local_fn(self) -> Function:
        """Returns the function that runs on the locals: the function itself, or the rule's own."""
        if self.factors.local is None:
            return self.func
        mesh = self.mesh
        needed = [w or s for s, w in zip(self.specs, self.input_specs, strict=True)]
        coordinate = mesh.coordinate or (0,) * mesh.ndim
        nontrivial = {
            k: tuple([a for a in v if mesh.shape[a] > 1]) for k, v in self.decision.split.items()
        }
        split = {letter: axes for letter, axes in nontrivial.items() if axes}
        call = LocalCall(
            self.func, needed, self.output_specs, split, mesh.shape, coordinate,
            MeshCollectives(mesh),
        )  # fmt: skip
        return self.factors.local(call)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The way to run a call: "handler", "out", "numbers", "each_mesh", "rule", "decompose" or
    "gather".
    ``why``: the reason why no rule is used. ``expected``: a gather gives no warning (an in-place
    function whose target could not keep its placement by the rule)."""

    way: str
    why: str = ""
    plan: RulePlan | None = None
    expected: bool = False


# decisions for calls that differ in sizes only
_OF_ANY_SIZE: Cache[Any, tuple[Factors, Decision]] = Cache(4096)
# decisions for calls on all meshes of one shape, as the meshes of stages
_OF_ANY_MESH: Cache[Any, tuple[Factors, Decision]] = Cache(4096, lasting=True)


def resolve(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], key: Any = None
) -> Resolution:
    """Returns how a call of ``func`` is run; ``key``: of the call, if it has one. Raises the rule's
    errors for wrong arguments, and ValueError if tensors are on two meshes."""
    if func in HANDLERS:
        return Resolution("handler")
    if "out" in kwargs:
        return Resolution("out")
    if func not in RULES:
        return _without_rule(func, "no rule")
    if read_numbers(func, args, kwargs) is not None:
        return Resolution("numbers")
    if foreach.meshes_of(func, args, kwargs) > 1:
        return Resolution("each_mesh")
    form = form_of(func, args, kwargs)
    args, kwargs = form.args, form.kwargs
    specs = specs_of(func, collect((args, kwargs), []))
    mesh, rule, alike, same = specs[0].mesh, RULES[func], None, None
    if key is not None and rule.sizes == "letters":
        alike = rule, mesh.shape, key_without_sizes(key)
        known = _OF_ANY_SIZE.get(alike)
        sizes = None if known is None else sizes_of(known[0], [s.shape for s in specs])
        if known is not None and sizes is not None:
            shapes = known[0].shapes_for(sizes)
            return Resolution("rule", plan=RulePlan(func, form, rule, *known, mesh, specs, shapes))
    if key is not None and of_no_mesh(func, key):
        same = rule, mesh.shape, key_without_sizes(key), *[s.shape for s in specs]
        known = _OF_ANY_MESH.get(same)
        if known is not None:
            shapes = known[0].output_shapes()
            return Resolution("rule", plan=RulePlan(func, form, rule, *known, mesh, specs, shapes))
    layouts = bare = [s.layout for s in specs]
    own = any(layout.custom for layout in layouts)
    if own and not all(map(balanced.is_known, layouts)):
        why = "rules know Shard, Replicate and Partial; a placement of another type is gathered"
        return Resolution("gather", why)
    if own:
        bare = [balanced.without_balanced(layout) for layout in layouts]
    given: list[Arg] = []

    def arg(t: Tensor) -> Arg:
        i = len(given)
        s = specs[i]
        made = Arg(s.shape, dtype=s.dtype, layout=bare[i], index=i)
        given.append(made)
        return made

    asked = [substitute(a, arg) for a in args]
    named = {k: substitute(v, arg) for k, v in kwargs.items()}
    try:
        rule, factors, decision = decide(func, asked, named, given, mesh.shape, mesh.device.type)
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
    for t, layout in zip(collect((args, kwargs), []), decision.input_layouts, strict=True):
        if has_own_operators(t) and layout != replicated(t.ndim):
            kind = type(t).__name__
            return Resolution("gather", f"a {kind} among the arguments stays whole")
    if alike and not own and of_any_size(factors, decision, [s.shape for s in specs]):
        _OF_ANY_SIZE[alike] = factors, decision
    if same is not None and not own:
        _OF_ANY_MESH[same] = factors, decision
    shapes = factors.output_shapes()
    plan = RulePlan(func, form, rule, factors, decision, mesh, specs, shapes)
    return Resolution("rule", plan=plan)


def _without_rule(func: Function, why: str) -> Resolution:
    return Resolution("gather" if body_of(func) is None else "decompose", why)


def specs_of(func: Function, tensors: Sequence[Tensor]) -> list[DistSpec]:
    """Returns the specs of the tensors of a call, in order."""
    mesh = mesh_of_call(func, tensors)
    return [t.spec if type(t) is DistTensor else regular_spec(t, mesh) for t in tensors]


def mesh_of_call(func: Function, tensors: Sequence[Tensor]) -> ProcessMesh:
    """Returns the mesh of the call. Raises ValueError if there are two: no mesh is guessed."""
    dist = [wait_for(t) for t in tensors if isinstance(t, DistTensor)]
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
