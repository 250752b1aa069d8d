"""Reshards from one mesh to another: reduces pending sums if needed, and sends each rank only the
elements that it does not hold.

Only the steps on one mesh are collective. Sending returns immediately, receives are posted before
any send, and only the receiver waits, when it reads the result. cross_mesh_plan.py and routing.py
plan the messages.
"""

from __future__ import annotations

import torch

from disttensor.cache import cached
from disttensor.comm import p2p
from disttensor.comm.process_group import world
from disttensor.comm.work import Work, finished
from disttensor.core.placement import neutral_element
from disttensor.core.spec import DistSpec
from disttensor.observe import observers, run_step
from reshard import planner
from reshard.cross_mesh_plan import CrossMeshPlan, plan_between
from reshard.planner import Step
from reshard.registry import Axes, Tensor
from reshard.routing import Routes


def start(local: Tensor, src: DistSpec, dst: DistSpec, tag: int) -> Work[Tensor]:
    """Posts this rank's receives and sends. Every rank of both meshes makes the call; other ranks
    may make it.

    ``local`` is this rank's local of ``src``. It is never changed, and may be changed after the
    call: the result is a view of it only if no rank sends anything. ``tag``: ``p2p.next_tag()``,
    which every rank of the world must call. Not differentiable.
    """
    plan = plan_between(src, dst)
    if src.mesh.coordinate is not None:
        planner.check_local(local, src)
        local = planner.run(local, src, plan.before)
    elif dst.mesh.coordinate is None:
        return finished(_empty(dst))
    arrival = send_recv(local, plan, tag)
    if plan.after is dst or dst.mesh.coordinate is None:
        return arrival
    return Work(lambda: planner.run(arrival.wait(), plan.after, dst))


def post_early_receives(src: DistSpec, dst: DistSpec, tag: int) -> list[p2p.Early]:
    """Posts the receives of a later ``start`` with this tag, which may never be called. Returns the
    posted receives."""
    plan = plan_between(src, dst)
    routes = _routes(plan, world()[0])
    receives = [(sender, box.shape) for sender, box in routes.receives]
    return p2p.post_early_receives(receives, plan.after.dtype, plan.after.mesh.device, tag)


def send_recv(x: Tensor, plan: CrossMeshPlan, tag: int) -> Work[Tensor]:
    """Sends the messages of a plan: from the local of ``before`` to the local of ``after``."""
    routes, after = _routes(plan, world()[0]), plan.after
    source, target, kept = routes.source, routes.target, routes.kept
    dtype, device = after.dtype, after.mesh.device
    x = x.detach()
    sends = [(to, box.cut(x, source)) for to, box in routes.sends] if source else []
    receives = [(sender, box.shape) for sender, box in routes.receives]
    pending = p2p.transfer(sends, receives, dtype, device, tag, plan)
    place = after.mesh.coordinate
    if place is None:
        return finished(_empty(after))
    if target is None:
        return finished(fill(_empty(after), place, plan))
    if source and kept == target and not (plan.once or plan.routing.messages):
        whole = target.cut(x, source)
        return finished(whole)
    if len(pending) == 1 and routes.receives[0][1] == target:
        (message,) = pending
        return Work(lambda: fill(message.wait(), place, plan)) if plan.once else message
    out = torch.empty(target.shape, dtype=dtype, device=device)
    if source and kept:
        kept.cut(out, target).copy_(kept.cut(x, source))

    def assembled() -> Tensor:
        for message, (_, box) in zip(pending, routes.receives, strict=True):
            box.cut(out, target).copy_(message.wait())
        return fill(out, place, plan)

    return Work(assembled)


@cached(1024)
def _routes(plan: CrossMeshPlan, rank: int) -> Routes:
    return plan.routing.of(rank)


def _empty(spec: DistSpec) -> Tensor:
    return torch.empty(spec.local_shape, dtype=spec.dtype, device=spec.mesh.device)


def fill(x: Tensor, place: Axes, plan: CrossMeshPlan) -> Tensor:
    """Fills in the pending values that arrive at ``place``: the first rank of an axis has the
    value, the others have the neutral element. Of several axes the last one is reduced first."""
    for axis, op in plan.once:
        if place[axis]:
            x = torch.full_like(
                x, neutral_element(op, x.dtype), memory_format=torch.contiguous_format
            )
    return x


# Within one mesh or between two -------------------------------------------------------------------


def choose(src: DistSpec, dst: DistSpec) -> tuple[Step, ...]:
    """Returns the steps that ``reshard`` will take, without running them. Empty if nothing changes.

    Between two meshes one step is a "send_recv"; its ``bytes`` are the bytes of the rank that sends
    most. Raises ValueError for specs that do not fit.
    """
    return planner.choose(src, dst) if src.mesh is dst.mesh else _across(src, dst)


@cached(1024)
def _across(src: DistSpec, dst: DistSpec) -> tuple[Step, ...]:
    plan = plan_between(src, dst)
    before, after = plan.before, plan.after
    names = ("+".join(spec.mesh.dim_names) for spec in (src, dst))

    def move(x: Tensor, src: DistSpec, dst: DistSpec, axes: Axes) -> Tensor:
        return send_recv(x, plan, p2p.next_tag()).wait()

    step = Step("send_recv", " -> ".join(names), (), plan.most, before, after, move)
    return (*planner.choose(src, before), step, *planner.choose(after, dst))


def cost(src: DistSpec, dst: DistSpec) -> float:
    """Returns the bytes that one rank sends in the chosen steps."""
    return float(sum(step.bytes for step in choose(src, dst)))


def run(local: Tensor, src: DistSpec, dst: DistSpec) -> Tensor:
    """Returns this rank's local of ``dst``, from its local of ``src``. It is collective if a step
    is.

    Between two meshes every rank of the world makes the call. Not differentiable. ``local`` is
    never changed; if nothing is sent, the result may be ``local`` itself or a view of it. On ranks
    outside the mesh of ``dst`` the result is an empty tensor.
    """
    if observers:
        return run_step(_run, local, src, dst)
    return _run(local, src, dst)


def _run(local: Tensor, src: DistSpec, dst: DistSpec) -> Tensor:
    if src.mesh is dst.mesh:
        return planner.run(local, src, dst)
    return start(local, src, dst, p2p.next_tag()).wait()
