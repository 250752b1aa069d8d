"""A parameter in its two states: sharded between steps, unsharded while it is used.

The module, the optimizer and a checkpoint see ``sharded_param``: a DistTensor that the shard axis
splits. During a forward or backward of its segment the module holds ``unsharded_param`` instead. It
is not split by that axis and has the dtype of the computation. If nothing is split or cast, both
are one tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from disttensor.autograd import token
from disttensor.core.layout import Layout
from disttensor.gradients.accumulate import GradAccumulator
from disttensor.nn.parameters import Slot
from disttensor.tensor.base import as_parameter
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.grad_slot import fix_spec, grad_slot, set_collector
from disttensor.tensor.user_facts import pass_attributes
from disttensor.tensor.versions import version

Tensor = torch.Tensor


class FSDPParam(GradAccumulator):
    """slots: where modules hold the parameter. axis: the mesh axis that splits it, or None. dtype,
    reduce_dtype: of ``unsharded_param``, and of sums between ranks."""

    feature = "shard_data_parallel"  # for errors of disttensor.tensor

    def __init__(
        self, name: str, param: DistTensor, slots: list[Slot], axis: int | None, dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        fix_spec(param, self.feature)
        spec, dims, dim = param.spec, param.spec.layout.dims, 0
        if axis is None or axis not in spec.layout.sharded or spec.mesh.shape[axis] == 1:
            axis = None
        else:
            dim = next(d for d, axes in enumerate(dims) if axis in axes)
            rest = tuple(tuple(a for a in axes if a != axis) for axes in dims)
            spec = spec.with_layout(Layout(rest, spec.layout.partial, spec.layout.custom))
        super().__init__(name, param, spec.with_dtype(dtype), axis, dim, reduce_dtype)
        self.slots = slots
        self._times_renewed = 0  # how often ``p.data = x`` has been done

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPParam:
        param, slots = deepcopy((self.sharded_param, self.slots), memo)
        args = self.name, param, slots, self.axis, self.spec.dtype, self.reduce_dtype
        new = memo[id(self)] = FSDPParam(*args)
        return new

    def set_unsharded(self, param: DistTensor) -> None:
        self.unsharded_param = as_parameter(param)
        token.replacements[0] += 1  # modules will show another tensor

    def use_memory(self, memory: Tensor) -> None:
        """Makes ``memory`` the local of ``unsharded_param``. Autograd counts writes to it apart
        from writes to the other parameters in this memory."""
        leaf = memory.data.requires_grad_(self.sharded_param.requires_grad)
        self.set_unsharded(wrap(leaf, self.spec))
        set_collector(self.sharded_param, self)
        found = grad_slot(self.sharded_param).hooks
        if found is not None:  # registered before: called when the sharded parameter has its sum
            self.hooks, found.post_hooks = found.post_hooks, OrderedDict()

    def show_unsharded(self) -> None:
        requires_grad = self.sharded_param.local.requires_grad
        if self.unsharded_param.local.requires_grad is not requires_grad:
            self.unsharded_param.requires_grad_(requires_grad)
        self._swap(self.sharded_param, self.unsharded_param)

    def show_sharded(self) -> None:
        self._swap(self.unsharded_param, self.sharded_param)

    def _swap(self, old: DistTensor, new: DistTensor) -> None:
        """Replaces ``old`` by ``new`` in the modules, unless another tensor was set there. Guards
        of skipped modules must not see it, so it bypasses them and writes to the present table of
        the owner: a guard may have replaced ``slot.table``. Attributes that the user set are seen
        on both."""
        pass_attributes(old, new, exactly=old is self.sharded_param)
        for slot in self.slots:
            table: Any = slot.owner._parameters
            if table.get(slot.key) is old:
                dict.__setitem__(table, slot.key, new)

    def renew(self) -> None:
        """Counts ``p.data = x``."""
        self._times_renewed += 1

    def version(self) -> tuple[int, int]:
        """Returns a value that changes with each counted write to ``sharded_param``, also on ranks
        without a row."""
        return version(self.sharded_param.local), self._times_renewed


def is_borrowed(params: Iterable[FSDPParam], module: nn.Module) -> bool:
    """Returns True if ``module`` has hooks before its forward and several modules use one of these
    parameters: such a hook may bring it to the mesh of another stage."""
    return bool(module._forward_pre_hooks) and any(len(p.slots) > 1 for p in params)
