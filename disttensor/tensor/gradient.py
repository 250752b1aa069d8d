"""The gradient side of DistTensor: requires_grad, grad, backward, hooks, answered from the locals.

A leaf has one C++ leaf per way of use (``DistTensor.local_for``); ``grad`` puts their gradients
together and is a DistTensor, ``Partial`` over the axes on which it is still a sum of contributions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

import reshard
from disttensor.autograd import token
from disttensor.autograd.grad_types import Typed, dual, move, whole_grad
from disttensor.layout import Axes, Layout
from disttensor.spec import DistSpec
from disttensor.tensor import view_copies
from disttensor.tensor.dist_tensor import DistTensor, resharded, wrap
from disttensor.torch_private import after_backward, make_subclass, no_torch_function

Tensor = torch.Tensor

# Called when a backward has ended with an error.
AFTER_FAILURE: list[Callable[[], None]] = []


def uses(x: DistTensor) -> list[tuple[Axes, Tensor]]:
    """The C++ tensors whose gradients make up that of x: its local, and those of uses that pass it
    by. For a leaf these are further leaves, one per set of axes over which uses varied; else what
    was made from x's origin."""
    apart = not x.local.is_leaf and x._origin is not None
    held = x._aliases.items() if x._aliases is not None else ()
    aliases = [(axes, alias) for axes, (alias, version) in held if apart or version < 0]
    return [((), x.local), *aliases, *x._former]


def retire(x: DistTensor) -> None:
    """From now on every use of x goes through its local (which has hooks); earlier ones are
    remembered."""
    x._former = tuple(uses(x)[1:])
    x._aliases = x._origin = None


def keep(x: DistTensor, axes: Axes, g: Tensor) -> None:
    """Make ``g`` the gradient that was collected for uses varying over ``axes``."""
    found = [leaf for a, leaf in uses(x) if a == axes]
    with torch.enable_grad():
        if found:
            found[0].grad = g
        elif x._hooked:
            leaf = x.local.detach().requires_grad_()
            leaf.grad = g
            x._former += ((axes, leaf),)
        else:
            x.local_for(axes).grad = g


def grad_spec(x: DistTensor, axes: Axes) -> DistSpec:
    """The spec of a gradient that was collected for uses varying over ``axes``."""
    return dual(Typed(x.spec, axes))[0].spec


def joined(x: DistTensor, pieces: Sequence[tuple[Axes, Tensor]]) -> tuple[Axes, Tensor]:
    """Gradients of several ways of use as one, Partial over all their axes: a whole gradient joins
    as the share of the first rank of the axes it is whole on."""
    if len(pieces) == 1:
        return pieces[0]
    union = tuple(sorted({a for axes, _ in pieces for a in axes}))
    if any(
        g.requires_grad for _, g in pieces
    ):  # to be differentiated again: every rank keeps every share in the graph
        ends = dual(Typed(x.spec, union))[0]
        moved = [
            g if axes == union else move(g, dual(Typed(x.spec, axes))[0], ends, None)
            for axes, g in pieces
        ]
        return union, sum(moved[1:], start=moved[0])
    coordinate = x.spec.mesh.coordinate or ()
    total = None
    for axes, g in pieces:
        if any(coordinate[a] for a in union if a not in axes):
            continue
        total = g if total is None else total + g
    return union, torch.zeros_like(x.local) if total is None else total


def get_grad(x: DistTensor) -> DistTensor | None:
    if not x._former and (x._aliases is None or not x.local.is_leaf):
        g = x.local.grad
        if g is None:
            return None
        return cached_grad(x, (), g)
    pieces = [(axes, leaf.grad) for axes, leaf in uses(x) if leaf.grad is not None]
    if not pieces:
        return None
    axes, total = joined(x, pieces)
    if len(pieces) > 1:
        for _, leaf in uses(x):
            leaf.grad = None
        keep(x, axes, total)
    return cached_grad(x, axes, total)


def given(x: DistTensor, axes: Axes, g: Tensor) -> DistTensor:
    """The gradient of x's local (of its use varying over ``axes``) as a value: the gradient of
    x."""
    typed, divided = dual(Typed(x.spec, axes))
    if divided != 1.0 and not x.local.is_leaf:
        g = g * divided
    if (
        typed.varying and g.requires_grad
    ):  # inside the graph it is read by varying uses; what is made of it now is not
        g = move(g, typed, Typed(typed.spec), None)
    return wrap(g, typed.spec if g.dtype is typed.spec.dtype else typed.spec.with_dtype(g.dtype))


def cached_grad(x: DistTensor, axes: Axes, g: Tensor) -> DistTensor:
    """One wrapper per gradient tensor: ``p.grad is p.grad``. It knows whose gradient it is."""
    held = x._grad
    if held is not None and held.local is g:
        return held
    grad = given(x, axes, g)
    if grad.local is not g:
        return grad
    grad._owner = weakref.ref(x)
    x._grad = grad
    return grad


