"""torch.utils.checkpoint (use_reentrant=False) on DistTensors: the inputs of a region are kept as
their locals.

torch saves each input through the hooks of the region around it, so that nested regions free it and
bring it back. Of a DistTensor it would save the wrapper, which is in no graph: brought back, it
would no longer require grad.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from disttensor.tensor.dist_tensor import DistTensor, wrap

_make_saved: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)


class SavedInput:
    """A DistTensor as an input of a region. A leaf stays the object that it is: it collects its
    gradients."""

    __slots__ = ("leaf", "local", "spec")

    def __init__(self, x: DistTensor) -> None:
        self.spec = x.spec
        self.leaf = x if x.local.is_leaf and x.local.requires_grad else None
        self.local: Any = None if self.leaf is not None else _make_saved(x.local, is_output=False)

    def unpack(self) -> DistTensor:
        return self.leaf if self.leaf is not None else wrap(self.local.unpack(), self.spec)


def _save_inputs(frame: Any, *args: Any) -> None:
    _torch_save(frame, *[SavedInput(a) if type(a) is DistTensor else a for a in args])


def _get_inputs(frame: Any) -> list[Any]:
    return [a.unpack() if isinstance(a, SavedInput) else a for a in _torch_get(frame)]


_frame: Any = getattr(torch_checkpoint, "_CheckpointFrame", None)
if _make_saved is not None and hasattr(_frame, "save_inputs"):
    _torch_save, _torch_get = _frame.save_inputs, _frame.get_inputs
    _frame.save_inputs, _frame.get_inputs = _save_inputs, _get_inputs
