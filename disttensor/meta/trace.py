"""A trace: one run of a module's forward on tokens that shows what it gives, and whether it may
be skipped from then on.

It is an ordinary run and what it gives is right in any case; but each input gets a token of its own
for it, so that the graph of tokens says which results depend on which inputs. Anything that a call
without the forward would miss, such as a message, an assignment or a plain tensor that is read, is
a reason against skipping.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from disttensor import runtime
from disttensor.autograd import token
from disttensor.meta.guards import Subtree
from disttensor.random import state
from disttensor.spec import DistSpec
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tree import flat, rebuilt

Tensor = torch.Tensor
CONSTANTS = frozenset(
    {
        int,
        str,
        bool,
        float,
        complex,
        type(None),
        torch.dtype,
        torch.device,
        torch.memory_format,
        torch.Size,
    }
)


class Same(NamedTuple):
    """A result that is an input itself."""

    number: int


class Out(NamedTuple):
    """A result. ``sources``: the inputs that it depends on, None where it needs no gradient;
    ``viewed``: the input whose memory it shares."""

    spec: DistSpec
    sources: tuple[int, ...] | None
    viewed: int | None


@dataclass(slots=True)
class Case:
    """What a forward gives for inputs of one kind, and how many random calls it makes."""

    result: Any
    draws: int
    spec: DistSpec  # of one of its tensors

    def give(self, inputs: Sequence[DistTensor]) -> Any:
        for _ in range(self.draws):
            state.draw(self.spec.mesh, "fast")
        if type(self.result) is Out:
            return given(self.result, inputs)
        return self._made(self.result, inputs)

    def _made(self, value: Any, inputs: Sequence[DistTensor]) -> Any:
        kind = type(value)
        if kind is Out:
            return given(value, inputs)
        if kind is Same:
            return inputs[value.number]
        if kind is dict:
            return {k: self._made(v, inputs) for k, v in value.items()}
        if isinstance(value, (list, tuple)) and kind is not torch.Size:
            return rebuilt(value, [self._made(v, inputs) for v in value])
        return value


def given(out: Out, inputs: Sequence[DistTensor]) -> DistTensor:
    spec, sources, viewed = out
    device = spec.mesh.device
    if sources is None:
        local = token.detached(device)
    elif len(sources) == 1 and inputs[sources[0]].local.grad_fn is not None:
        local = inputs[sources[0]].local
    elif not sources:
        local = token.orphan(device)
    else:
        local = token.join([inputs[i].local for i in sources], device)
    new = wrap(local, spec)
    if viewed is not None:
        views.share(new, inputs[viewed])
    return new


class Unfit(Exception):
    """Why a forward must not be skipped."""


def trace(
    forward: Callable[[], Any],
    inputs: Sequence[DistTensor],
    subtree: Subtree,
    changes: Callable[[], int],
) -> tuple[Any, Case | str]:
    """The result of ``forward()``, and the Case for the next such calls, or why there is none."""
    originals = [x.local for x in inputs]
    marks: dict[int, Tensor] = {}
    for x in inputs:
        if x.local.requires_grad and id(x) not in marks:
            marks[id(x)] = _mark(x.local)
    specs = [x.spec for x in inputs]
    known = {id(t): t for t in (*inputs, *subtree.tensors)}
    calls = _Calls(known)
    before, attributes, assigned = _world(), subtree.attributes(), changes()
    for x in inputs:
        x.local = marks.get(id(x), x.local)
    touched = False
    try:
        with calls:
            result = forward()
    finally:
        for x, local in zip(inputs, originals, strict=True):
            if x.local is marks.get(id(x), local):
                x.local = local
            elif x.local is not local:
                touched = True
    try:
        if calls.why:
            raise Unfit(calls.why)
        if touched or any(x.spec is not s for x, s in zip(inputs, specs, strict=True)):
            raise Unfit("it changes an input in place")
        if changes() != assigned or subtree.attributes() != attributes:
            raise Unfit("it assigns to attributes")
        if not subtree.unchanged():
            raise Unfit("it changes parameters or hooks")
        draws = _compare(before, _world())
        tokens = {
            mark.grad_fn: i
            for i, x in reversed(list(enumerate(inputs)))
            if (mark := marks.get(id(x))) is not None
        }
        numbers = {id(x): i for i, x in reversed(list(enumerate(inputs)))}
        outs: list[Out] = []
        kept = {id(t) for t in subtree.tensors}

        def describe(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) in numbers:
                    return Same(numbers[id(value)])
                if type(value) is not DistTensor or value.is_initialized:
                    raise Unfit("it gives a tensor that is not elsewhere")
                if id(value) in kept or id(value) not in known:
                    raise Unfit("it gives a tensor that it did not compute")
                outs.append(_described(value, tokens, numbers))
                return outs[-1]
            if type(value) is dict:
                return {k: describe(v) for k, v in value.items()}
            if type(value) in (list, tuple) or (
                isinstance(value, tuple) and hasattr(value, "_fields")
            ):
                return rebuilt(value, [describe(v) for v in value])
            if type(value) in CONSTANTS:
                return value
            raise Unfit(f"it gives a {type(value).__name__}")

        return result, Case(describe(result), draws, specs[0])
    except Unfit as why:
        return result, str(why)


def _mark(local: Tensor) -> Tensor:
    """A token of its own, in front of the one that an input has."""
    with torch.enable_grad():
        root = local if local.grad_fn is not None else token.leaf(local.device, torch.float32)
        return root.view_as(root)


def _described(value: DistTensor, tokens: dict[Any, int], numbers: dict[int, int]) -> Out:
    viewed = views.base_of(value)
    while viewed is not None and id(viewed) not in numbers:
        viewed = views.base_of(viewed)
    local = value.local
    if not local.requires_grad:
        sources = None
    elif not torch.is_grad_enabled() or local.grad_fn is None:
        raise Unfit("it gives a tensor that requires grad by itself")
    else:
        sources = _reached(local, tokens)
    return Out(value.spec, sources, None if viewed is None else numbers[id(viewed)])


def _reached(local: Tensor, tokens: dict[Any, int]) -> tuple[int, ...]:
    """The inputs on whose tokens ``local`` depends. Raises Unfit where it depends on a token that
    no input has."""
    nothing = token.orphan(local.device).grad_fn
    found, seen, queue = set[int](), set[Any](), [local.grad_fn]
    while queue:
        node: Any = queue.pop()
        if node in tokens:
            found.add(tokens[node])
        elif node is not nothing and node not in seen:
            seen.add(node)
            rest = [n for n, _ in node.next_functions if n is not None]
            if not rest:
                raise Unfit("its result depends on tensors that are not among its inputs")
            queue += rest
    return tuple(sorted(found))


class _Calls(TorchFunctionMode):
    """Looks at the tensors of every call: they must be inputs, parameters, or results of calls
    before."""

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__()
        self.known = known
        self.why = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            self.why = "it draws from a generator"
        for t in flat((args, kwargs), []):
            if type(t) is DistTensor and t.is_initialized:
                self.why = "it computes on a mesh that this rank is in"
            elif id(t) not in self.known:
                self.why = self.why or "it reads a tensor that is not among its inputs"
        out = func(*args, **kwargs)
        for t in flat(out, []):
            self.known[id(t)] = t
        return out


def _world() -> tuple[Any, ...]:
    """What a forward may change outside of its module."""
    numpy_state: Any = np.random.get_state()
    return (
        state._State.calls,
        state._State.seed,
        dict(runtime.current().tags),
        torch.get_rng_state(),
        python_random.getstate(),
        (numpy_state[1].tobytes(), *numpy_state[2:]),
    )


def _compare(before: tuple[Any, ...], after: tuple[Any, ...]) -> int:
    """The number of random calls between. Raises Unfit for other changes."""
    if before[1:3] != after[1:3]:
        raise Unfit("it takes part in messages between ranks")
    if not torch.equal(before[3], after[3]) or before[4:] != after[4:]:
        raise Unfit("it draws numbers of its own")
    return int(after[0] - before[0])
