"""Segments of other stages: a rank off their mesh knows their unsharded parameters as metadata.

On the mesh a module computes with unsharded parameters. The layouts of its results follow from
theirs, so here the module shows stand-ins of them at the same moments. Nothing is gathered, and a
module that is skipped whole stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disttensor.fsdp.param import FSDPParam, cast_inputs
from disttensor.meta import execute


class OffMeshSegment:
    """The parameters of some modules that lie on a mesh without this rank.

    dtype  floating arguments are cast to it, None: they stay
    """

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[FSDPParam], dtype: torch.dtype | None
    ) -> None:
        self.modules, self.dtype = tuple(modules), dtype
        self.copied = [p for p in params if p.spec is not p.sharded_param.spec]
        for param in self.copied:
            param.set_unsharded(execute.stand_in(param.spec, param.sharded_param.requires_grad))
        self.running = 0
        self.ran: set[nn.Module] = set()
        for module in self.modules if self.copied else ():
            module.register_forward_pre_hook(_Begins(self), with_kwargs=True)
            module.register_forward_hook(_Ends(self), always_call=True)

    def show(self) -> None:
        for param in self.copied:
            param.show_unsharded()

    def hide(self) -> None:
        self.ran.clear()
        for param in self.copied:
            param.show_sharded()

    def root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """No forward of the root is left that could show them."""
        if not self.running:
            self.hide()


class _Hook:
    harmless = True  # a module that has it can be skipped: its results do not depend on the call

    def __init__(self, segment: OffMeshSegment) -> None:
        self.segment = segment


class _Begins(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.segment.show()
        self.segment.running += 1
        return cast_inputs(args, kwargs, self.segment.dtype)


class _Ends(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        segment = self.segment
        segment.running -= 1
        segment.ran.add(module)
        if not segment.running and len(segment.ran) == len(segment.modules):
            segment.hide()
