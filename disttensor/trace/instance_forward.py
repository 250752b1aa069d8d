"""A callable that replaces the ``forward`` of one module."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import nn


class InstanceForward:
    """Has the signature of the class's forward; copied and pickled with the module. ``wraps``: it
    calls the class's forward, or ``inner`` in place of it."""

    wraps: ClassVar[bool] = False
    inner: InstanceForward | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def class_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def put(self) -> None:
        self.module.__dict__["forward"] = self
