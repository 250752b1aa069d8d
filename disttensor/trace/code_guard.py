"""CodeGuard: everything that a forward reads, except its arguments, and whether it has changed.

``Reach`` finds the values. Modules have a ``ModuleGuard``, which is notified of changes; all other
values are compared in each call.
"""

from __future__ import annotations

from operator import is_
from typing import Any

from disttensor.autograd import token
from disttensor.tensor.dist_tensor import DistTensor, wait_for
from disttensor.tensor.user_facts import user_attributes
from disttensor.torch_private import storage_id
from disttensor.trace.code_watch import CodeWatch
from disttensor.trace.module_guard import has_hooks
from disttensor.trace.reach import Code, Reach


class CodeGuard:
    """``tensors``: all tensors that a forward may read except its arguments, each once. ``why``:
    the reason for not recording it, or ""."""

    def __init__(self, target: Any, ran: Code | None = None, dynamic: bool = False) -> None:
        self.reach = reach = Reach(target, ran or {}, dynamic)
        self.why, self.trees, self.tensors = reach.why, reach.trees, reach.tensors
        self.ids = {id(t) for t in self.tensors}
        self._dist = [wait_for(t) for t in self.tensors if isinstance(t, DistTensor)]
        self._plain = [t for t in self.tensors if not isinstance(t, DistTensor)]
        self._tables = [
            (table, list(table.values()))
            for tree in self.trees
            for m in tree.modules
            for table in (m._parameters, m._buffers, m._modules)
            if table
        ]
        self._replaced = token.replacements[0]
        self._states: dict[Any, int] = {}
        self._looked = -1
        self.memory: set[int] = set()  # of the tensors, see ``state``
        self._state = 0

    def including(self, watch: CodeWatch) -> CodeGuard:
        """Returns a guard that also knows the code that ran: this one, if it does."""
        known = self.reach
        known.ran |= watch.code
        if known.knows(watch.code) and (known.dynamic or not watch.dynamic):
            return self
        new = CodeGuard(known.target, known.ran, known.computes or watch.dynamic)
        new.why = new.why or new.reach.not_found(watch.code)
        return new

    def change(self) -> str:
        """Returns what has changed, except training flags and ``state``, or ""."""
        for tree in self.trees:
            if not tree.unchanged():
                return f"{type(tree.modules[0]).__qualname__} or a module in it"
        if not self._same_tensors():
            return "a parameter, a buffer or a child of a module"
        if any(map(has_hooks, self.reach.roots)):
            return "hooks of a module"
        return self.reach.values.change()

    def owns(self, value: Any) -> bool:
        """Returns True for a list, dict, set or another container that the forward may read."""
        return id(value) in self.reach.values.mutable

    def _same_tensors(self) -> bool:
        """Returns True if modules have the same tensors. Sharded state is shown without notice to
        the guards; showing other tensors counts as a change."""
        if self._replaced == token.replacements[0]:
            return True
        self._replaced = token.replacements[0]
        return all(
            len(table) == len(values) and all(map(is_, table.values(), values))
            for table, values in self._tables
        )

    def state(self) -> int:
        """Returns a number for the specs, strides and ``requires_grad`` of the tensors. They are
        compared only after a change of some tensor of the process, as reading them all would load
        them into the cache."""
        if self._looked != token.replacements[0] or self._plain:
            self._looked = token.replacements[0]
            key = (
                tuple([(t.spec, t.local.requires_grad, t.local.stride()) for t in self._dist]),
                tuple([
                    (t.requires_grad, t.shape, t.stride(), t.dtype, t.device) for t in self._plain
                ]),
            )  # fmt: skip
            self._state = self._states.setdefault(key, len(self._states))
            locals_ = [*(t.local for t in self._dist), *self._plain]
            self.memory = {storage_id(t.untyped_storage()) for t in locals_}
        return self._state

    def flags(self) -> tuple[Any, ...]:
        """Returns ``training`` of all modules."""
        trees = self.trees
        return trees[0].flags() if len(trees) == 1 else tuple([t.flags() for t in trees])

    def marks(self) -> list[Any]:
        """Returns a value that changes if a forward assigns to attributes."""
        of_tensors = [[*map(id, user_attributes(t).values())] for t in self.tensors]
        return [of_tensors, *((tree.changes, tree.attributes()) for tree in self.trees)]
