"""Plan: everything about a call that does not depend on data, decided once and kept by key.

The key of a call is (function, specs of DistTensors, shape and dtype of plain tensors, constants by
type and value); floats count by type only, so that a learning rate does not fill the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disttensor.dispatch.local_context import MeshCollectives
from disttensor.layout import Axes, Layout, replicated
from disttensor.mesh import ProcessMesh
from disttensor.spec import DistSpec
from ops.factors import Arg, Factors
from ops.infer import decide
from ops.local import LocalCall
from ops.propagation import Decision
from ops.registry import Rule

Tensor = torch.Tensor
Function = Callable[..., Any]

_BY_VALUE = frozenset(
    {int, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout}
)

_FLOAT = {float}


class Uncacheable(Exception):
    """The call has an argument that no key can hold; its plan is made anew."""


def key_of(value: Any, floats: bool = False) -> Any:
    """What of one argument (not a DistTensor) a plan depends on. 1, 1.0 and True have three
    keys."""
    kind = type(value)
    if kind in _BY_VALUE:
        return value
    if kind is bool:
        return kind, value
    if kind is float or kind is complex:
        return (kind, value) if floats else kind
    if kind is list or kind is tuple or kind is torch.Size:
        if value and type(value[0]) is float and not floats and set(map(type, value)) == _FLOAT:
            return kind, len(value)
        try:
            return kind, tuple([v.spec for v in value])
        except AttributeError:
            return kind, tuple([v.spec if hasattr(v, "spec") else key_of(v, floats) for v in value])
    if isinstance(value, Tensor):
        spec = getattr(value, "spec", None)
        return spec if spec is not None else (Tensor, value.shape, value.dtype)
    if kind is slice:
        return slice, key_of(value.start), key_of(value.stop), key_of(value.step)
    if kind is dict:
        return dict, tuple([(k, key_of(v, floats)) for k, v in value.items()])
    try:
        hash(value)
    except TypeError:
        raise Uncacheable from None
    return kind, value


@dataclass(slots=True)
class Plan:
    """What one call does on this rank.

    wants[i]    spec of tensor argument i, None where it stays as it is
    varying[i]  axes over which its use varies (sorted); any_varying: is there one
    again       a use of the result that varies is made of uses of the arguments that vary
    local       what runs on the locals; gives: specs of the results (dtype taken from the first result seen)
    """

    rule: Rule
    mesh: ProcessMesh
    wants: list[DistSpec | None]
    varying: list[Axes]
    local: Function
    gives: list[DistSpec]
    inplace: bool
    view: bool
    moves: bool
    any_varying: bool
    again: bool


_ALIASES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "self": "input",
    "x1": "input",
    "x2": "other",
}


def make_plan(
    func: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    specs: Sequence[DistSpec],
    mesh: ProcessMesh,
) -> Plan | None:
    """Infer the call. ``args`` and ``kwargs`` hold an Arg for each tensor, ``specs`` are theirs in
    order.

    None: an in-place function that cannot keep its target's placement by itself. Raises NoRule.
    """
    rule, factors, decision = decided(func, args, kwargs, mesh)
    if decision is None:
        return None
    wants = [s.with_layout(w) for s, w in zip(specs, decision.input_layouts, strict=True)]
    dtype = specs[0].dtype if specs else torch.get_default_dtype()
    gives = [
        DistSpec(mesh, layout, shape, dtype)
        for layout, shape in zip(decision.output_layouts, factors.output_shapes(), strict=True)
    ]
    local = func
    if factors.local is not None:
        coordinate = mesh.coordinate or (0,) * mesh.ndim
        local = factors.local(
            LocalCall(
                func, wants, gives, decision.split, mesh.shape, coordinate, MeshCollectives(mesh)
            )
        )
    busy = tuple(a for a, n in enumerate(mesh.shape) if n > 1)
    varying = [tuple(a for a in axes if a in busy) for axes in decision.varying_axes]
    changed = [w if w is not s else None for w, s in zip(wants, specs, strict=True)]
    return Plan(
        rule, mesh, changed, varying, local, gives, rule.inplace, factors.view,
        any(w is not None for w in changed), any(varying), factors.rematerialize,
    )  # fmt: skip


def decided(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], mesh: ProcessMesh
) -> tuple[Rule, Factors, Decision | None]:
    """What ``ops.infer.decide`` says of a call with an Arg for each tensor. Raises NoRule."""
    tensors: list[Arg] = []
    _collect((args, kwargs), tensors)
    named = {_ALIASES.get(k, k): v for k, v in kwargs.items()} if kwargs else kwargs
    return decide(func, args, named, tensors, mesh.shape)


def layouts_of(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], mesh: ProcessMesh
) -> list[Layout] | None:
    """The layouts of the results, for a rank outside the mesh. None: an in-place function. Raises
    NoRule."""
    rule, _, decision = decided(func, args, kwargs, mesh)
    return None if decision is None or rule.inplace else list(decision.output_layouts)


def _collect(value: Any, out: list[Arg]) -> None:
    if isinstance(value, Arg):
        value.index = len(out)
        out.append(value)
    elif isinstance(value, (list, tuple)):
        for v in value:
            _collect(v, out)
    elif isinstance(value, dict):
        for v in value.values():
            _collect(v, out)


def plain_spec(x: Tensor, mesh: ProcessMesh) -> DistSpec:
    """A plain tensor beside DistTensors counts as replicated."""
    return DistSpec(mesh, replicated(x.ndim), x.shape, x.dtype)
