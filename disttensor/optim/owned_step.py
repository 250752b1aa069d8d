"""Owners: optimizers that need whole matrices (Muon, Shampoo, SOAP) run each of them on one rank.

    before the step   gradients, and values that are split, go to the owners
    the step          the optimizer of a rank has the matrices that the rank owns, as regular
                      parameters, and all parameters without an owner as they are
    after it          the new values go to the ranks that hold pieces of them

Each direction is one all-to-all for each bucket (``exchange``). Between steps the optimizer has the
parameters of the model, and the state of an owned parameter is a DistTensor on the mesh of its
owner alone. So checkpoints see which rank has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from disttensor import callbacks
from disttensor.checks import check_callable, check_type
from disttensor.comm.objects import run_on_all_ranks
from disttensor.core.layout import replicated
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.optim.exchange import Move, exchange
from disttensor.optim.independent import RefuseMixing, plain_numbers
from disttensor.optim.owners import (
    OWNERS,
    Owners,
    on_owner,
    owners_of,
    params_of,
    state_on_owner,
    state_to_bring,
)
from disttensor.pytree import collect, substitute
from disttensor.random import counter
from disttensor.random.draws import Seeded
from disttensor.random.philox import derive
from disttensor.tensor.dist_tensor import DistTensor, local_of, wrap
from disttensor.tensor.user_facts import pass_attributes

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer
CHECKED_STEPS = 3  # in which an optimizer that combines parameters is found
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
# A parameter, the mesh of its owner, and on the owner the whole parameter.
Owned = list[tuple[DistTensor, ProcessMesh, nn.Parameter | None]]


def is_matrix(p: Tensor) -> bool:
    return p.ndim >= 2


def own(optimizer: AnyOptimizer, choose: Callable[[Tensor], bool] = is_matrix) -> AnyOptimizer:
    """Lets one rank hold each chosen parameter whole while ``optimizer`` steps, and returns the
    optimizer.

    For optimizers that read whole matrices (``torch.optim.Muon``, Shampoo, SOAP, Adafactor).
    Without owners each rank gathers each matrix, and all compute the same. The chosen parameters
    are assigned to the ranks of their mesh by cost, once, on all ranks alike. Every rank calls
    ``step`` for the same parameters, as always. Everything else (gradients, clipping, loss
    scaling, parameter groups, ``state_dict``, checkpoints) is as without owners.

    Args:
        optimizer: any torch.optim.Optimizer that updates each parameter by its own gradient, value
            and state alone; another (LAMB, Prodigy) raises RuntimeError in its first three steps.
            Call ``own`` before a scheduler of torch is made for the optimizer.
        choose: returns True for a parameter that gets an owner. It must return the same on all
            ranks. Default: parameters of two or more dims. The others are updated as before.

    Raises TypeError for anything but an optimizer, or a ``choose`` that is not callable.

    >>> w = dt.ones(4, 3, mesh=mesh, requires_grad=True)
    >>> muon = dt.optim.own(torch.optim.Muon([w], lr=0.1, weight_decay=0.0))
    >>> w.square().sum().backward()
    >>> muon.step()
    >>> bool((w < 1).all())
    True
    """
    check_type("own: optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    check_callable("own: choose", choose, "a function of a parameter")
    if hasattr(optimizer, OWNERS):
        getattr(optimizer, OWNERS).choose = choose
        return optimizer
    setattr(optimizer, OWNERS, Owners(choose))
    hooked: Any = type(optimizer).step
    inner = hooked.__wrapped__ if getattr(hooked, "hooked", None) else hooked

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _step(self, inner, args, kwargs)

    optimizer.step = MethodType(  # type: ignore[method-assign]
        Optimizer.profile_hook_step(step), optimizer
    )
    optimizer.__reduce_ex__ = MethodType(_reduce, optimizer)  # type: ignore[method-assign]
    return optimizer


# Copies and pickles -------------------------------------------------------------------------------


def _reduce(optimizer: Optimizer, protocol: Any) -> Any:
    """Returns ``__reduce_ex__`` of an optimizer with owners. Torch's keeps no attributes, so a copy
    would have the states that are on the owners, and no owners."""
    reduced: Any = type(optimizer).__reduce_ex__(optimizer, protocol)
    make, args, *rest = reduced
    owners: Owners = getattr(optimizer, OWNERS)
    ranks = [(p, mesh.ranks[0]) for p, mesh in owners.of.values()]
    return _remade, (make, args, owners.choose, ranks, owners.steps), *rest


def _remade(
    make: Callable[..., Optimizer], args: Any, choose: Callable[[Tensor], bool],
    ranks: list[tuple[DistTensor, int]], steps: int,
) -> Optimizer:  # fmt: skip
    optimizer = own(make(*args), choose)
    owners: Owners = getattr(optimizer, OWNERS)
    owners.steps = steps
    for p, rank in ranks:
        owners.give(p, rank)
    return optimizer


# The step -----------------------------------------------------------------------------------------


def _step(optimizer: Optimizer, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs the step of the optimizer's class with the owned parameters of this rank."""
    args, kwargs = _closure_first(args, kwargs)
    for run in callbacks.before_grad_read:
        run(params_of(optimizer))
    with torch.no_grad():
        owned = _arrive(optimizer)

        with _replaced(optimizer, owned), _seeded(optimizer, owned):
            call = partial(inner, optimizer, *args, **kwargs)
            checks = getattr(optimizer, OWNERS).steps <= CHECKED_STEPS
            result = _run_checked(call, optimizer, owned) if checks else call()
        moves = [
            Move(q, on_owner(p.spec, owner), p.spec.on_root(), p.spec.mesh.root)
            for p, owner, q in owned
        ]
        for (p, _, _), piece in zip(owned, exchange(moves), strict=True):
            p.copy_(wrap(piece, p.spec))
    return result


