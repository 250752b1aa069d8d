"""How a call is carried out, decided once: ``dispatch`` runs what is found here, ``explain`` prints
it.

The ways, in the order in which they are asked for: a handler (functions that are no computation),
``out=``, one call for each mesh (lists), a rule, the Python body of the function, and last the
fallback that gathers everything: always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from disttensor import errors
from disttensor.dispatch import balanced, foreach
from disttensor.dispatch.decompose import body_of
from disttensor.dispatch.local_context import MeshCollectives
from disttensor.layout import Axes, Layout, replicated
from disttensor.mesh import ProcessMesh
from disttensor.spec import DistSpec
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import relabels
from disttensor.tree import flat, substitute
from ops.factors import Arg, Factors
from ops.infer import NoRule, decide
from ops.local import LocalCall
from ops.propagation import Decision
from ops.registry import RULES, Rule

Tensor = torch.Tensor
Function = Callable[..., Any]

HANDLERS: dict[Function, Function] = {}  # functions that are answered as they are: no rule, no key
OF_KEY: set[Function] = set()  # those whose answer follows from the key of the call


def handler(*funcs: Function) -> Callable[[Function], Function]:
    """Register what answers these functions when a DistTensor is among their arguments."""

    def enter(answer: Function) -> Function:
        for func in funcs:
            HANDLERS[func] = answer
        return answer

    return enter


@dataclass(slots=True)
class Plan:
    """Everything about a call by rule that does not depend on data.

    specs            of the tensor arguments, in order (a plain tensor counts as replicated)
    input_specs[i]   the spec that tensor argument i is needed in, None where it stays as it is
    varying_axes[i]  the axes over which its use varies (sorted)
    output_specs     of the results; their dtype is known when the function has run once
    """

    func: Function
    rule: Rule
    factors: Factors
    decision: Decision
    mesh: ProcessMesh
    specs: list[DistSpec]
    input_specs: list[DistSpec | None] = field(init=False)
    varying_axes: list[Axes] = field(init=False)
    output_specs: list[DistSpec] = field(init=False)

    def __post_init__(self) -> None:
        needed, mesh = self._needed(), self.mesh
        self.input_specs = [
            w if w is not s else None for w, s in zip(needed, self.specs, strict=True)
        ]
        split = [n > 1 for n in mesh.shape]
        self.varying_axes = [
            tuple([a for a in axes if split[a]]) for axes in self.decision.varying_axes
        ]
        dtype = self.specs[0].dtype if self.specs else torch.get_default_dtype()
        shapes = self.factors.output_shapes()
        self.output_specs = [
            DistSpec(mesh, layout, shape, dtype)
            for layout, shape in zip(self.decision.output_layouts, shapes, strict=True)
        ]

    def _needed(self) -> list[DistSpec]:
        return [
            s.with_layout(w) for s, w in zip(self.specs, self.decision.input_layouts, strict=True)
        ]

    @property
    def redistributes(self) -> bool:
        return any(w is not None for w in self.input_specs)

    @property
    def any_varying(self) -> bool:
        return any(self.varying_axes)

    @property
    def reuses(self) -> list[bool]:
        """For each tensor argument: is it pending, so that what an earlier call reduced it to is
        read instead? None of a call that writes, or gives a view."""
        if self.rule.inplace or self.factors.view:
            return [False] * len(self.specs)
        return [bool(s.layout.partial) for s in self.specs]

    @property
    def reduces(self) -> list[bool]:
        """For each tensor argument: does the call do its pending sums, and nothing else to it?"""
        return [
            bool(s.layout.partial)
            and w == Layout(s.layout.dims)
            and all(op == "sum" for _, op in s.layout.partial)
            and not relabels(s, s.with_layout(w))
            for s, w in zip(self.specs, self.decision.input_layouts, strict=True)
        ]

    def local_fn(self) -> Function:
        """What runs on the locals: the function itself, or what the rule has in place of it."""
        if self.factors.local is None:
            return self.func
        mesh = self.mesh
        coordinate = mesh.coordinate or (0,) * mesh.ndim
        busy = {
            k: tuple([a for a in v if mesh.shape[a] > 1]) for k, v in self.decision.split.items()
        }
        split = {letter: axes for letter, axes in busy.items() if axes}
        call = LocalCall(
            self.func, self._needed(), self.output_specs, split, mesh.shape, coordinate,
            MeshCollectives(mesh),
        )  # fmt: skip
        return self.factors.local(call)


@dataclass(frozen=True, slots=True)
class Resolution:
    """way: "handler", "out", "each_mesh", "rule", "decompose" or "gather"; why: no rule is taken.

    ``expected``: nobody need be warned of a gather (an in-place function whose target the rule
    cannot keep as it lies).
    """

    way: str
    why: str = ""
    plan: Plan | None = None
    expected: bool = False


def resolve(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Resolution:
    """How a call of ``func`` is carried out. Raises what the rule raises for wrong arguments, and
    ValueError where tensors are on two meshes."""
    if func in HANDLERS:
        return Resolution("handler")
    if "out" in kwargs:
        return Resolution("out")
    if func not in RULES:
        return _without_rule(func, "no rule")
    if foreach.meshes_of(func, args) > 1:
        return Resolution("each_mesh")
    specs = specs_of(func, flat((args, kwargs), []))
    layouts = [s.layout for s in specs]
    if not all(map(balanced.is_known, layouts)):
        why = "rules know Shard, Replicate and Partial; a placement of another type is gathered"
        return Resolution("gather", why)
    given: list[Arg] = []
    bare = [balanced.bare(layout) for layout in layouts]

    def arg(t: Tensor) -> Arg:
        i, grad = len(given), t.requires_grad
        s = specs[i]
        given.append(Arg(s.shape, dtype=s.dtype, layout=bare[i], index=i, requires_grad=grad))
        return given[-1]

    asked = substitute(args, arg)
    named = {k: substitute(v, arg) for k, v in kwargs.items()}
    mesh = specs[0].mesh
    try:
        rule, factors, decision = decide(func, asked, named, given, mesh.shape)
    except NoRule as reason:
        return _without_rule(func, str(reason))
    if decision is not None and bare != layouts:
        decision = balanced.keep(factors, decision, layouts, writes=rule.inplace)
    if decision is None:
        why = (
            "the rule cannot keep the placement of the tensor that is written, which gets its "
            "piece afterwards"
        )
        return Resolution("gather", why, expected=True)
    return Resolution("rule", plan=Plan(func, rule, factors, decision, mesh, specs))


def _without_rule(func: Function, why: str) -> Resolution:
    return Resolution("gather" if body_of(func) is None else "decompose", why)


def specs_of(func: Function, tensors: Sequence[Tensor]) -> list[DistSpec]:
    """The specs of the tensors of a call, in order."""
    mesh = one_mesh(func, tensors)
    return [t.spec if type(t) is DistTensor else plain_spec(t, mesh) for t in tensors]


def one_mesh(func: Function, tensors: Sequence[Tensor]) -> ProcessMesh:
    """The mesh of the call. Raises ValueError where there are two: it is never guessed."""
    dist = [t for t in tensors if type(t) is DistTensor]
    mesh = dist[0].spec.mesh
    # by name: importing it costs more than all of ours
    if any(type(t).__name__ == "DTensor" for t in tensors):
        raise ValueError(
            f"{errors.name_of(func)}: a torch DTensor among DistTensors: convert it with "
            "from_dtensor(x), which copies nothing"
        )
    for t in dist[1:]:
        if t.spec.mesh is not mesh:
            raise ValueError(
                f"{errors.name_of(func)}: tensors on two meshes: {dist[0].spec!r} on {mesh!r} and "
                f"{t.spec!r} on {t.spec.mesh!r}. Bring one over first: reshard(x, mesh, placements)"
            )
    return mesh


def plain_spec(x: Tensor, mesh: ProcessMesh) -> DistSpec:
    """A plain tensor beside DistTensors counts as replicated."""
    return DistSpec(mesh, replicated(x.ndim), x.shape, x.dtype)
