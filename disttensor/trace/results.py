"""Results of a program: makes DistTensors of its variables at its end, with the same state as the
DistTensors of eager calls."""

from __future__ import annotations

from typing import Any

import torch

from disttensor.dispatch.reduction_cache import keep
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad_slot import collector_of
from disttensor.tensor.uses import Derivation, set_aliases, set_derivation, with_versions
from disttensor.tensor.versions import version
from disttensor.torch_private import make_subclass
from disttensor.trace.tape import LineKind, Tape, container_text, is_constant
from disttensor.trace.world_state import Untraceable

Tensor = torch.Tensor


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
        if collector_of(x) is not None or (uses is not None and uses.older):
            raise Untraceable("a result has hooks")
        if uses is not None:
            aliases = []
            for axes, (alias, _, _) in (uses.aliases or {}).items():
                if uses.version == x.local._version and self.tape.has_variable(alias):
                    aliases.append(f"({axes!r}, {self.tape.variable_of(alias)})")
            if uses.derivation is not None:
                self._derive(name, local, uses.derivation)
            if aliases:
                give, listed = self.tape.constant(set_aliases), "".join(f"{a}, " for a in aliases)
                self.tape.add_line(LineKind.MAKE, f"{give}({name}, ({listed}))")
        kept = x._reduced
        if kept is not None and kept.source is x.local and kept.version == version(x.local):
            value = self.tensor(kept.value)
            self.tape.add_line(
                LineKind.MAKE, f"{self.tape.constant(keep)}({name}, {value}, {kept.grad})"
            )
        return name

    def _derive(self, name: str, local: str, made: Derivation) -> None:
        """Adds the line that records the source of a result."""
        if self.writes or made.x.local is not made.local:
            raise Untraceable("a result was made from another, and the program writes to tensors")
        parts = [name, local, self.tensor(made.x)]
        if made.local_fn is not None or made.args:
            call = made.local_fn, list(made.args), made.named, made.at
            parts += [self._part(part) for part in call]
            tensors = [t for t in (*made.args, *made.named.values()) if isinstance(t, Tensor)]
            if tensors:
                parts.append(f"{self.tape.constant(with_versions)}({self._part(tensors)})")
        give = self.tape.constant(set_derivation)
        self.tape.add_line(LineKind.MAKE, f"{give}({', '.join(parts)})")

    def _part(self, value: Any) -> str:
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
