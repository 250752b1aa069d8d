"""The context of a backward: the only backward before the gradients are read, or one of several
micro-batches that add up.

Code that runs backwards sets it and gradient reduction reads it: contributions may wait for the
last backward.
"""

from __future__ import annotations

from typing import NamedTuple


class BackwardContext(NamedTuple):
    """is_last: no backward follows before the gradients are read. reduce: the action of earlier
    backwards, "scatter", "none" (gradients are kept), or "nothing"."""

    is_last: bool = True
    reduce: str = "scatter"


ONLY = BackwardContext()
RETURNED = BackwardContext(False, "nothing")  # torch.autograd.grad: no gradient adds up
# Global and no context variable: hooks read it in autograd's threads, which have no such variables.
_stack = [ONLY]


def current_context() -> BackwardContext:
    return _stack[-1]


class backward_context:
    """Sets the context of the backwards of micro-batches in its block."""

    def __init__(self, context: BackwardContext) -> None:
        self.context = context

    def __enter__(self) -> None:
        _stack.append(self.context)

    def __exit__(self, *exc: object) -> None:
        _stack.pop()
