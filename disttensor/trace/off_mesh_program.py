"""OffMeshProgram: the results of a module's forward on a rank off its mesh, and the run on tokens
that records them.

The run is an ordinary one, so its results are right in any case. In this run each input has a token
of its own, so that the graph of tokens shows which results depend on which inputs. Anything that a
skipped call would miss, such as a message, an assignment or a read of a regular tensor, is a reason
against skipping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from disttensor.autograd import token
from disttensor.core.spec import DistSpec
from disttensor.errors import name_of
from disttensor.graph_nodes import nodes_of
from disttensor.observe import observers
from disttensor.off_mesh import execute
from disttensor.pytree import CONSTANTS, collect, substitute
from disttensor.random import draws
from disttensor.tensor import views
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.trace.world_state import Untraceable, world_state
from ops.answer import TensorResult

Tensor = torch.Tensor


@dataclass(slots=True)
class OffMeshProgram:
    """The results of a forward for inputs of one kind (with a ``TensorResult`` for each tensor, and
    their ``specs``), and the number of its random calls."""

    result: Any
    specs: list[DistSpec]
    draws: int
    spec: DistSpec  # of an input
    no_grad: Tensor  # the token of results that need no gradient
    no_source: Tensor  # the token of results that depend on no tensor that this rank sent
    single: bool  # the result is one new tensor, which is no view, and contiguous

    def difference(self, other: OffMeshProgram) -> str:
        """Returns how the results of another run differ from these, or ""."""
        mine, theirs = repr((self.specs, self.result)), repr((other.specs, other.result))
        if mine != theirs:
            return f"it returns {theirs} in place of {mine}"
        if self.draws != other.draws:
            return f"it draws random numbers {other.draws} times in place of {self.draws}"
        return ""

    def run(self, inputs: Sequence[DistTensor]) -> Any:
        mesh, result = self.spec.mesh, self.result
        for _ in range(self.draws):
            draws.draw(mesh, "fast")
        if not self.single:
            return execute.fill_results(result, self.specs, [*inputs, self.no_source], mesh.device)
        joined = self.no_grad
        if result.sources:  # as token.join: gradients are on, and the last source is the no_source
            joined = self.no_source
            for i in result.sources[:-1]:
                local = inputs[i].local
                if local is joined or local is self.no_source or local.grad_fn is None:
                    continue
                joined = local if joined is self.no_source else torch.cat((joined, local))
        return wrap(joined, self.specs[0])


def trace(
    forward: Callable[[], Any], inputs: Sequence[DistTensor], own: Sequence[Any]
) -> tuple[Any, OffMeshProgram | str]:
    """Returns the result of ``forward()``, and its OffMeshProgram or the reason why it has none.
    ``own``: the parameters and buffers of the module."""
    originals = [x.local for x in inputs]
    marks: dict[int, Tensor] = {}
    for x in inputs:
        if x.local.requires_grad and id(x) not in marks:
            marks[id(x)] = _mark(x.local)
    specs = [x.spec for x in inputs]
    known = {id(t): t for t in (*inputs, *own)}
    calls = _Calls(known)
    before, torch_state = world_state(), torch.default_generator.get_state()
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
            raise Untraceable(calls.why)
        if touched or any(x.spec is not s for x, s in zip(inputs, specs, strict=True)):
            raise Untraceable("it changes an input in place")
        draws = before.draws_until(world_state())
        if not torch.equal(torch_state, torch.default_generator.get_state()):
            raise Untraceable("it draws from torch's own generator")
        numbers = {id(x): i for i, x in reversed(list(enumerate(inputs)))}
        tokens = {mark.grad_fn: numbers[i] for i, mark in marks.items()}
        results: list[DistSpec] = []
        kept, made = set(map(id, own)), dict[int, TensorResult]()
        memory = Counter(map(_owner, inputs))
        owners = {_owner(x): i for i, x in enumerate(inputs)}

        def describe(value: DistTensor) -> TensorResult:
            if id(value) in made:
                return made[id(value)]
            same = numbers.get(id(value))
            if same is None and (
                value.is_initialized or id(value) in kept or id(value) not in known
            ):
                raise Untraceable("it returns a tensor that it did not compute")
            results.append(value.spec)
            above = None
            if same is None:
                owner = _owner(value)
                above = owners.get(owner)
                memory[owner] += above is None
                if memory[owner] > 1:
                    raise Untraceable("two of its results, or of its inputs, share memory")
            sources = () if same is not None else _sources(value, tokens, len(inputs))
            spec = value.spec
            strides = None if value._view_state is None else value._view_state.strides
            out = made[id(value)] = TensorResult(
                len(results) - 1, spec.shape, spec.dtype, sources, same, above, strides
            )
            return out

        _check(result)
        described = substitute(result, describe, DistTensor)
        one = type(described) is TensorResult and all(
            fact is None for fact in (described.same, described.viewed, described.strides)
        )
        device = specs[0].mesh.device
        shared = token.no_grad_token(device), token.no_source_token(device)
        return result, OffMeshProgram(described, results, draws, specs[0], *shared, one)
    except Untraceable as why:
        return result, str(why)


def _owner(x: DistTensor) -> int:
    """Returns the id of the tensor whose memory x shares, or of x itself."""
    base = views.base_of(x)
    return id(x if base is None else base)


def _check(value: Any) -> None:
    """Raises Untraceable for values other than DistTensors and constants, which no program
    returns."""
    if type(value) is dict:
        value = tuple(value.values())
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for v in value:
            _check(v)
    elif not isinstance(value, DistTensor) and type(value) not in CONSTANTS:
        raise Untraceable(f"it returns a {type(value).__name__}")


def _mark(local: Tensor) -> Tensor:
    """Returns a token of its own, in front of the token of an input."""
    with torch.enable_grad():
        root = local if local.grad_fn is not None else token.leaf(local.device, torch.float32)
        return root.view_as(root)


def _sources(value: DistTensor, tokens: dict[Any, int], no_source: int) -> tuple[int, ...]:
    """Returns the inputs on whose tokens ``value`` depends, and ``no_source`` if it requires grad.
    Raises Untraceable if it depends on a token that no input has."""
    local: Any = value.local
    if not local.requires_grad:
        return ()
    if not torch.is_grad_enabled() or local.grad_fn is None:
        raise Untraceable("it returns a tensor that requires grad but depends on no input")
    ends = {*tokens, token.no_source_token(local.device).grad_fn}
    nodes = nodes_of([local], ends)
    if any(all(n is None for n, _ in node.next_functions) for node in nodes - ends):
        raise Untraceable("its result depends on tensors that are not among its inputs")
    return (*sorted(tokens[node] for node in nodes if node in tokens), no_source)


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
