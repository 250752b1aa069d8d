"""A trace: one run of a module's forward on tokens that records its results, and whether it may be
skipped from then on.

It is an ordinary run and its results are right in any case. Each input gets a token of its own for
it, so that the graph of tokens shows which results depend on which inputs. Anything that a skipped
call would miss, such as a message, an assignment or a read of a regular tensor, is a reason against
skipping.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from disttensor.autograd import token
from disttensor.autograd.graph import nodes_of
from disttensor.core.spec import DistSpec
from disttensor.errors import name_of
from disttensor.meta import execute, infer
from disttensor.meta.guards import Subtree
from disttensor.observe import observers
from disttensor.pytree import CONSTANTS, collect, substitute
from disttensor.random import counter, state
from disttensor.runtime import current_runtime
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap

Tensor = torch.Tensor
ASSIGNS = "it assigns to attributes"


@dataclass(slots=True)
class Case:
    """The results of a forward for inputs of one kind (with ``infer.Out`` for the tensors, which
    have the ``specs``), and the number of its random calls."""

    result: Any
    specs: list[DistSpec]
    draws: int
    spec: DistSpec  # of an input
    nothing: Tensor  # the token of results that need no gradient
    orphan: Tensor  # the token of results that depend on no tensor that this rank sent
    single: bool  # the result is one new tensor, which is no view

    def give(self, inputs: Sequence[DistTensor]) -> Any:
        mesh, result = self.spec.mesh, self.result
        for _ in range(self.draws):
            state.draw(mesh, "fast")
        if not self.single:
            return execute.filled(result, self.specs, [*inputs, self.orphan], mesh.device)
        joined = self.nothing
        if result.sources:  # as token.join: gradients are on, and the last source is the orphan
            joined = self.orphan
            for i in result.sources[:-1]:
                local = inputs[i].local
                if local is joined or local is self.orphan or local.grad_fn is None:
                    continue
                joined = local if joined is self.orphan else torch.cat((joined, local))
        return wrap(joined, self.specs[0])


class Unfit(Exception):
    """The reason why a forward must not be skipped."""


def trace(
    forward: Callable[[], Any], inputs: Sequence[DistTensor], subtree: Subtree
) -> tuple[Any, Case | str]:
    """Returns the result of ``forward()``, and its Case or the reason why it has none."""
    originals = [x.local for x in inputs]
    marks: dict[int, Tensor] = {}
    for x in inputs:
        if x.local.requires_grad and id(x) not in marks:
            marks[id(x)] = _mark(x.local)
    specs = [x.spec for x in inputs]
    known = {id(t): t for t in (*inputs, *subtree.tensors)}
    calls = _Calls(known)
    before, attributes, changes = _world(), subtree.attributes(), subtree.changes
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
    for o in observers:
        o.trace_module(specs[0].mesh, calls.made)
    try:
        if calls.why:
            raise Unfit(calls.why)
        if touched or any(x.spec is not s for x, s in zip(inputs, specs, strict=True)):
            raise Unfit("it changes an input in place")
        if subtree.changes != changes or subtree.attributes() != attributes:
            raise Unfit(ASSIGNS)
        if not subtree.unchanged():
            raise Unfit("it changes parameters or hooks")
        draws = _compare(before, _world())
        numbers = {id(x): i for i, x in reversed(list(enumerate(inputs)))}
        tokens = {mark.grad_fn: numbers[i] for i, mark in marks.items()}
        results: list[DistSpec] = []
        kept = {id(t) for t in subtree.tensors}

        def describe(value: DistTensor) -> infer.Out:
            same = numbers.get(id(value))
            if same is None and (
                value.is_initialized or id(value) in kept or id(value) not in known
            ):
                raise Unfit("it gives a tensor that it did not compute")
            results.append(value.spec)
            viewed = views.base_of(value)
            while viewed is not None and id(viewed) not in numbers:
                viewed = views.base_of(viewed)
            above = None if viewed is None else numbers[id(viewed)]
            sources = () if same is not None else _sources(value, tokens, len(inputs))
            spec = value.spec
            return infer.Out(len(results) - 1, spec.shape, spec.dtype, sources, same, above)

        _check(result)
        described = substitute(result, describe, DistTensor)
        one = type(described) is infer.Out and described.same is None and described.viewed is None
        device = specs[0].mesh.device
        shared = token.detached(device), token.orphan(device)
        return result, Case(described, results, draws, specs[0], *shared, one)
    except Unfit as why:
        return result, str(why)


def _check(value: Any) -> None:
    """Raises Unfit for values other than DistTensors and constants, which no Case can return."""
    if type(value) is dict:
        value = tuple(value.values())
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for v in value:
            _check(v)
    elif not isinstance(value, DistTensor) and type(value) not in CONSTANTS:
        raise Unfit(f"it gives a {type(value).__name__}")


def _mark(local: Tensor) -> Tensor:
    """Returns a token of its own, in front of the token of an input."""
    with torch.enable_grad():
        root = local if local.grad_fn is not None else token.leaf(local.device, torch.float32)
        return root.view_as(root)


def _sources(value: DistTensor, tokens: dict[Any, int], orphan: int) -> tuple[int, ...]:
    """Returns the inputs on whose tokens ``value`` depends, and ``orphan`` if it requires grad.
    Raises Unfit if it depends on a token that no input has."""
    local: Any = value.local
    if not local.requires_grad:
        return ()
    if not torch.is_grad_enabled() or local.grad_fn is None:
        raise Unfit("it gives a tensor that requires grad by itself")
    ends = {*tokens, token.orphan(local.device).grad_fn}
    nodes = nodes_of([local], ends)
    if any(all(n is None for n, _ in node.next_functions) for node in nodes - ends):
        raise Unfit("its result depends on tensors that are not among its inputs")
    return (*sorted(tokens[node] for node in nodes if node in tokens), orphan)


class _Calls(TorchFunctionMode):
    """Checks the tensors of every call: they must be inputs, parameters, or results of earlier
    calls."""

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__()
        self.known = known
        self.why = ""
        self.made: list[Any] = []  # functions and descriptions of their arguments, for a log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if observers:
            self.made.append((name_of(func), _words(args), _words(kwargs)))
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            self.why = "it draws from a generator"
        for t in collect((args, kwargs), []):
            if isinstance(t, DistTensor) and t.is_initialized:
                self.why = "it computes on a mesh that this rank is in"
            elif id(t) not in self.known:
                self.why = self.why or "it reads a tensor that is not among its inputs"
        out = func(*args, **kwargs)
        for t in collect(out, []):
            self.known[id(t)] = t
        return out


def _words(x: Any) -> Any:
    """Returns a description of an argument that does not depend on its mesh."""
    kind = type(x)
    if isinstance(x, DistTensor):
        return x.spec.shape, x.spec.layout, x.spec.dtype
    if kind in (list, tuple):
        return tuple([_words(e) for e in x])
    if kind is dict:
        return tuple([(k, _words(v)) for k, v in x.items()])
    return x if kind in CONSTANTS else kind


def _world() -> tuple[Any, ...]:
    """Returns the state outside of its module that a forward may change."""
    numpy_state: Any = np.random.get_state()
    seed, calls = counter.get_state()
    return (
        calls,
        (seed, counter._State.restarts),
        dict(current_runtime().tags),
        torch.default_generator.get_state(),
        python_random.getstate(),
        (numpy_state[1].tobytes(), *numpy_state[2:]),
    )


def _compare(before: tuple[Any, ...], after: tuple[Any, ...]) -> int:
    """Returns the number of random calls between. Raises Unfit for other changes."""
    if before[1] != after[1]:
        raise Unfit("it seeds random numbers")
    if before[2] != after[2]:
        raise Unfit("it takes part in messages between ranks")
    if not torch.equal(before[3], after[3]) or before[4:] != after[4:]:
        raise Unfit("it draws numbers of its own")
    return int(after[0] - before[0])
