"""A checkpoint of two pipeline stages, loaded by another number of stages, mixed up the layers.

NVIDIA/Megatron-LM#7452 (finding 12), 2026-09-17, open.

Each stage names its layers from zero, and the names were taken for those of the whole model.
"""

import tempfile

import torch.distributed as dist
from torch import nn

import disttensor as dt
from tests.public_bugs.harness import randn
from tests.public_bugs.models import MLP, Residual

STRATEGIES = {2: [{"pp": 2}], 4: [{"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "sharding": 2}]}


def blocks():
    return nn.Sequential(*(Residual(MLP()) for _ in range(4)))


def error(model, x, y):
    return (model(x) - y).square().mean()


def program(run):
    model = run.apply(blocks())
    run.train(model, error, randn(5, 6), randn(5, 6, seed=1), sequence=None)
    if run.parallel:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        dt.Checkpointer(folder[0]).save(0, model=model)
        model = blocks().double()  # in one process
        dt.Checkpointer(folder[0]).load(model=model)
    for name, value in model.state_dict().items():
        run.keep(f"{name}, loaded", value)
