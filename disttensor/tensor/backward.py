"""backward and torch.autograd.grad: run torch's own functions on the locals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from disttensor import callbacks
from disttensor.autograd import token
from disttensor.autograd.accumulation import RETURNED, backward_context, current_context
from disttensor.autograd.grad_types import GradType, gradient_type
from disttensor.autograd.joined_backward import join_present_backward
from disttensor.autograd.starts import mark_starts
from disttensor.autograd.tie import TieOutputs
from disttensor.cache import cached
from disttensor.comm import compare_programs, lone_failure
from disttensor.comm.process_group import world
from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.graph_nodes import node_of, nodes_of
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.grad import as_gradient, combine_gradients, grad_spec, update_shown
from disttensor.tensor.grad_slot import GradCollector, collector_of
from disttensor.tensor.gradient_edge import TensorNode, tensor_node
from disttensor.tensor.reshard import MICRO_BATCH, resharded, resharded_local
from disttensor.tensor.uses import leaves_of
from disttensor.torch_private import current_backward
from disttensor.torch_private import run_backward as engine_backward

Tensor = torch.Tensor

# Full tensor argument of a custom autograd function that runs -> the DistTensor that it was made
# from; set by disttensor.patches.autograd_function
DIST_ARGUMENTS: ContextVar[Mapping[Tensor, MeshTensor]] = ContextVar("behind", default={})  # noqa: B039


class Backward(MeshTensor):
    def backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Does the same as Tensor.backward. A scalar that is Partial(sum) is differentiated without
        a reduction."""
        spec = self.spec
        compare_programs.record_entry("backward", spec)
        if gradient is not None or not starts_from_one(spec):
            gradient = initial_grad(self, gradient)
        run_backward([self.local], [gradient], retain_graph, create_graph, inputs)


@cached(1024)
def starts_from_one(spec: DistSpec) -> bool:
    """Returns True if a gradient of 1, torch's default for a scalar, is right for the local."""
    layout = spec.layout
    whole = not layout.sharded and all(op == "sum" for _, op in layout.partial)
    return whole and spec.mesh.coordinate is not None


def run_backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Runs torch.autograd.backward on locals; ``inputs`` may be DistTensors."""
    if create_graph or MICRO_BATCH.get() is not None:
        _check_crossing(roots, keeps=create_graph)
    inputs = None if inputs is None else _leaves_of(inputs)
    _run_engine(torch.autograd.backward, roots, grads, retain_graph, create_graph, None, inputs)


def run_given(
    roots: Sequence[Any], grads: Sequence[Tensor], retain_graph: bool, inputs: Sequence[Any] = ()
) -> None:
    """Runs a backward from regular tensors, or edges of the graph, which all have a gradient."""
    _run_engine(engine_backward, tuple(roots), tuple(grads), retain_graph, False, tuple(inputs))


def _run_engine(engine: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
    """Starts autograd by ``engine``; after an error, runs ``callbacks.after_backward_error``."""
    mark_starts((roots,) if isinstance(roots, Tensor) else roots)
    try:
        with nullcontext() if current_backward() == -1 else join_present_backward():
            return engine(roots, *args, **kwargs)
    except BaseException as error:
        if current_backward() == -1:
            lone_failure.note_failed_backward(error)
            for run in callbacks.after_backward_error:
                run()
        raise


def _leaves_of(inputs: Any) -> list[Any]:
    """Returns the locals of the ``inputs`` of a backward, and the anchors, which make it run every
    transfer."""
    out: list[Any] = token.anchors()
    for x in map(_meant, (inputs,) if isinstance(inputs, Tensor) else inputs):
        if type(x) is TensorNode:  # autograd accumulates on leaves only
            out += [edge for _, edge in x.places]
        elif not isinstance(x, MeshTensor):
            out.append(x)
        elif x.is_initialized:
            collector = collector_of(x)
            out += [leaf for _, leaf in leaves_of(x)]
            out += [leaf for _, leaf in x._grad_slot.older_leaves()] if x._grad_slot else []
            out += [leaf for _, leaf in (collector.grad_leaves() if collector is not None else ())]
        elif not out:  # torch requires at least one input, and none lies on this rank
            out.append(token.leaf(x.spec.mesh.device, x.spec.dtype))
    return out


def _meant(x: Any) -> Any:
    """Returns the value for which the user gives ``x`` to autograd: the DistTensor of a full
    argument or of an edge of a leaf, or the node of another edge."""
    node = tensor_node(x)
    if node is not None:
        return node if node.places else node.of
    return DIST_ARGUMENTS.get().get(x, x) if isinstance(x, Tensor) else x


def initial_grad(x: MeshTensor, gradient: Any) -> Tensor:
    """Returns the gradient of x's local for the ``gradient`` of the global tensor (None: 1 for a
    scalar)."""
    typed, divide = gradient_type(GradType(x.spec))
    if gradient is None:
        if x.spec.shape.numel() != 1:
            raise RuntimeError(
                f"backward of {x.spec!r}: a gradient is created only for a tensor of one element"
            )
        return torch.full_like(x.local, 1 / divide)  # of size 0 off the mesh
    if tuple(gradient.shape) != tuple(x.spec.shape):
        raise RuntimeError(
            f"backward of {x.spec!r}: its global shape is {list(x.spec.shape)}, the gradient's "
            f"{list(gradient.shape)}"
        )
    if not x.is_initialized:
        return torch.zeros_like(x.local)
    spec = typed.spec.with_dtype(gradient.dtype)
    if not isinstance(gradient, MeshTensor):
        gradient = x.like(gradient.view_as(gradient), spec.replicated())
    g = resharded_local(gradient, spec, typed.varying)
    return g if divide == 1.0 else g / divide


def _roots(outputs: Any, grads: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the locals of ``outputs`` and their gradients. Ignores further ones, as torch."""
    outs = (outputs,) if isinstance(outputs, (Tensor, GradientEdge)) else tuple(outputs)
    every = (None,) * len(outs) if grads is None else grads
    given = (every,) if isinstance(every, Tensor) else tuple(every)
    if len(given) < len(outs):
        raise RuntimeError(f"got {len(outs)} tensors and {len(given)} gradients")
    roots: list[Any] = []
    initial_grads: list[Tensor | None] = []
    for o, g in zip(outs, given, strict=False):
        node = tensor_node(o)
        x = o if node is None else node.of
        local = x.local if isinstance(x, MeshTensor) else x
        roots.append(node.places[0][1] if node is not None and node.places else local)
        initial_grads.append(initial_grad(x, g) if isinstance(x, MeshTensor) else g)
    return roots, initial_grads


