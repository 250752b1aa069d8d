"""Communication as Dynamo and AOTAutograd trace it: operators, and autograd functions around them.

One operator reshards a local, for all pairs of specs of one mesh. If that is one large collective,
one operator starts it and another waits (see ``late_waits``). Two are the collectives of local
functions. The operators get the number of a transition or a group: a graph holds numbers, not
objects. They run the code of eager calls. A graph cannot be differentiated twice.

The operators have effects: a compiler keeps each call, in its order. Otherwise it would drop the
calls whose results a rank with an empty piece does not need, and the other ranks would wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch

from disttensor.autograd.grad_types import GradTransition
from disttensor.comm import collectives
from disttensor.comm.work import Work
from disttensor.runtime import current_runtime
from disttensor.torch_private import keep_calls, storage_id
from reshard.planner import background

Tensor = torch.Tensor

NOTHING = -1  # the number of a transition that keeps the local
REFUSED = -2  # the number of the gradient of a pending reduction that has none
_next = count()  # never the same number in two worlds: a program of an ended world finds nothing


class TracedTransition(NamedTuple):
    """The number of a transition, and whether it is started and waited for."""

    number: int
    starts: bool


@cache
def register(operators: tuple[Any, ...]) -> torch.library.Library:
    """Registers the operators ``torch.ops.disttensor`` at the first call, with these: (schema,
    function, function of fakes). They stay as long as the library that it returns."""
    library = torch.library.Library("disttensor", "DEF")
    for schema, run, fake in (
        ("reshard(Tensor x, int number) -> Tensor", _reshard, _fake_reshard),
        ("start_reshard(Tensor x, int number) -> Tensor", _start, _fake_start),
        ("all_reduce(Tensor x, str op, int group) -> Tensor", _all_reduce, _fake_all_reduce),
        ("all_gather(Tensor x, int group) -> Tensor", _all_gather, _fake_all_gather),
        ("wait_reshard(Tensor work, Tensor x, int number) -> Tensor", _wait, _fake_wait),
        *operators,
    ):
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"disttensor::{name}", fake, lib=library)
        keep_calls(library, f"disttensor::{name}")
    return library


def number_of(value: Any, key: Any = None) -> int:
    """Returns the number of a transition, a group or a call in graphs of this process. ``key``:
    equal for values that do the same; None: the value itself."""
    if isinstance(value, GradTransition) and value.run is None:
        return NOTHING
    key, now = value if key is None else key, current_runtime()
    if key not in now.numbers:
        now.numbers[key] = number = next(_next)
        now.numbered[number] = value
    return now.numbers[key]


def numbered(number: int) -> Any:
    """Returns the object of a number. Raises RuntimeError in another world."""
    found = current_runtime().numbered.get(number)
    if found is None:
        raise RuntimeError(
            "a compiled program of a world that has ended (destroy_process_group was called) runs: "
            "call dt.compile again, on the module of this world"
        )
    return found


def traced_transition(transition: GradTransition) -> TracedTransition:
    return TracedTransition(number_of(transition), _beginning(transition) is not None)


def _beginning(transition: GradTransition) -> Callable[[Tensor], Work[Tensor]] | None:
    """Returns what starts a transition, or None. It sends a copy, because a graph may reuse the
    memory of a tensor that it does not read again, as where only other ranks need the result."""
    ends = transition.src.spec, transition.dst.spec
    return None if transition.run is None else background(*ends, copies=True)


def _reshard(x: Tensor, number: int) -> Tensor:
    return _of_its_own(numbered(number).run(x), x)


def _of_its_own(out: Tensor, x: Tensor) -> Tensor:
    if storage_id(out.untyped_storage()) == storage_id(x.untyped_storage()):
        return out.clone(memory_format=torch.contiguous_format)  # an operator returns new memory
    return out.contiguous()


def _fake_reshard(x: Tensor, number: int) -> Tensor:
    return x.new_empty(numbered(number).dst.spec.local_shape)


def _start(x: Tensor, number: int) -> Tensor:
    """Returns a tensor whose storage holds the work."""
    begin, work = _beginning(numbered(number)), small_tensor()
    assert begin is not None
    work.untyped_storage().work = begin(x)  # type: ignore[attr-defined]
    return work


def _fake_start(x: Tensor, number: int) -> Tensor:
    return small_tensor()


def _wait(work: Tensor, x: Tensor, number: int) -> Tensor:
    """``x``: what was sent; of its dtype and device is the result."""
    return _of_its_own(work.untyped_storage().work.wait(), x)  # type: ignore[attr-defined]


def _fake_wait(work: Tensor, x: Tensor, number: int) -> Tensor:
    return _fake_reshard(x, number)


def small_tensor() -> Tensor:
    """Returns a tensor for its storage, which keeps an object as long as compiled code needs it."""
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _traced(x: Tensor, transition: TracedTransition) -> Tensor:
    number, starts = transition
    if not starts:
        out: Tensor = torch.ops.disttensor.reshard(x, number)
    else:
        out = torch.ops.disttensor.wait_reshard(
            torch.ops.disttensor.start_reshard(x, number), x, number
        )
    return out


def _all_reduce(x: Tensor, op: str, group: int) -> Tensor:
    return collectives.all_reduce(x, op, numbered(group))


def _fake_all_reduce(x: Tensor, op: str, group: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, group: int) -> Tensor:
    return collectives.all_gather(x, numbered(group))


def _fake_all_gather(x: Tensor, group: int) -> Tensor:
    return x.new_empty((numbered(group).size, *x.shape))


class _TracedReshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        transition: TracedTransition,
        grad_transition: TracedTransition,
        scale: float,
        held: Any,
    ) -> Tensor:
        ctx.grad_transition, ctx.scale = grad_transition, scale
        if held is not None or transition[0] == NOTHING:
            out = x if held is None else held
            return out.view_as(out)
        return _traced(x, transition)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.scale != 1.0:
            grad = grad * ctx.scale
        if ctx.grad_transition[0] == REFUSED:
            raise RuntimeError("a pending max, min, prod, any or all has no gradient")
        if ctx.grad_transition[0] != NOTHING:
            grad = _traced(grad, ctx.grad_transition)
        return grad, None, None, None, None


def traced_reshard(
    x: Tensor,
    transition: TracedTransition,
    grad_transition: TracedTransition,
    scale: float,
    held: list[Tensor] | None = None,
) -> Tensor:
    """Returns the local after ``transition``. Its gradient goes through ``grad_transition``, after
    a multiplication by ``scale``. ``held``: the result, if it was already communicated."""
    out: Tensor = _TracedReshard.apply(
        x, transition, grad_transition, scale, held[0] if held else None
    )
    return out


class _TracedSum(torch.autograd.Function):
    """``functional.psum``, or with ``forward`` False ``functional.pvary``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int, forward: bool) -> Tensor:
        ctx.group, ctx.forward = group, forward
        return torch.ops.disttensor.all_reduce(x, "sum", group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.forward:
            grad = torch.ops.disttensor.all_reduce(grad, "sum", ctx.group)
        return grad, None, None


class _TracedGather(torch.autograd.Function):
    """``functional.all_gather``; ``index``: of this rank in the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int, index: int) -> Tensor:
        ctx.index = index
        out: Tensor = torch.ops.disttensor.all_gather(x, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.index].clone(), None, None


def traced_sum(x: Tensor, group: int, forward: bool) -> Tensor:
    out: Tensor = _TracedSum.apply(x, group, forward)
    return out


def traced_gather(x: Tensor, group: int, index: int) -> Tensor:
    out: Tensor = _TracedGather.apply(x, group, index)
    return out
