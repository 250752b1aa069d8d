"""Hooks of a leaf, which run at the end of each backward with the leaf's complete gradient.

A leaf collects its gradient on several tensors, one for each set of axes over which its uses vary
(``tensor/uses.py``). Autograd reports each of them. At the end of the backward the parts of *this*
backward are added up and reduced, the tensor hooks get the sum and may replace it, and the result
is accumulated. So it does not matter whether a hook was registered before or after the uses, and a
hook runs once. Hooks after accumulation run last, with a reduced ``p.grad``.

Every rank that has a hook reduces, so all ranks of the mesh register their hooks alike.
``agree_on_hook`` compares that.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from disttensor.autograd.accumulation import RETURNED, current_context
from disttensor.autograd.joined_backward import run_after_failure, run_last, this_backward
from disttensor.comm.agree import agree
from disttensor.core.layout import Axes
from disttensor.errors import user_line
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.grad import (
    as_gradient,
    combine_gradients,
    get_grad,
    grad_spec,
    reduced_spec,
    set_reduced,
)
from disttensor.tensor.grad_slot import grad_slot
from disttensor.tensor.reshard import local_of_global, resharded
from disttensor.tensor.uses import leaves_of

Tensor = torch.Tensor
Hook = Callable[[Any], Any]
_HOOKS = "disttensor_hooks"


class LeafHooks:
    """
    tensor_hooks  get the gradient of a backward, and may return another one.
    post_hooks    get the leaf after its gradient was accumulated.
    """

    def __init__(self, x: MeshTensor) -> None:
        self.x = x
        self.tensor_hooks: OrderedDict[int, Hook] = OrderedDict()
        self.post_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._backward = self._posted = -1
        # all leaves, each with its gradient from before this backward
        self._earlier: list[tuple[Axes, Tensor, Tensor | None]] = []
        # gradients of frozen leaves, which autograd does not accumulate
        self._frozen: list[tuple[Tensor, Tensor]] = []
        for _, leaf in leaves_of(x):
            self.watch(leaf)

    def watch(self, leaf: Tensor) -> None:
        """Lets autograd report the gradients of ``leaf``, one of the leaves of x. The hook keeps x
        alive as long as the leaf is in a graph. Only a weak reference is in the other: the garbage
        collector does not see what it keeps."""
        is_frozen = not leaf.requires_grad
        leaf.requires_grad_()
        setattr(leaf, _HOOKS, self)
        leaf.register_hook(partial(self._arrives, leaf))
        leaf.register_post_accumulate_grad_hook(partial(_accumulated, weakref.ref(self)))
        if is_frozen:
            leaf.requires_grad_(False)

    def _arrives(self, leaf: Tensor, grad: Tensor) -> None:
        """At the first gradient of a backward, takes the earlier gradients of all leaves away."""
        if not self.tensor_hooks or current_context() is RETURNED:
            return
        if self._backward != this_backward():
            self._begin()
        if not leaf.requires_grad:
            self._frozen.append((leaf, grad))

    def _begin(self) -> None:
        self._restore()  # of a backward that failed
        self._backward = this_backward()
        run_after_failure(self._restore)
        run_last(self._finish)
        slot = grad_slot(self.x)
        for axes, leaf in leaves_of(self.x):
            earlier = leaf.grad
            if earlier is not None and (slot.fixed_by or slot.memory is not None):
                earlier = earlier.clone()  # the memory of a bucket will be written to
            self._earlier.append((axes, leaf, earlier))
            leaf.grad = None

    def note_accumulated(self) -> None:
        """Runs the hooks after accumulation at the end of this backward."""
        if self.post_hooks and self._posted != this_backward():
            self._posted = this_backward()
            run_last(self._after)

    def _after(self) -> None:
        self._posted = -1
        grad = get_grad(self.x)
        if grad is not None and grad.spec.layout.partial:
            total = resharded(grad, reduced_spec(grad.spec)).local
            set_reduced(self.x, grad, total)
        for hook in list(self.post_hooks.values()):
            hook(self.x)

    def _restore(self) -> None:
        """Gives the leaves their earlier gradients back."""
        for _, leaf, earlier in self._earlier:
            leaf.grad = earlier
        self._earlier, self._frozen, self._backward, self._posted = [], [], -1, -1

    def _finish(self) -> None:
        pieces = [(axes, leaf.grad) for axes, leaf, _ in self._earlier if leaf.grad is not None]
        axes_of = {id(leaf): axes for axes, leaf, _ in self._earlier}
        pieces += [(axes_of[id(leaf)], grad) for leaf, grad in self._frozen]
        self._restore()
        if not pieces:
            raise RuntimeError(
                f"register_hook on {self.x.spec!r}: its gradient was reduced together with that of "
                "earlier backwards, so a hook cannot get the gradient of one backward. Register "
                "register_post_accumulate_grad_hook, and change p.grad there"
            )
        total = self.run(pieces).local
        leaf = self.x.local
        if not leaf.requires_grad:
            return
        if leaf.grad is None:
            leaf.grad = total if total.requires_grad else total.clone()  # hooks may keep theirs
        elif total.requires_grad or leaf.grad.requires_grad:
            leaf.grad = leaf.grad + total
        else:
            leaf.grad.add_(total)

    def run(self, pieces: Sequence[tuple[Axes, Tensor]]) -> MeshTensor:
        """Returns the gradient that the tensor hooks make of the sum of ``pieces``."""
        x = self.x
        union = {a for axes, _ in leaves_of(x) for a in axes}
        if union - {a for axes, _ in pieces for a in axes}:  # this rank has no part of it
            pieces = [*pieces, (tuple(sorted(union)), torch.zeros_like(pieces[0][1]))]
        total = as_gradient(x, *combine_gradients(x, pieces))
        total = resharded(total, grad_spec(x, ()).with_dtype(total.spec.dtype))
        for hook in list(self.tensor_hooks.values()):
            out = hook(total)
            if out is not None:
                total = self._checked(out, total)
        return total

    def _checked(self, out: Any, total: MeshTensor) -> MeshTensor:
        """Returns the result of a hook in the layout of the gradient. Raises TypeError or
        RuntimeError if it is no gradient."""
        who = f"a hook on {self.x.spec!r}"
        if not isinstance(out, Tensor):
            raise TypeError(f"{who} returned a {type(out).__name__}: return a tensor or None")
        if tuple(out.shape) != tuple(total.spec.shape) or out.dtype is not total.spec.dtype:
            raise RuntimeError(
                f"{who} has changed the type of the gradient: {out.dtype} of {list(out.shape)} for "
                f"{total.spec!r}. Return a gradient of the same shape and dtype"
            )
        if isinstance(out, MeshTensor):  # the next hook gets the same object
            return resharded(out, total.spec)
        return total.like(local_of_global(out, total.spec), total.spec)


def _accumulated(hooks: weakref.ref[LeafHooks], _: Tensor) -> None:
    found = hooks()
    if found is not None:
        found.note_accumulated()


def leaf_hooks(x: MeshTensor) -> LeafHooks:
    """Returns the hooks of the leaf x."""
    slot = grad_slot(x)
    if slot.hooks is None:
        slot.hooks = LeafHooks(x)
    found: LeafHooks = slot.hooks
    return found


def hooks_on_leaf(leaf: Tensor) -> LeafHooks | None:
    """Returns the hooks that users registered on the DistTensor of ``leaf``, one of its leaves."""
    hooks: LeafHooks | None = getattr(leaf, _HOOKS, None)
    return hooks if hooks is not None and (hooks.tensor_hooks or hooks.post_hooks) else None


def agree_on_hook(x: MeshTensor, who: str) -> None:
    """Compares the registration of a hook on all ranks, because a hook makes them reduce. Raises
    MismatchError if a rank is at another call. A gradient that is complete on each rank needs no
    reduction, and no message."""
    mesh = x.spec.mesh
    axes = tuple(a for a, n in enumerate(mesh.shape) if n > 1 and a not in x.spec.varies)
    if axes:
        agree(f"{who} at {user_line()}", mesh.group(axes), of=repr(x.spec))
