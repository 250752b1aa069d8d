"""Results of a program: makes DistTensors of its variables at its end, with the same state as the
DistTensors of eager calls."""

from __future__ import annotations

from typing import Any

import torch

from disttensor.core.spec import DistSpec
from disttensor.dispatch.reduction_cache import keep
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad_slot import collector_of
from disttensor.tensor.uses import Derivation, set_aliases, set_derivation, with_versions
from disttensor.tensor.versions import version
from disttensor.torch_private import make_subclass
from disttensor.trace.expression import Apply, Attribute, SourceName, Variable
from disttensor.trace.tape import LineKind, Tape, is_constant, make_tuple, map_container
from disttensor.trace.world_state import Untraceable

Tensor = torch.Tensor


class Results:
    """Writes the end of a program. ``writes``: the program writes to tensors, so the sources of its
    results may have changed."""

    def __init__(self, tape: Tape, writes: bool) -> None:
        self.tape, self.writes = tape, writes
        self.made: dict[int, Variable] = {}  # id of a DistTensor -> its variable

    def expression(self, value: Any) -> Any:
        """Returns what makes this result again. Raises Untraceable if there is none."""
        kind = type(value)
        if kind is DistTensor:
            return self.tensor(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            return self.tape.source_of(value) or self.tape.variable_of(value)
        if is_constant(value):
            return self.tape.expression(value)
        if kind in (list, tuple, dict):
            return map_container(value, self.expression)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = tuple(map(self.expression, value))
            return self.tape.apply(make_tuple, self.tape.constant(kind), items)
        if isinstance(value, dict) and hasattr(value, "to_tuple"):  # of transformers
            fields = tuple([(k, self.expression(v)) for k, v in value.items()])
            return Apply(self.tape.constant(kind), (), fields)
        raise Untraceable(f"it returns a {kind.__name__}")

    def tensor(self, x: DistTensor) -> Any:
        source = self.tape.source_of(x)
        if source is not None:
            return self._source(source, x)
        name = self.made.get(id(x))
        if name is None:
            name = self.made[id(x)] = self._new(x)
        return name

    def _source(self, source: SourceName, x: DistTensor) -> Any:
        """Returns a result that is an argument: the argument itself, if the function returned its
        local unchanged, as ``contiguous`` may do."""
        local = self.tape.variable_of(x.local)
        if local == self.tape.local_variable_of(source):
            return source
        return self.tape.apply(_source_or_new, source, local, self.tape.constant(x.spec))

    def _new(self, x: DistTensor) -> Variable:
        if x._is_param:
            raise Untraceable("it returns a parameter that it has made")
        if x._view_state is not None:
            raise Untraceable("it returns a copy in place of a view, or a tensor by .data")
        tape, make = self.tape, LineKind.MAKE
        local, spec = tape.expression(x.local), tape.constant(x.spec)
        name = tape.new_variable()
        kind, meta = tape.constant(DistTensor), tape.constant(x.spec.meta_tensor)
        tape.add_line(make, name, tape.apply(make_subclass, kind, meta))  # as ``wrap``
        tape.add_line(make, Attribute(name, "local"), local)
        tape.add_line(make, Attribute(name, "spec"), spec)
        uses = x._uses
        if collector_of(x) is not None or (uses is not None and uses.older):
            raise Untraceable("a result has hooks")
        if uses is not None:
            aliases = []
            for axes, (alias, _, _) in (uses.aliases or {}).items():
                if uses.version == x.local._version and tape.has_variable(alias):
                    aliases.append((axes, tape.variable_of(alias)))
            if uses.derivation is not None:
                self._derive(name, local, uses.derivation)
            if aliases:
                tape.add_line(make, None, tape.apply(set_aliases, name, tuple(aliases)))
        kept = x._reduced
        if kept is not None and kept.source is x.local and kept.version == version(x.local):
            value = self.tensor(kept.value)
            tape.add_line(make, None, tape.apply(keep, name, value, kept.grad))
        return name

    def _derive(self, name: Variable, local: Any, made: Derivation) -> None:
        """Adds the line that records the source of a result."""
        if self.writes or made.x.local is not made.local:
            raise Untraceable("a result was made from another, and the program writes to tensors")
        parts = [name, local, self.tensor(made.x)]
        if made.local_fn is not None or made.args:
            call = made.local_fn, list(made.args), made.named, made.at
            parts += [self._part(part) for part in call]
            tensors = [t for t in (*made.args, *made.named.values()) if isinstance(t, Tensor)]
            if tensors:
                parts.append(self.tape.apply(with_versions, self._part(tensors)))
        self.tape.add_line(LineKind.MAKE, None, self.tape.apply(set_derivation, *parts))

    def _part(self, value: Any) -> Any:
        if type(value) is DistTensor:
            return self.tensor(value)
        if type(value) in (list, tuple):
            return map_container(value, self._part)
        if type(value) is dict:
            return {self.tape.constant(k): self._part(v) for k, v in value.items()}
        return self.tape.expression(value)


def _source_or_new(source: DistTensor, local: Tensor, spec: DistSpec) -> DistTensor:
    """Returns ``source`` if it has this local, else a new tensor."""
    return source if local is source.local else wrap(local, spec)
