"""Results of a program: makes DistTensors of its variables at its end, with the same state as the
DistTensors of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from disttensor.autograd.activation_checkpoint import region
from disttensor.dispatch import rematerialize, run
from disttensor.dispatch.reduction_cache import Reduced
from disttensor.tensor import reshard as tensor_reshard
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad_slot import collector_of
from disttensor.tensor.uses import set_uses
from disttensor.tensor.versions import version
from disttensor.torch_private import make_subclass
from disttensor.trace.tape import LineKind, Tape, container_text, is_constant
from disttensor.trace.world_state import Untraceable

Tensor = torch.Tensor
Function = Callable[..., Any]


class Results:
    """Writes the end of a program. ``writes``: the program writes to tensors, so the sources of its
    results may have changed."""

    def __init__(self, tape: Tape, writes: bool) -> None:
        self.tape, self.writes = tape, writes
        self.made: dict[int, str] = {}  # id of a DistTensor -> its variable

    def text(self, value: Any) -> str:
        """Returns the text that makes this result again. Raises Untraceable if there is none."""
        kind = type(value)
        if kind is DistTensor:
            return self.tensor(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            return self.tape.source_of(value) or self.tape.variable_of(value)
        if is_constant(value):
            return self.tape.text(value)
        if kind in (list, tuple, dict):
            return container_text(value, self.text)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self.tape.constant(kind)}({', '.join(map(self.text, value))})"
        if isinstance(value, dict) and hasattr(value, "to_tuple"):  # of transformers
            words = ", ".join(f"{k}={self.text(v)}" for k, v in value.items())
            return f"{self.tape.constant(kind)}({words})"
        raise Untraceable(f"it returns a {kind.__name__}")

    def tensor(self, x: DistTensor) -> str:
        source = self.tape.source_of(x)
        if source is not None:
            return self._source(source, x)
        name = self.made.get(id(x))
        if name is None:
            name = self.made[id(x)] = self._new(x)
        return name

    def _source(self, source: str, x: DistTensor) -> str:
        """Returns the text of a result that is an argument: the argument itself, if the function
        returned its local unchanged, as ``contiguous`` may do."""
        local = self.tape.variable_of(x.local)
        if local == self.tape.local_variable_of(source):
            return source
        other = f"{self.tape.constant(wrap)}({local}, {self.tape.constant(x.spec)})"
        return f"({source} if {local} is {source}.local else {other})"

    def _new(self, x: DistTensor) -> str:
        if x._is_param:
            raise Untraceable("it returns a parameter that it has made")
        if x._view_state is not None:
            raise Untraceable("it returns a copy in place of a view, or a tensor by .data")
        local, spec = self.tape.text(x.local), self.tape.constant(x.spec)
        name = self.tape.new_variable()
        make, kind = self.tape.constant(make_subclass), self.tape.constant(DistTensor)
        meta = self.tape.constant(x.spec.meta_tensor)  # as ``wrap``, without a call
        self.tape.add_line(LineKind.MAKE, f"{name} = {make}({kind}, {meta})", name)
        self.tape.add_line(LineKind.MAKE, f"{name}.local, {name}.spec = {local}, {spec}")
        uses = x._uses
        if collector_of(x) is not None or (uses is not None and (uses.hooked or uses.frozen)):
            raise Untraceable("a result has hooks")
        if uses is not None:
            origin = "None" if uses.origin is None else self._origin(x, uses.origin)
            aliases = []
            for axes, (alias, made_at, _) in (uses.aliases or {}).items():
                if made_at == x.local._version and self.tape.has_variable(alias):
                    aliases.append(f"({axes!r}, {self.tape.variable_of(alias)})")
            listed = "".join(f"{a}, " for a in aliases)
            if origin != "None" or aliases:
                give = self.tape.constant(set_uses)
                self.tape.add_line(LineKind.MAKE, f"{give}({name}, {origin}, ({listed}))")
        kept = x._reduced
        if kept is not None and kept.source is x.local and kept.version == version(x.local):
            value = self.tensor(kept.value)
            self.tape.add_line(
                LineKind.MAKE, f"{self.tape.constant(_keep_reduced)}({name}, {value}, {kept.grad})"
            )
        return name

    def _origin(self, x: DistTensor, origin: Any) -> str:
        """Returns the text that makes the origin of a result, from the sources of the result."""
        make = _ORIGINS.get(getattr(origin, "func", None))
        if make is None or self.writes:
            raise Untraceable(
                "a result is made anew for each use, and the program writes to tensors"
            )
        words = ", ".join(map(self._part, make(x, origin)))
        return f"{self.tape.constant(partial)}({words})"

    def _part(self, value: Any) -> str:
        if type(value) is Later:
            return value.text(self)
        if type(value) is DistTensor:
            return self.tensor(value)
        if type(value) in (list, tuple):
            parts = [self._part(v) for v in value]
            return (
                "[" + ", ".join(parts) + "]"
                if type(value) is list
                else ("(" + "".join(f"{p}, " for p in parts) + ")")
            )
        if type(value) is dict:
            return "{" + ", ".join(f"{k!r}: {self._part(v)}" for k, v in value.items()) + "}"
        return self.tape.text(value)


class Later:
    """A part that is computed when the program runs: ``func(*parts)``."""

    def __init__(self, func: Function, *parts: Any) -> None:
        self.func, self.parts = func, parts

    def text(self, results: Results) -> str:
        words = ", ".join(map(results._part, self.parts))
        return f"{results.tape.constant(self.func)}({words})"


def _keep_reduced(x: Any, value: Any, grad: bool) -> None:
    x._reduced = Reduced(x.local, version(x.local), value, grad, region())


def _of_view(x: Any, origin: Any) -> list[Any]:
    return [origin.func, *origin.args]


def _of_reshard(x: Any, origin: Any) -> list[Any]:
    source, dst, moved, _, _ = origin.args
    return [origin.func, source, dst, moved, Later(Tensor.detach, moved), Later(version, moved)]


def _of_cheap(x: Any, origin: Any) -> list[Any]:
    local_fn, args, words, _, value, _, spec = origin.args
    tensors = [t for t in (*args, *words.values()) if isinstance(t, Tensor)]
    versions = Later(rematerialize.versions_of, tensors)
    return [
        origin.func, local_fn, tuple(args), words, versions, value,
        Later(version, value), spec,
    ]  # fmt: skip


# kind of origin -> function that returns the parts of a new origin
_ORIGINS: dict[Any, Callable[[Any, Any], list[Any]]] = {
    run.view_of_use: _of_view,
    tensor_reshard.reshard_for_use: _of_reshard,
    rematerialize.repeat: _of_cheap,
}
