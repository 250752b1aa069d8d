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
from disttensor.tensor.uses import UseMode, Uses, alias_of, mode_of
from disttensor.tensor.views import ViewState
from disttensor.torch_private import make_subclass

Tensor = torch.Tensor
T = TypeVar("T", bound="MeshTensor")


class MeshTensor(Tensor):
    """``local``, ``spec`` and optional state, which is None until first needed."""

    local: Tensor
    spec: DistSpec
    _uses: Uses | None = None  # disttensor.tensor.uses
    _grad_slot: GradSlot | None = None  # disttensor.tensor.grad_slot
    _view_state: ViewState | None = None  # disttensor.tensor.views
    # torch's mark of an nn.Parameter: set by ``nn.Parameter`` and ``as_parameter``
    _is_param: bool = False
    # the result of an earlier reduction of a pending value: disttensor.dispatch.reduction_cache
    _reduced: Any = None

    def like(self, local: Tensor, spec: DistSpec) -> Self:
        """Returns another tensor of this class."""
        out: Self = make_subclass(type(self), spec.meta_tensor)
        out.local = local
        out.spec = spec
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


def varying_axes(x: MeshTensor, dst: DistSpec, axes: Axes) -> Axes:
    """Returns the axes over which the use of x varies if x is resharded to ``dst`` and the result
    is used varying over ``axes``. Axes on which x is split or pending are left out.

    The axes that split ``dst`` are included if x is a leaf without hooks: it collects the gradient
    of its slice as a contribution, without communication.
    """
    for o in observe.seeing_calls():
        o.read_for_reshard(x)
    spec = x.spec
    cut = dst.layout.sharded if mode_of(x) is UseMode.LEAF else ()
    if not axes and not cut:
        return ()
    return tuple(
        [a for a in range(spec.mesh.ndim) if a not in spec.varies and (a in axes or a in cut)]
    )
