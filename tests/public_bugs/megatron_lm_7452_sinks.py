"""The norm of the gradient left out the attention sinks of all heads but those of the first rank.

NVIDIA/Megatron-LM#7452 (finding 8), 2026-09-17, open.

The sinks are split by heads, but not marked as split. A filter against counting replicas twice then
kept the first rank's piece only, and gradients were clipped by too small a norm.
"""

from unittest import mock

import torch
from torch import nn

import disttensor as dt
from tests.public_bugs.harness import clip_to_one, randn, rank
from tests.public_bugs.models import HEADS_PLAN, Attention, squares

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}
PEER = "megatron-core"
PLAN = HEADS_PLAN | {"sinks": {"tp": dt.Shard(0)}}


class WithSinks(Attention):
    """Each head has one more score, of a key without a value."""

    def __init__(self):
        super().__init__(heads=4, kv=4, size=3)
        self.sinks = nn.Parameter(randn(4))

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / 3**0.5
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        sinks = self.sinks[:, None, None].expand(len(q), -1, q.shape[2], 1)
        scores = torch.cat([scores.masked_fill(later, -torch.inf), sinks], -1)
        return scores.softmax(-1)[..., :-1] @ v


def program(run, clip=clip_to_one):
    model = run.apply(WithSinks(), PLAN)
    run.train(model, lambda m, x: 9 * squares(m, x), randn(5, 4, 6), sequence=None, clip=clip)


def clip_without_most_sinks(parameters):
    """Gives the norm that the first rank's piece leads to."""
    gradients = [p.grad.full_tensor() for p in parameters]
    shortened = [g[:2] if g.shape == (4,) else g for g in gradients]
    return torch.stack([g.norm() for g in shortened]).norm()


def planted(run):
    program(run, clip_without_most_sinks)


def peer():
    """The norm of a gradient of the sinks, by the parameters that its filter lets count."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=4, tensor_model_parallel_size=2,
        softmax_type="learnable",
    )  # fmt: skip
    with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
        attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    gradient = randn(4)
    own = gradient.chunk(2)[rank()].square().sum()
    total = own * param_is_not_tensor_parallel_duplicate(attention.softmax_offset)
    torch.distributed.all_reduce(total)
    return total.sqrt(), gradient.norm()
