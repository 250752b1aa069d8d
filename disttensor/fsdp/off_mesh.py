"""Segments of other stages: what modules hold there while they run, a rank outside must know as
metadata.

Inside, a module computes with the whole twins of its parameters. The layouts of its results follow
from theirs, so here the module shows stand-ins of the twins at the same moments. Nothing is
gathered, and a module that is skipped whole stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disttensor.fsdp.param import Twin, cast
from disttensor.meta import execute


class Elsewhere:
    """The parameters of some modules that lie on a mesh without this rank.

    compute  the dtype that floating arguments are cast to, None: they stay
    """

    def __init__(
        self, modules: Sequence[nn.Module], twins: Sequence[Twin], compute: torch.dtype | None
    ) -> None:
        self.modules, self.compute = tuple(modules), compute
        self.twins = [t for t in twins if t.spec is not t.held.spec]
        for twin in self.twins:
            twin.whole = execute.stand_in(twin.spec, twin.held.requires_grad)
            twin.whole._is_param = True
        self.running = 0
        self.ran: set[nn.Module] = set()
        for module in self.modules if self.twins else ():
            module.register_forward_pre_hook(_Begins(self), with_kwargs=True)
            module.register_forward_hook(_Ends(self), always_call=True)

    def show(self) -> None:
        for twin in self.twins:
            twin.follow()
            twin.swap(twin.held, twin.whole)

    def hide(self) -> None:
        self.ran.clear()
        for twin in self.twins:
            twin.swap(twin.whole, twin.held)

    def root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """No forward of the root is left that could show them."""
        if not self.running:
            self.hide()


class _Begins:
    harmless = True  # to those who skip a module: its results do not depend on this being called

    def __init__(self, of: Elsewhere) -> None:
        self.of = of

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.of.show()
        self.of.running += 1
        compute = self.of.compute
        return None if compute is None else (cast(args, compute), cast(kwargs, compute))


class _Ends:
    harmless = True

    def __init__(self, of: Elsewhere) -> None:
        self.of = of

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        of = self.of
        of.running -= 1
        of.ran.add(module)
        if not of.running and len(of.ran) == len(of.modules):
            of.hide()
