"""Which backward this is: the only one before the gradients are read, or one of several
micro-batches that add up.

Set by the code that runs backwards, read by gradient reduction: contributions may wait for the last
backward.
"""

from __future__ import annotations

from typing import NamedTuple


class BackwardContext(NamedTuple):
    """is_last: no backward follows before the gradients are read. reduce: what those before it do,
    "scatter", "none" (gradients are kept), or "nothing"."""

    is_last: bool = True
    reduce: str = "scatter"


ONLY = BackwardContext()
RETURNED = BackwardContext(False, "nothing")  # torch.autograd.grad: no gradient adds up
# Of the process, and no context variable: hooks ask in the threads of autograd, which see none.
_stack = [ONLY]


def current_context() -> BackwardContext:
    return _stack[-1]


class backward_context:
    """For backwards of micro-batches in here."""

    def __init__(self, context: BackwardContext) -> None:
        self.context = context

    def __enter__(self) -> None:
        _stack.append(self.context)

    def __exit__(self, *exc: object) -> None:
        _stack.pop()
