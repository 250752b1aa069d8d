"""explain: how a call would be carried out, in words, without doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Any

import torch

import reshard
from disttensor.dispatch.decompose import body_of
from disttensor.dispatch.dispatch import HANDLERS, one_mesh
from disttensor.dispatch.plan import Plan, decided, make_plan, plain_spec
from disttensor.errors import name_of
from disttensor.spec import DistSpec
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tree import flat, substitute
from ops.factors import Arg
from ops.infer import NoRule
from ops.notation import notation

Tensor = torch.Tensor
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``explain`` found; ``str`` gives the text that it printed.

    way      "rule", "body" (its Python body runs, each inner call dispatched), "gather" or "direct"
    bytes    what a rank sends before the call runs; None where that is not known (a body)
    gives    specs of the results; () where they are not known

    >>> found = dt.explain(torch.relu, dt.ones(4, 4, mesh=mesh))
    ... # doctest: +ELLIPSIS
    torch.relu: ...
    >>> isinstance(found, dt.Explanation), found.way, found.bytes
    (True, 'rule', 0)
    """

    text: str
    way: str
    bytes: int | None
    gives: tuple[DistSpec, ...] = ()

    def __str__(self) -> str:
        return self.text


def explain(func: Function, /, *args: Any, **kwargs: Any) -> Explanation:
    """Print, and give, how ``func(*args, **kwargs)`` would be carried out: the rule in factor
    notation, the placements wanted and given, the steps and bytes of each implicit reshard, what
    runs on the locals, or why the inputs are gathered. Nothing runs and nothing is communicated.

    Raises TypeError where no argument is a DistTensor, and what the call itself raises for wrong
    arguments.

    >>> x = dt.ones(8, 6, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    >>> _ = dt.explain(torch.sort, x, dim=1)
    torch.sort: by rule
      letters  a b -> a b, a b   whole: b
      argument 0: f32[8@dp, 6]
      result 0: f32[8@dp, 6]
      result 1: f32[8@dp, 6]
    """
    tensors = flat((args, kwargs), [])
    if not any(type(t) is DistTensor for t in tensors):
        raise TypeError(
            f"explain({name_of(func)}, ...): no argument is a DistTensor: this is a call of plain "
            "torch. Give the arguments that the call has, as explain(torch.add, x, y)"
        )
    found = _found(func, args, kwargs, tensors)
    print(found)
    return found


def _found(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> Explanation:
    if func in HANDLERS:
        said = (getdoc(HANDLERS[func]) or "by a function of its own, without a rule").split("\n")[0]
        return Explanation(f"{name_of(func)}: answered directly\n  {said}", "direct", None)
    written = kwargs.get("out") is not None
    kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    tensors = flat((args, kwargs), []) if written else tensors
    mesh = one_mesh(func, tensors)
    specs = [t.spec if type(t) is DistTensor else plain_spec(t, mesh) for t in tensors]
    if any(s.layout.own for s in specs):
        return _gathered(func, specs, "rules know Shard, Replicate and Partial only")
    numbers = iter(range(len(tensors)))

    def arg(t: Tensor) -> Arg:
        s = specs[i := next(numbers)]
        return Arg(s.shape, dtype=s.dtype, layout=s.layout, index=i, requires_grad=t.requires_grad)

    asked = substitute(args, arg), substitute(kwargs, arg)
    try:
        _, factors, _ = decided(func, *asked, mesh)
        plan = make_plan(func, *asked, specs, mesh)
    except NoRule as reason:
        return _without_rule(func, specs, str(reason))
    if plan is None:
        why = "the rule cannot keep the placement of the tensor that is written, which gets its piece afterwards"
        return _gathered(func, specs, why)
    head = f"{name_of(func)}: by rule\n  letters  {notation(factors)}"
    asks = [t.requires_grad for t in tensors]
    return _planned(func, plan, head, specs, asks, written)


def _planned(
    func: Function,
    plan: Plan,
    head: str,
    specs: Sequence[DistSpec],
    asks: Sequence[bool],
    written: bool,
) -> Explanation:
    lines, total = [head], 0
    for i, (src, dst, axes) in enumerate(zip(specs, plan.wants, plan.varying, strict=True)):
        steps = () if dst is None else reshard.choose(src, dst)
        total += sum(s.bytes for s in steps)
        lines.append(f"  argument {i}: {src!r}" + (f" is wanted as {dst!r}" if dst else ""))
        lines += [f"    {step}" for step in steps]
        if axes and asks[i]:
            names = "+".join(plan.mesh.dim_names[a] for a in axes)
            lines.append(
                f"    its gradient is pending over {names}: each rank has the part of its own piece"
            )
    lines += [f"  result {j}: {spec!r}" for j, spec in enumerate(plan.gives)]
    if plan.local is not func:
        lines.append(f"  runs {_said(plan.local)} in place of the function, on the local pieces")
    if written:
        lines.append("  then the result is brought to the placement of out=, and copied there")
    if total:
        lines.append(f"  sends {total:,} bytes per rank before it runs")
    return Explanation("\n".join(lines), "rule", total, tuple(plan.gives))


def _said(local: Function) -> str:
    """Where a local function stands."""
    name = getattr(local, "__qualname__", type(local).__name__).replace(".<locals>", "")
    return f"{getattr(local, '__module__', '') or 'torch'}.{name}"


def _without_rule(func: Function, specs: Sequence[DistSpec], why: str) -> Explanation:
    if body_of(func) is None:
        return _gathered(func, specs, why)
    text = f"{name_of(func)}: by its Python body ({why})\n  the functions that it calls are dispatched one by one"
    return Explanation(text, "body", None)


def _gathered(func: Function, specs: Sequence[DistSpec], why: str) -> Explanation:
    lines, total = [f"{name_of(func)}: gathers its inputs and runs on full tensors ({why})"], 0
    for i, src in enumerate(specs):
        steps = reshard.choose(src, src.replicated())
        total += sum(s.bytes for s in steps)
        lines += [f"  argument {i}: {src!r}", *(f"    {step}" for step in steps)]
    lines.append(f"  sends {total:,} bytes per rank before it runs; gives replicated results")
    return Explanation("\n".join(lines), "gather", total)
