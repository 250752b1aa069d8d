"""Segments of other stages: a rank off their mesh has metadata of their unsharded parameters.

On the mesh a module computes with unsharded parameters, whose layouts decide the layouts of its
results. So a rank off the mesh shows stand-ins of them at the same times. It gathers nothing, and
modules can still be skipped as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from disttensor import callbacks
from disttensor.fsdp.on_stack import calls_on_stack
from disttensor.fsdp.param import FSDPParam, shared
from disttensor.meta import execute


class OffMeshSegment:
    """Parameters of some modules that are on a mesh without this rank."""

    def __init__(self, modules: Sequence[nn.Module], params: Sequence[FSDPParam]) -> None:
        self.modules = tuple(modules)
        self.copied = [p for p in params if p.spec is not p.sharded_param.spec]
        for param in self.copied:
            param.set_unsharded(execute.stand_in(param.spec, param.sharded_param.requires_grad))
        self.running: list[nn.Module] = []
        self.calls = 0  # forwards of the root that are on the stack
        self.shown = False
        self.ran: set[nn.Module] = set()
        for module in self.modules if self.copied else ():
            is_read = shared(self.copied, module)  # see ``Engine._is_read``
            module.register_forward_pre_hook(_Begins(self), prepend=is_read)
            module.register_forward_hook(_Ends(self), always_call=True)

    def begin(self, module: nn.Module) -> None:
        """Begins a forward of one of its modules: they show the unsharded parameters."""
        self.running.append(module)
        callbacks.recompute_contexts[self] = self._shown_again
        self.show()

    def end(self, module: nn.Module) -> None:
        if module in self.running:  # else another hook before its forward raised an error
            self.running.remove(module)
        if not self.running:
            callbacks.recompute_contexts.pop(self, None)

    @contextmanager
    def _shown_again(self) -> Iterator[None]:
        """Shows the unsharded parameters while a region inside its modules is recomputed."""
        was_shown = self.shown
        self.show()
        try:
            yield
        finally:
            if not was_shown:
                self.hide()

    def show(self) -> None:
        self.shown = True
        for param in self.copied:
            param.show_unsharded()

    def hide(self) -> None:
        self.shown = False
        self.ran.clear()
        for param in self.copied:
            param.show_sharded()

    def root_begins(self, module: nn.Module, args: Any) -> None:
        if (self.calls or self.running or self.shown) and calls_on_stack(module) == 1:
            self.calls = 0  # see Engine._drop_forwards
            self.running.clear()
            callbacks.recompute_contexts.pop(self, None)
            self.hide()
        self.calls += 1

    def root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hides the unsharded parameters at the end of a forward of the root."""
        self.calls = max(self.calls - 1, 0)
        if not self.running:
            self.hide()


class _Hook:
    harmless = True  # a module with this hook can be skipped: its results do not depend on the call

    def __init__(self, segment: OffMeshSegment) -> None:
        self.segment = segment


class _Begins(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        self.segment.begin(module)


class _Ends(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        segment = self.segment
        segment.end(module)
        segment.ran.add(module)
        is_over = not segment.calls or len(segment.ran) == len(segment.modules)
        if not segment.running and is_over:
            segment.hide()