def owner_of(g: DistTensor) -> DistTensor | None:
    """The leaf that has ``g`` as its gradient now, or None."""
    x = g._owner() if g._owner is not None else None
    return x if x is not None and x._grad is g and get_grad(x) is g else None


def settled(x: DistTensor, g: DistTensor, total: Tensor) -> None:
    """``g``, the pending gradient of ``x``, has been reduced to ``total``: the same value, in the
    same object."""
    layout = g.spec.layout
    for _, leaf in uses(x):
        leaf.grad = None
    g.local, g.spec = total, g.spec.with_layout(Layout(layout.dims, (), layout.own))
    x.local.grad = total


def set_grad(x: DistTensor, value: Any) -> None:
    """None, or a gradient of x's shape: a DistTensor (pending reductions stay pending) or a plain,
    global tensor."""
    if x._twin is not None:
        x._twin.drop()
    if value is None:
        if x._aliases is None and not x._former:
            x.local.grad = None
        else:
            for _, leaf in uses(x):
                leaf.grad = None
        x._grad = None
        return
    if not isinstance(value, Tensor):
        raise TypeError(
            f"grad of {x.spec!r}: a tensor or None is expected, not {type(value).__name__}"
        )
    if tuple(value.shape) != tuple(x.spec.shape):
        raise RuntimeError(
            f"grad of {x.spec!r}: its global shape is {list(x.spec.shape)}, the gradient's "
            f"{list(value.shape)}"
        )
    if value.dtype != x.spec.dtype:
        raise RuntimeError(
            f"grad of {x.spec!r}: its dtype is {x.spec.dtype}, the gradient's {value.dtype}"
        )
    axes: Axes = ()
    if not x.is_initialized:
        return  # gradients are where the values are
    if isinstance(value, DistTensor):
        if value.spec.mesh is not x.spec.mesh:
            raise RuntimeError(
                f"grad of {x.spec!r} on {x.spec.mesh!r}: the gradient is on {value.spec.mesh!r}; "
                "reshard it first"
            )
        whole = x.spec.layout.varies()
        if (
            x.local.requires_grad and x.local.is_leaf and not x._hooked
        ):  # others have no place for a pending one
            axes = tuple(a for a, op in value.spec.layout.partial if op == "sum" and a not in whole)
        local = resharded(value, grad_spec(x, axes).with_dtype(value.spec.dtype)).local
    else:
        spec = grad_spec(x, ())
        local = reshard.run(value, spec.replicated(), spec)
    if not local.is_contiguous() and x.local.is_contiguous():  # a slice: a piece of its own
        local = local.contiguous()
    for _, leaf in uses(x):
        leaf.grad = None
    x._grad = value if isinstance(value, DistTensor) and local is value.local else None
    keep(x, axes, local)


def leaves_of(inputs: Any) -> list[Tensor] | None:
    """The C++ tensors that stand for ``inputs`` of a backward; with them those that make it run
    every transfer."""
    if inputs is None:
        return None
    out: list[Tensor] = token.anchors()
    for x in (inputs,) if isinstance(inputs, Tensor) else inputs:
        if not isinstance(x, DistTensor):
            out.append(x)
        elif x.is_initialized:
            out += [leaf for _, leaf in uses(x)]
            if x._twin is not None:
                out += [leaf for _, leaf in x._twin.grad_leaves()]
        elif not out:  # torch wants one at least, and no input lies on this rank
            out.append(token.leaf(x.spec.mesh.device, x.spec.dtype))
    return out


def seed(x: DistTensor, gradient: Any) -> Tensor:
    """The gradient of x's local that stands for ``gradient`` of the global tensor (None: 1 for a
    scalar)."""
    (typed, divide) = dual(Typed(x.spec))
    if gradient is None:
        if x.numel() != 1:
            raise RuntimeError(
                f"backward of {x.spec!r}: a gradient is created only for a tensor of one element"
            )
        return torch.full_like(x.local, 1 / divide)  # of size 0 outside the mesh
    if tuple(gradient.shape) != tuple(x.spec.shape):
        raise RuntimeError(
            f"backward of {x.spec!r}: its global shape is {list(x.spec.shape)}, the gradient's "
            f"{list(gradient.shape)}"
        )
    if not x.is_initialized:
        return torch.zeros_like(x.local)
    spec = typed.spec.with_dtype(gradient.dtype)
    if not isinstance(gradient, DistTensor):
        gradient = wrap(gradient.view_as(gradient), spec.replicated())
    g = gradient.moved_for(spec, typed.varying)
    return g if divide == 1.0 else g / divide