def autograd_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    """Runs torch.autograd.backward on DistTensors and regular tensors."""
    roots, grads = _roots(tensors, grad_tensors if grad_tensors is not None else grad_variables)
    run_backward(roots, grads, retain_graph, create_graph, inputs)


def autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, allow_unused: bool | None = None, is_grads_batched: bool = False,
    materialize_grads: bool = False, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Runs torch.autograd.grad on DistTensors and regular tensors."""
    if is_grads_batched:
        given = (grad_outputs,) if isinstance(grad_outputs, Tensor) else tuple(grad_outputs)
        n = next(len(g) for g in given if g is not None)
        each = [
            autograd_grad(
                outputs, inputs, [None if g is None else g[i] for g in given],
                i < n - 1 or retain_graph or create_graph, create_graph, allow_unused,
                materialize_grads=materialize_grads,
            )
            for i in range(n)
        ]  # fmt: skip
        return tuple(None if g[0] is None else torch.stack(g) for g in zip(*each, strict=True))
    roots, grads = _roots(outputs, grad_outputs)
    _check_crossing(roots)
    given_inputs = (inputs,) if isinstance(inputs, (Tensor, GradientEdge)) else tuple(inputs)
    ins = [_meant(x) for x in given_inputs]
    ways = [_tensors_in_graph(x) for x in ins]
    leaves = [leaf for uses in ways for _, _, leaf in uses]
    wanted = leaves + token.anchors()
    given = ()
    # Inside a backward, this call is part of that backward, which adds gradients up.
    context = RETURNED if current_backward() == -1 else current_context()
    if wanted:
        with backward_context(context):
            given = _run_engine(
                torch.autograd.grad, roots, wanted, grads, retain_graph, create_graph,
                allow_unused=True,
            )  # fmt: skip
    # With create_graph: tokens of the transfers that this backward ran here.
    tokens = [g for g in given[len(leaves) :] if g is not None and g.requires_grad]

    def tied(g: Tensor) -> Tensor:
        return TieOutputs.apply(1, g, *tokens)[0] if tokens else g

    found = iter(given)
    result: list[Any] = []
    for i, (place, uses) in enumerate(zip(ins, ways, strict=True)):
        x = place.of if type(place) is TensorNode else place
        pieces = [(of, axes, tied(g)) for of, axes, _ in uses if (g := next(found)) is not None]
        if isinstance(x, MeshTensor) and not x.is_initialized:
            spec = grad_spec(x, ())
            device = spec.mesh.device
            local = (
                tied(token.no_source_token(device)) if create_graph else token.no_grad_token(device)
            )
            result.append(x.like(local, spec))
        elif pieces:
            result.append(_gradient(x, pieces) if isinstance(x, MeshTensor) else pieces[0][2])
        elif materialize_grads:
            if isinstance(given_inputs[i], GradientEdge):
                raise RuntimeError(
                    "materialize_grads cannot be used when the given input is a GradientEdge"
                )
            result.append(torch.zeros_like(x))
        elif allow_unused:
            result.append(None)
        else:
            raise RuntimeError(
                f"torch.autograd.grad: input {i} was not used in the graph of the outputs; pass "
                "allow_unused=True if that is meant"
            )
    for i, (x, whole, g) in enumerate(zip(ins, given_inputs, result, strict=True)):
        if x is not whole and isinstance(whole, Tensor) and isinstance(g, MeshTensor):
            result[i] = resharded_local(g, g.spec.replicated(), ())
    return tuple(result)


def wrap_run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function of torch that starts autograd: torch dispatches no call of edges alone."""

    @wraps(original)
    def run_backward(
        roots: Any, grads: Any, keep: bool, create: bool, inputs: Any = (), *rest: Any, **named: Any
    ) -> Any:  # fmt: skip
        if not any(map(tensor_node, (*roots, *inputs))):
            result = original(roots, grads, keep, create, inputs, *rest, **named)
            if current_backward() == -1:
                update_shown()
            return result
        if named.get("accumulate_grad"):
            return autograd_backward(roots, grads, keep, create, inputs=inputs or None)
        return autograd_grad(roots, inputs, grads, keep, create, *rest)

    return run_backward