def _closure_first(args: Any, kwargs: Any) -> Any:
    """Calls the closure of a step, if there is one, and returns the arguments with a closure that
    gives its result: owned gradients are sent once in a step."""
    named = dict(zip(("closure",), args, strict=False)) | kwargs
    if not callable(named.get("closure")):
        return args, kwargs
    with torch.enable_grad():
        results = [named["closure"]()]

    def closure() -> Any:
        if not results:
            raise RuntimeError(
                "an optimizer with owners calls its closure twice in a step (as LBFGS does), and "
                "gradients are sent to the owners once. Use it without dt.optim.own"
            )
        return results.pop()

    return args[1:], {**kwargs, "closure": closure}


def _arrive(optimizer: Optimizer) -> Owned:
    """Returns the parameters that this step changes, their owners, and on an owner the whole
    parameter with its gradient. Brings state that is on the mesh of its parameter to the owner."""
    here = set(map(id, params_of(optimizer)))
    moves: list[Move] = []
    found: list[tuple[DistTensor, ProcessMesh, list[DistTensor]]] = []
    for key, (p, owner) in owners_of(optimizer).items():
        if key not in here or not p.is_initialized or p.grad is None:
            continue
        state = state_to_bring(optimizer, p)
        for x in (p, p.grad, *state):
            spec = x.spec.on_root()
            moves.append(Move(x.local, spec, on_owner(spec, owner), spec.mesh))
        found.append((p, owner, state))
    arrived = iter(exchange(moves))
    owned: Owned = []
    for p, owner, state in found:
        value, grad = next(arrived), next(arrived)
        brought = {id(x): next(arrived) for x in state}
        if p in optimizer.state:
            optimizer.state[p] = _on_owner(optimizer.state[p], owner, brought)
        q = None
        if owner.coordinate is not None:
            q = nn.Parameter(value, p.requires_grad)
            if grad.dtype is not value.dtype:
                q.grad_dtype = grad.dtype
            q.grad = grad
            pass_attributes(p, q)
        owned.append((p, owner, q))
    return owned


@contextmanager
def _replaced(optimizer: Optimizer, owned: Owned) -> Iterator[None]:
    """Gives the optimizer the parameters that this rank owns in the place of the model's, with
    their states as regular tensors, and takes them back."""
    replacements = {id(p): q for p, _, q in owned}
    before = [group["params"] for group in optimizer.param_groups]
    states = [(p, owner, q) for p, owner, q in owned if q is not None]
    for p, _, q in states:
        if p in optimizer.state:
            entries = optimizer.state.pop(p)
            optimizer.state[q] = substitute(entries, lambda x: x.local, DistTensor)
    for group in optimizer.param_groups:
        listed = [replacements.get(id(p), p) for p in group["params"]]
        group["params"] = [p for p in listed if p is not None]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        for p, owner, q in states:
            if q in optimizer.state:
                optimizer.state[p] = _on_owner(optimizer.state.pop(q), owner, {})


def _on_owner(state: Any, owner: ProcessMesh, brought: dict[int, Tensor]) -> Any:
    """Returns the state of a parameter with its tensors on the mesh of the owner. ``brought``: id
    of a DistTensor that was elsewhere -> its local there. Numbers, as the step, stay."""

    def placed(x: Tensor) -> Tensor:
        if id(x) not in brought and (isinstance(x, DistTensor) or not x.ndim):
            return x
        spec = DistSpec(owner, replicated(x.ndim), x.shape, x.dtype)
        return state_on_owner(brought.get(id(x), x), spec)

    return substitute(state, placed)


def _run_checked(call: Callable[[], Any], optimizer: Optimizer, owned: Owned) -> Any:
    """Returns ``call()``. Raises RuntimeError on all ranks if one of them combines parameters."""
    mine = [(p, _tensors(optimizer, q)) for p, _, q in owned if q is not None]
    ours = {id(q) for _, _, q in owned}
    rest = [p for p in params_of(optimizer) if id(p) not in ours]
    for mesh in dict.fromkeys(p.spec.mesh.root for p, _, _ in owned):
        group = mesh.group(range(mesh.ndim), "owners")
        call = partial(run_on_all_ranks, "a step with owners", group, call, seen=False)
    try:
        with RefuseMixing(mine, [x for p in rest for x in _tensors(optimizer, p)]):
            return call()
    finally:
        optimizer.state.update({p: plain_numbers(x) for p, x in optimizer.state.items()})
        for options in optimizer.param_groups:
            options.update({k: plain_numbers(x) for k, x in options.items() if k != "params"})


def _tensors(optimizer: Optimizer, p: Tensor) -> list[Tensor]:
    """Returns the locals of a parameter, its gradient and state."""
    held = collect([p, p.grad, optimizer.state.get(p)], [], Tensor)
    return list(map(local_of, held))


@contextmanager
def _seeded(optimizer: Optimizer, owned: Owned) -> Iterator[None]:
    """Seeds torch's generators for a step, and restores them: each rank draws for matrices of its
    own, and the program goes on with equal generators on all ranks."""
    owners: Owners = getattr(optimizer, OWNERS)
    owners.steps += 1
    devices = {device for p, _, _ in owned for device in (torch.device("cpu"), p.spec.mesh.device)}
    with ExitStack() as around:
        for device in sorted(devices, key=str):
            around.enter_context(Seeded(derive(*counter.get_state(), owners.steps), device))
        yield
