"""Where a module holds its parameters and buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class Slot(NamedTuple):
    """Where a module holds a parameter or buffer; a tied one has several."""

    name: str
    owner: nn.Module
    table: dict[str, Any]
    key: str
    value: torch.Tensor


def slots(module: nn.Module) -> list[Slot]:
    return [
        Slot(f"{prefix}.{key}" if prefix else key, owner, table, key, value)
        for prefix, owner in module.named_modules()
        for table in (owner._parameters, owner._buffers)
        for key, value in table.items()
        if value is not None
    ]