def backward(
    self: DistTensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """As Tensor.backward. A scalar that is Partial(sum) needs no reduction to be differentiated."""
    layout = self.spec.layout
    if (
        gradient is not None
        or layout.sharded
        or not self.is_initialized
        or any(op != "sum" for _, op in layout.partial)
    ):
        gradient = seed(self, gradient)
    run_backward([self.local], [gradient], retain_graph, create_graph, leaves_of(inputs))


def run_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward on locals. After one that ends with an error, whoever follows it puts
    things in order."""
    try:
        torch.autograd.backward(roots, grads, retain_graph, create_graph, inputs=inputs)
    except BaseException:
        for run in AFTER_FAILURE:
            run()
        raise


def autograd_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    """torch.autograd.backward over DistTensors (and plain tensors beside them)."""
    outs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    seeds = grad_tensors if grad_tensors is not None else grad_variables
    seeds = (seeds,) * len(outs) if seeds is None or isinstance(seeds, Tensor) else tuple(seeds)
    ends = [
        (o.local, seed(o, s)) if isinstance(o, DistTensor) else (o, s)
        for o, s in zip(outs, seeds, strict=True)
    ]
    run_backward(
        [o for o, _ in ends],
        [s for _, s in ends],
        retain_graph,
        create_graph,
        leaves_of(inputs),
    )


def autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None, is_grads_batched: bool = False,
    materialize_grads: bool = False, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """torch.autograd.grad over DistTensors (and plain tensors beside them)."""
    outs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    ins = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    seeds = (
        (grad_outputs,)
        if grad_outputs is None or isinstance(grad_outputs, Tensor)
        else tuple(grad_outputs)
    )
    seeds = seeds * len(outs) if len(seeds) == 1 else seeds
    if is_grads_batched:
        raise NotImplementedError(
            "torch.autograd.grad of DistTensors: is_grads_batched is not supported; loop over the "
            "batch"
        )
    ends, starts, owners = [], [], []
    for out, s in zip(outs, seeds, strict=True):
        ends.append((out.local, seed(out, s)) if isinstance(out, DistTensor) else (out, s))
    for i, x in enumerate(ins):
        if isinstance(x, DistTensor) and not x.is_initialized:
            continue
        if isinstance(x, DistTensor) and x._twin is not None:
            raise NotImplementedError(
                f"torch.autograd.grad of {x.spec!r}: under shard_data_parallel gradients are "
                "reduced into p.grad; call backward()"
            )
        ways = uses(x) if isinstance(x, DistTensor) else [((), x)]
        for axes, leaf in ways:
            starts.append(leaf)
            owners.append((i, axes))
    anchors = token.anchors()
    found: Sequence[Any] = ()
    if starts or anchors:
        found = torch.autograd.grad(
            [o for o, _ in ends],
            starts + anchors,
            [s for _, s in ends],
            retain_graph,
            create_graph,
            allow_unused=True,
        )[: len(starts)]
    result: list[Any] = []
    for i, x in enumerate(ins):
        if isinstance(x, DistTensor) and not x.is_initialized:
            spec = grad_spec(x, ())
            result.append(wrap(token.blank(spec.mesh.device), spec))
            continue
        pieces = [
            (axes, g)
            for (j, axes), g in zip(owners, found, strict=True)
            if j == i and g is not None
        ]
        if pieces:
            if isinstance(x, DistTensor):
                axes, g = joined(x, pieces)
                result.append(given(x, axes, g))
            else:
                result.append(pieces[0][1])
        elif materialize_grads:
            result.append(torch.zeros_like(x))
        elif allow_unused:
            result.append(None)
        else:
            raise RuntimeError(
                f"torch.autograd.grad: input {i} was not used in the graph of the outputs; pass "
                "allow_unused=True if that is meant"
            )
    return tuple(result)


# Attributes and methods of DistTensor -------------------------------------------------------------


def requires_grad_(self: DistTensor, requires_grad: bool = True) -> DistTensor:
    if not self.local.is_leaf and not requires_grad:
        raise RuntimeError(
            "only the requires_grad flag of leaves can be switched off; use detach()"
        )
    if not self.is_initialized:
        if requires_grad is not self.local.requires_grad:
            _outside_requires(self, requires_grad)
        return self
    for _, leaf in uses(self) if self.local.is_leaf else [((), self.local)]:
        leaf.requires_grad_(requires_grad)
    if requires_grad:
        whole_grad(self.local, self.spec)
    return self


def _outside_requires(x: DistTensor, flag: bool) -> None:
    """The ghost of a leaf that requires grad, or of one that does not."""
    device = x.spec.mesh.device
    token.remade[0] += 1
    x.local = token.leaf(device, x.spec.dtype) if flag else token.blank(device)


def _shared(x: DistTensor, local: Tensor) -> DistTensor:
    """A DistTensor like x, of ``local``, which shares x's memory."""
    out = wrap(local, x.spec)
    if x._copied:
        view_copies.inherit(out, x)
    return out


def detach(self: DistTensor) -> DistTensor:
    return _shared(self, self.local.detach())


def detach_(self: DistTensor) -> DistTensor:
    if self.is_initialized:
        self.local.detach_()
    else:
        _outside_requires(self, False)
    self._aliases, self._origin = None, None
    return self


def retain_grad(self: DistTensor) -> None:
    if self.local.is_leaf:
        self.local.retain_grad()  # nothing to do, or torch's error
        return
    if not self.is_initialized:
        return
    retire(self)
    for _, way in uses(self):
        way.retain_grad()


def get_data(self: DistTensor) -> DistTensor:
    return _shared(self, self.local.data if self._twin is None else self._twin.data())


def set_data(self: DistTensor, value: Any) -> None:
    """``x.data = value``: x takes value's piece and layout, its uses included."""
    if not isinstance(value, DistTensor):
        raise TypeError(
            f"data of {self.spec!r}: a DistTensor is expected; use shard_tensor(value, mesh, "
            "placements)"
        )
    if self._twin is not None:
        if value.spec is not self.spec:
            raise RuntimeError(
                f"data of {self.spec!r}: under shard_data_parallel it stays as it is, and the "
                f"value is {value.spec!r}. Change the dtype or the layout of a module before it is "
                "sharded"
            )
        self._twin.renew()
    if not self.is_initialized:
        _outside_requires(self, self.local.requires_grad)
    elif value.is_initialized:
        for _, leaf in uses(self):
            leaf.data = value.local.data
    if self._hooked:
        self._aliases = None  # in the graph, of the old value
    if value.spec is not self.spec:
        self.spec = value.spec
        self._grad = None
        with no_torch_function():
            Tensor.data.__set__(self, wrap_proto(value.spec))  # type: ignore[attr-defined]


def become(x: DistTensor, value: DistTensor) -> DistTensor:
    """x is ``value`` from now on: what an in-place change of shape does."""
    if x.local.requires_grad and x.local.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            f"{x.spec!r} is a leaf that requires grad: it cannot be changed in place"
        )
    token.remade[0] += 1
    x.local, x.spec = value.local, value.spec
    x._aliases, x._origin, x._grad = None, value._origin, None
    with no_torch_function():
        Tensor.data.__set__(x, wrap_proto(value.spec))  # type: ignore[attr-defined]
    return x


