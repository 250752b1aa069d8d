"""Training of LoRA adapters with tensor parallelism did not converge, and without it did.

meta-pytorch/opacus#789, 2025-10-03, open.

The report gives no cause. Adapters are replicated or split beside layers that are split.
"""

import torch
from torch import nn

from tests.public_bugs.harness import randint
from tests.public_bugs.mcore_bridge_173 import Adapted
from tests.public_bugs.models import HEADS_PLAN, Attention, Decoder, next_token

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "sharding": 2}]}
PLAN = {f"*{name}.base.*": HEADS_PLAN["*q.*"] for name in "qkv"}
PLAN |= {f"*{name}.b.weight": HEADS_PLAN["*q.*"] for name in "qkv"}
PLAN |= {"*out.base.weight": HEADS_PLAN["*out.weight"]}


class AdaptedAttention(Attention):
    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "out"):
            setattr(self, name, Adapted(getattr(self, name)))


def program(run):
    model = Decoder(AdaptedAttention()).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Adapted):
            nn.ModuleList([module.a, module.b]).requires_grad_()
    model = run.apply(model, PLAN)
    batch = randint(11, 5, 4), randint(11, 5, 4, seed=1)
    run.train(model, next_token, *batch, sequence=None, optimizer=adam)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)
