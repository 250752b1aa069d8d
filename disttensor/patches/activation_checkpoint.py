"""torch.utils.checkpoint (use_reentrant=False) on DistTensors.

The patch wraps the generator that torch runs around the forward of a region. All checkpoints use
it, also a function ``checkpoint`` that was imported before disttensor. The public way, a
``context_fn`` for each call, would need a wrapper of ``checkpoint``, which such imports, a region
with ``debug=True`` and torch.compile (it compares torch's function by identity) would bypass.

A region keeps its inputs, and torch saves each tensor through the hooks of the enclosing region, so
that nested regions free and restore it. For a DistTensor it would save the wrapper, which is in no
graph: the restored tensor would not require grad. It gets the local instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from disttensor import callbacks
from disttensor.autograd.activation_checkpoint import Run
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.uses import derivation_from_leaf, with_derivation
from disttensor.tensor.versions import version
from ops.nn import attention_policy

Generator = Callable[..., Iterator[None]]


def _saved(x: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Returns (the value that torch keeps of an input, a function that restores the input). A leaf
    is kept as the same object, because it collects its gradients. Another tensor is derived in the
    recomputation as in the forward, if this keeps nothing alive but a leaf."""
    if not isinstance(x, DistTensor):
        return x, None
    local, spec, derivation = x.local, x.spec, derivation_from_leaf(x)
    if not (local.is_leaf and local.requires_grad):
        return local, lambda restored: with_derivation(wrap(restored, spec), derivation)
    made_at = version(local)

    def same(_: Any) -> Any:
        if version(local) != made_at:
            raise RuntimeError(
                f"{spec!r}, an argument of a checkpointed region, has been modified by an inplace "
                "operation since the forward of the region, which the backward runs again. Write "
                "to it after the backward, or give the region a clone()"
            )
        return x

    return None, same


def wrap_generator(original: Generator) -> Generator:
    def generator(fn: Any, *given: Any, **options: Any) -> Iterator[None]:
        notes: list[Any] = []
        # the pairs come first since torch 2.14, and at the end before
        is_first = bool(given) and isinstance(given[0], tuple)
        pairs = [_saved(x) for x in (given[0] if is_first else given)]
        inside = callbacks.recompute_context.get()
        policy = attention_policy.policy.current()
        around = [*callbacks.recompute_contexts().values(), *([inside] if inside else [])]
        kept, remakes = tuple(k for k, _ in pairs), [r for _, r in pairs]

        def recompute(*args: Any, **kwargs: Any) -> Any:
            ours = remakes[len(remakes) - len(args) :]
            with ExitStack() as stack:
                stack.enter_context(Run(notes, is_recompute=True))
                for set_up in around:
                    stack.enter_context(set_up())
                stack.enter_context(attention_policy.policy(policy))
                return fn(
                    *[a if r is None else r(a) for a, r in zip(args, ours, strict=True)], **kwargs
                )

        with Run(notes, is_recompute=False):
            yield from original(recompute, *((kept, *given[1:]) if is_first else kept), **options)

    return generator
