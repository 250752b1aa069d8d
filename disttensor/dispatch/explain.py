"""explain: describes how a call would be run, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from typing import Any

import torch

from disttensor.checks import check_callable
from disttensor.core.spec import DistSpec
from disttensor.dispatch.call_plan import CallPlan
from disttensor.dispatch.plan_call import local_function, plan_call, result_specs, wanted_specs
from disttensor.dispatch.resolve import HANDLERS, CallByRule, resolve, specs_of
from disttensor.errors import name_of
from disttensor.pytree import collect
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from ops.notation import notation
from ops.signatures import read_numbers
from reshard import cross_mesh

Tensor = torch.Tensor
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of ``explain``; ``str`` returns the printed text.

    Attributes:
        way: "rule", "body" (its Python body runs, each inner call dispatched), "gather" or "direct"
        bytes: bytes that a rank sends before the call runs, or in attention; None if unknown (a
            body)
        gives: specs of the results; () if unknown
        plan: the CallPlan of such a call on this rank; None for ways other than "rule"

    >>> found = dt.debugging.explain(torch.relu, dt.ones(4, 4, mesh=mesh))
    ... # doctest: +ELLIPSIS
    torch.relu: ...
    >>> isinstance(found, dt.debugging.Explanation), found.way, found.bytes
    (True, 'rule', 0)
    """

    text: str
    way: str
    bytes: int | None
    gives: tuple[DistSpec, ...] = ()
    plan: CallPlan | None = None

    def __str__(self) -> str:
        return self.text


def explain(func: Function, /, *args: Any, **kwargs: Any) -> Explanation:
    """Prints and returns how ``func(*args, **kwargs)`` would be run: the rule in factor notation,
    the required and resulting placements, the steps and bytes of each implicit reshard, the
    function that runs on the locals, or why the inputs are gathered. The call is not run and no
    data is sent.

    Raises TypeError if no argument is a DistTensor, and the errors of the call itself for wrong
    arguments.

    >>> x = dt.ones(8, 6, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    >>> _ = dt.debugging.explain(torch.sort, x, dim=1)
    torch.sort: by rule
      letters  a b -> a b, a b   whole: b
      argument 0: f32[8@dp, 6]
      result 0: f32[8@dp, 6]
      result 1: f32[8@dp, 6]
    """
    check_callable("explain: func", func)
    if not [wait_for(t) for t in collect((args, kwargs), []) if isinstance(t, DistTensor)]:
        raise TypeError(
            f"explain({name_of(func)}, ...): no argument is a DistTensor: this is a call of plain "
            "torch. Give the arguments that the call has, as explain(torch.add, x, y)"
        )
    found = _found(func, args, kwargs)
    print(found)
    return found


def _found(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Explanation:
    written = kwargs.get("out") is not None
    kwargs = {k: v for k, v in kwargs.items() if k != "out"}
    found = resolve(func, args, kwargs)
    if found.way == "numbers":
        args, kwargs = read_numbers(func, args, kwargs) or (args, kwargs)
        found = resolve(func, args, kwargs)
    name = name_of(func)
    if found.way == "handler":
        said = getdoc(HANDLERS[func]) or "by a function of its own, without a rule"
        first = said.split("\n")[0]
        return Explanation(f"{name}: answered directly\n  {first}", "direct", None)
    if found.way == "each_mesh":
        return Explanation(f"{name}: one call for each mesh, with its members", "direct", None)
    if found.way == "decompose":
        text = (
            f"{name}: by its Python body ({found.why})\n"
            "  the functions that it calls are dispatched one by one"
        )
        return Explanation(text, "body", None)
    if found.call is None:
        return _gathered(func, specs_of(func, collect((args, kwargs), [])), found.why)
    return replace(_by_rule(found.call, written), plan=plan_call(found.call))


def _by_rule(call: CallByRule, written: bool) -> Explanation:
    head = f"{name_of(call.func)}: by rule\n  letters  {notation(call.factors)}"
    lines, total = [head], 0
    wanted, results, mesh = wanted_specs(call), result_specs(call), call.specs[0].mesh
    ends = zip(call.tensors, call.specs, wanted, call.decision.varying_axes, strict=True)
    for i, (t, src, dst, varying) in enumerate(ends):
        steps = () if dst is None else cross_mesh.choose(src, dst)
        total += sum(s.bytes for s in steps)
        lines.append(f"  argument {i}: {src!r}" + (f" is wanted as {dst!r}" if dst else ""))
        lines += [f"    {step}" for step in steps]
        axes = [a for a in varying if mesh.shape[a] > 1]
        if axes and t.requires_grad:
            names = "+".join(mesh.dim_names[a] for a in axes)
            lines.append(
                f"    its gradient is pending over {names}: each rank has the part of its own piece"
            )
    lines += [f"  result {j}: {spec!r}" for j, spec in enumerate(results)]
    local_fn = local_function(call, wanted, results)
    if local_fn is not call.func:
        lines.append(
            f"  runs {_describe_function(local_fn)} in place of the function, on the local pieces"
        )
    sends = getattr(local_fn, "sends", 0)
    if sends:
        lines.append(f"    {getattr(local_fn, 'why', '')}; it sends {sends:,} bytes itself")
    if written:
        lines.append("  then the result is brought to the placement of out=, and copied there")
    if total:
        lines.append(f"  sends {total:,} bytes per rank before it runs")
    return Explanation("\n".join(lines), "rule", total + sends, results)


def _describe_function(local: Function) -> str:
    """Returns the name of a local function, with its module."""
    name = getattr(local, "__qualname__", type(local).__name__).replace(".<locals>", "")
    return f"{getattr(local, '__module__', '') or 'torch'}.{name}"


def _gathered(func: Function, specs: Sequence[DistSpec], why: str) -> Explanation:
    lines, total = [f"{name_of(func)}: gathers its inputs and runs on full tensors ({why})"], 0
    for i, src in enumerate(specs):
        steps = cross_mesh.choose(src, src.replicated())
        total += sum(s.bytes for s in steps)
        lines += [f"  argument {i}: {src!r}", *(f"    {step}" for step in steps)]
    lines.append(f"  sends {total:,} bytes per rank before it runs; gives replicated results")
    return Explanation("\n".join(lines), "gather", total)
