"""Embedding: the ids' dims and the embedding dim pass through; a split vocabulary gives P(sum).

Each rank looks up the ids that it owns and returns zeros for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ops.dims import letters_of
from ops.empty_pieces import is_empty, zeros_if_empty
from ops.factors import Arg, Factors, Letter, NoRule
from ops.indexing.vocab_shard import Owned
from ops.registry import rule

Tensor = torch.Tensor


def _local(call: Any) -> Callable[..., Tensor]:
    run = _lookup(call)
    if not is_empty(call):
        return run
    kept = tuple(slice(0, n) for n in call.outputs[0].local_shape)

    def embedding(input: Tensor, weight: Tensor, *more: Any, **words: Any) -> Tensor:
        # torch's backward without ids is not differentiable: one id is looked up, and its row
        # removed
        ids = input.new_zeros([max(n, 1) for n in input.shape]) if not input.numel() else input
        return run(ids, weight, *more, **words)[kept]

    return embedding


def _lookup(call: Any) -> Callable[..., Tensor]:
    if not call.axes("v"):
        return lambda input, weight, padding_idx=None, *_, **__: F.embedding(
            input, weight, padding_idx
        )
    owned = Owned.of(call.inputs[1], 0)

    def embedding(
        input: Tensor, weight: Tensor, padding_idx: Any = None, *more: Any, **words: Any
    ) -> Tensor:
        here, others = owned.find(input)
        if padding_idx is not None:
            padding_idx = padding_idx % owned.total - owned.offset
            if not 0 <= padding_idx < owned.size:
                padding_idx = None
        out = F.embedding(here, owned.rows(weight), padding_idx)
        return owned.without(out, others.unsqueeze(-1))

    return embedding


@rule(F.embedding, exact=True)
def embedding(
    input: Arg, weight: Arg, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Factors:  # fmt: skip
    """..., v d -> ... d; v gives P(sum); the gradient is dense, also with ``sparse``"""
    if max_norm is not None or scale_grad_by_freq:
        raise NoRule("max_norm and scale_grad_by_freq look at the whole table or batch")
    v = weight.shape[0]
    if padding_idx is not None and not -v <= padding_idx < v:
        raise AssertionError("Padding_idx must be within num_embeddings")
    ids: tuple[Letter, ...] = letters_of(input)
    sizes: dict[Letter, int] = {**dict(enumerate(input.shape)), "v": v, "d": weight.shape[1]}
    return Factors(
        (ids, ("v", "d")), ((*ids, "d"),), sizes, {"v": "sum"}, linear_terms=({weight.index},),
        local=_local, independent=set(ids),
        # A table of positions, added to a split batch, waits in the bucket of all gradients; else
        # its gradient would be summed alone, in the backward. In larger tables the gradient of the
        # result is smaller to sum.
        rematerialize=weight.index if math.prod(input.shape) >= v else None,
    )  # fmt: skip


def _bags(call: Any) -> Callable[..., Tensor]:
    run = zeros_if_empty(call)

    def embedding_bag(*args: Any, sparse: bool = False, **words: Any) -> Tensor:
        return run(*args[:7], *(False,) * (len(args) > 7), *args[8:], **words)

    return embedding_bag


@rule(F.embedding_bag, exact=True)
def embedding_bag(
    input: Arg, weight: Arg, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: Any = None,
) -> Factors:  # fmt: skip
    """bags n, v d -> bags d: bags of equal length may be split; the table is whole but for d; the
    gradient is dense, also with ``sparse``"""
    if max_norm is not None or scale_grad_by_freq:
        raise NoRule("max_norm and scale_grad_by_freq look at the whole table or batch")
    if 0 in (*input.shape, *weight.shape) or (input.ndim == 1 and offsets is None):
        raise NoRule("no bags")
    rows: Letter = "bags" if input.ndim == 2 else None
    bags = input.shape[0] if input.ndim == 2 else offsets.shape[0] - include_last_offset
    each: tuple[Letter, ...] = (rows, None)[: input.ndim]
    found: dict[int, tuple[Letter, ...]] = {input.index: each, weight.index: (None, "d")}
    linear = {weight.index}
    if per_sample_weights is not None:
        found[per_sample_weights.index] = each
        linear.add(per_sample_weights.index)
    if isinstance(offsets, Arg):
        found[offsets.index] = (None,)
    terms = (set(linear),) if mode in ("sum", "mean") else ()
    return Factors(
        tuple(found[i] for i in sorted(found)), ((rows, "d"),), linear_terms=terms,
        shapes=((bags, weight.shape[1]),),
        local=_bags,
    )  # fmt: skip
