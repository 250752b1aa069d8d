"""The base class of DistTensor: this rank's local, the spec, and other state.

``DistTensor`` (``dist_tensor.py``) joins the mixins; a mixin makes another tensor of its class with
``like``.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

import torch

from disttensor import observe
from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.observe import observers
from disttensor.tensor.grad_slot import GradSlot
from disttensor.tensor.uses import Uses, alias_of
from disttensor.tensor.views import ViewState
from disttensor.torch_private import make_subclass

Tensor = torch.Tensor
T = TypeVar("T", bound="MeshTensor")


def make(cls: Any, local: Tensor, spec: DistSpec) -> Any:
    """Returns a tensor of the class ``cls``."""
    out: Any = make_subclass(cls, spec.meta_tensor)
    out.local, out.spec = local, spec
    return out


class MeshTensor(Tensor):
    """``local``, ``spec`` and optional state, which is None until first needed."""

    local: Tensor
    spec: DistSpec
    _uses: Uses | None = None  # disttensor.tensor.uses
    _grad_slot: GradSlot | None = None  # disttensor.tensor.grad_slot
    _view_state: ViewState | None = None  # disttensor.tensor.views
    _sets_of_data: int = 0  # how often ``x.data = value`` was done
    # torch's mark of an nn.Parameter: set by ``nn.Parameter`` and ``as_parameter``
    _is_param: bool = False
    # the result of an earlier reduction of a pending value: disttensor.dispatch.reduction_cache
    _reduced: Any = None

    def like(self, local: Tensor, spec: DistSpec) -> Self:
        """Returns another tensor of this class."""
        out: Self = make(type(self), local, spec)
        return out

    @property
    def is_initialized(self) -> bool:
        """False on a rank off the mesh, which has the metadata only."""
        return self.spec.mesh.coordinate is not None

    def local_for(self, axes: Axes) -> Tensor:
        """Returns the local for a use that varies over ``axes`` (sorted; the value is replicated
        there).

        Its value is the value of ``local``, but its gradient has another meaning: see
        ``disttensor.autograd.grad_types``.
        """
        if observers:
            return observe.read_local(alias_of, self, axes)
        return alias_of(self, axes)


def as_parameter(x: T) -> T:
    """Marks ``x`` itself as an ``nn.Parameter``; ``nn.Parameter(x)`` would make another tensor."""
    x._is_param = True
    return x