def _gradient(x: MeshTensor, pieces: list[tuple[GradCollector | None, Axes, Tensor]]) -> MeshTensor:
    """Returns the gradient of x from the gradients of its ``_tensors_in_graph``, in a layout that
    ranks off the mesh know: they do not see the uses, which decide how the gradient is pending."""
    parts = []
    for owner in dict.fromkeys(of for of, _, _ in pieces):
        mine = [(axes, g) for of, axes, g in pieces if of is owner]
        if owner is not None:
            parts.append(owner.gradient(mine))
        elif (slot := x._grad_slot) is not None and slot.hooks is not None:
            parts.append(slot.hooks.run(mine))
        else:
            parts.append(as_gradient(x, *combine_gradients(x, mine)))
    grad: Any = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if x.spec.mesh.root.size == world()[1]:
        return grad
    return resharded(grad, grad_spec(x, ()).with_dtype(grad.spec.dtype))


def _check_crossing(roots: Sequence[Tensor], keeps: bool = False) -> None:
    """Raises NotImplementedError if a backward from here would send a gradient to another mesh that
    does not use it. This holds inside a step of a schedule and, with ``keeps``, for the graph of
    ``.grad``, which other meshes do not have."""
    in_schedule = MICRO_BATCH.get() is not None
    if not (in_schedule or keeps) or not token.anchors():
        return
    anchors = {node_of(anchor) for anchor in token.anchors()}
    if anchors.isdisjoint(nodes_of(roots)):
        return
    if in_schedule:
        raise NotImplementedError(
            "pipeline.run: the step computes gradients of a tensor from another mesh, before it "
            "has returned; in a schedule gradients go from stage to stage after that. Run the step "
            "without pipeline.run (and loss.backward() for each micro-batch), or differentiate "
            "within a stage, from tensors that are detached after the reshard"
        )
    raise NotImplementedError(
        "backward(create_graph=True) of a tensor that came from another mesh: gradients would be "
        "differentiated again through .grad, which other meshes do not have. Use "
        "torch.autograd.grad(loss, tensors, create_graph=True), which returns them on all ranks"
    )


def _tensors_in_graph(x: Any) -> list[tuple[GradCollector | None, Axes, Any]]:
    """Returns the tensors in autograd's graph that an input stands for, each with its collector;
    an empty list on a rank off its mesh. Leaves of an earlier layout raise an error if the graph
    has them."""
    if type(x) is TensorNode:
        return [(None, *place) for place in x.places]
    if not isinstance(x, MeshTensor):
        return [(None, (), x)]
    if not x.is_initialized:
        return []
    collector = collector_of(x)
    theirs = collector.grad_leaves() if collector is not None else []
    older = x._grad_slot.older_leaves() if x._grad_slot is not None else []
    own = [*leaves_of(x), *older]
    return [(of, *use) for of, uses in ((None, own), (collector, theirs)) for use in uses]
