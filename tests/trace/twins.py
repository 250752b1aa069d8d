"""Twins: one program run call by call and as a replay, which must agree in every bit.

``agree(make, *batches)`` builds the same module or function twice, runs both on each batch, forward
and backward, and compares results, placements, gradients, what was communicated, random numbers and
the state that is left behind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import disttensor as dt
from disttensor import DistTensor
from disttensor.pytree import collect
from disttensor.random import counter

Around = Callable[[], AbstractContextManager[Any]]


def bits(x: Any) -> Any:
    """Spec, flags and bytes of a tensor."""
    if x is None:
        return None
    local = x.local if isinstance(x, DistTensor) else x
    data = local.detach().contiguous()
    raw = data.flatten().view(torch.uint8).tolist() if data.numel() else ()
    return (
        repr(x.spec) if isinstance(x, DistTensor) else tuple(x.shape), local.requires_grad,
        local.is_leaf, data.dtype, raw,
    )  # fmt: skip


def sent(log: Any) -> list[Any]:
    return [(r.kind, r.axis, r.bytes, r.phase, r.shape, r.dtype) for r in log]


def one(forward: Any, leaves: Sequence[Any], batch: Any, around: Around, backward: bool) -> Any:
    """What a step gives: all that can be compared."""
    named = isinstance(batch[-1], dict)
    args, kwargs = (batch[:-1], batch[-1]) if named else (batch, {})
    dt.manual_seed(3)
    torch.manual_seed(3)
    for leaf in leaves:
        leaf.grad = None
    with dt.debugging.record_comms() as log, around():
        out = forward(*args, **kwargs)
        tensors: list[Any] = collect(out, [])
        if backward:
            total: Any = sum((t.float() * t.float()).sum() for t in tensors if t.requires_grad)
            if isinstance(total, Tensor):
                total.backward()
        given = collect((args, kwargs), [])
        grads = [leaf.grad for leaf in (*leaves, *given) if leaf.is_leaf]
    values = [bits(t) for t in (*tensors, *grads, *collect((args, kwargs), []))]
    return values, sent(log), counter.get_state(), torch.get_rng_state().tolist(), str(type(out))


def agree(
    make: Callable[[], Any], *batches: Any, around: Around = nullcontext, backward: bool = True,
    replays: int | None = None, steps: Sequence[Callable[[Any], Any]] = (),
    through: Callable[[Any], Any] = dt.replay,
) -> Any:  # fmt: skip
    """The replayed twin. A batch is what makes the arguments anew: ``lambda: (x,)``, or with
    keywords ``lambda: (x, {"mask": m})``; ``steps[i]`` is done to both before batch i.
    ``replays``: how many of the calls are to be replays; None: all but the first; -1:
    any number. ``through``: what replays, or compiles, a twin."""
    slow, fast = make(), make()
    fast = through(fast)
    forward = fast.forward if isinstance(fast, nn.Module) else fast
    for i, batch in enumerate(batches):
        for twin in (slow, fast):
            if i < len(steps) and steps[i] is not None:
                steps[i](twin)
        found = []
        for twin in (slow, fast):
            leaves = [*twin.parameters()] if isinstance(twin, nn.Module) else []
            found.append(one(twin, leaves, batch(), around, backward))
            if isinstance(twin, nn.Module):
                found[-1] += ([bits(b) for b in twin.buffers()],)
        for name, a, b in zip(
            ("values", "sent", "random", "torch's generator", "class", "buffers"),
            *found,
            strict=False,
        ):
            assert a == b, f"call {i}: {name}\n{b}\nin place of\n{a}\n{forward.programs}"
    expected = len(batches) - 1 if replays is None else replays
    assert replays == -1 or forward.replays == expected, (forward.replays, forward.why())
    return fast


def twice(module: nn.Module) -> Callable[[], nn.Module]:
    """Copies of one module."""
    return lambda: copy.deepcopy(module)