def wrap_proto(spec: DistSpec) -> Tensor:
    return make_subclass(DistTensor, spec.meta_tensor, False)


def register_hook(self: DistTensor, hook: Callable[[Any], Any]) -> Any:
    """The hook gets the gradient as a DistTensor and may give another one, as for a plain tensor.

    On a leaf it sees the whole gradient: uses from now on reduce it in the backward.
    """

    def on(axes: Axes) -> Callable[[Tensor], Any]:
        flipped, divided = dual(Typed(self.spec, axes))
        scale = 1.0 if self.local.is_leaf else divided  # of a pending average

        def local_hook(g: Tensor) -> Any:
            typed = flipped.spec.with_dtype(g.dtype)
            out = hook(wrap(g if scale == 1.0 else g * scale, typed))
            if out is None:
                return None
            if not isinstance(out, DistTensor):
                out = wrap(reshard.run(out, typed.replicated(), typed), typed)
            local = resharded(out, typed).local
            return local if scale == 1.0 else local / scale

        return local_hook

    if not self.is_initialized and self.local.requires_grad:
        return Handles([])  # the gradient does not come here
    if self._twin is not None:
        raise RuntimeError(
            f"register_hook on {self.spec!r}: under shard_data_parallel the gradient collects on a "
            "copy that comes and goes. register_post_accumulate_grad_hook is called when the "
            "parameter has its gradient; to change it, change p.grad there"
        )
    retire(self)
    self._hooked = self.local.is_leaf
    return Handles([way.register_hook(on(axes)) for axes, way in uses(self)])


class Handles:
    """What removes a hook again, from all it was put on."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def register_post_accumulate_grad_hook(self: DistTensor, hook: Callable[[Any], Any]) -> Any:
    """The hook is called with this leaf once per backward, when all its uses have their
    gradient."""
    if not self.local.is_leaf:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    if not self.is_initialized:
        return Handles([])
    if self._twin is not None:
        handle = RemovableHandle(self._twin.hooks)
        self._twin.hooks[handle.id] = hook
        return handle
    retire(self)
    self._hooked = True
    waiting: list[bool] = []

    def done() -> None:
        waiting.clear()
        hook(self)

    def on(_: Tensor) -> None:
        if not waiting:
            waiting.append(True)
            after_backward(done)

    return Handles([leaf.register_post_accumulate_grad_hook(on) for _, leaf in uses(self)])
