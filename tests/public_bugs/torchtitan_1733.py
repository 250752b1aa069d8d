"""With pipeline stages, accumulated gradients were a decaying average and not a sum.

pytorch/torchtitan#1733, 2025-09-22, closed.

After each call the schedule divided all gradients by the number of micro-batches, also those of
earlier calls.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tests.public_bugs.harness import randint, randn, rank
from tests.public_bugs.models import LAYERS, MLP, Decoder, next_token

STRATEGIES = {2: [{"pp": 2}], 4: [{"pp": 4}, {"pp": 2, "sharding": 2}, {"pp": 2, "tp": 2}]}


def program(run):
    """Three calls of the schedule, of two micro-batches each, before a step."""
    model = run.apply(Decoder(MLP(), MLP()), layers=LAYERS)
    halves = zip(randint(11, 12, 4).chunk(3), randint(11, 12, 4, seed=1).chunk(3), strict=True)

    def share(part):
        tokens, labels = run.place(part[0]), run.place(part[1], stage=-1)
        return next_token(model, tokens, labels) / 6

    for i, half in enumerate(halves):
        micro = list(zip(*(x.chunk(2) for x in half), strict=True))
        run.keep(f"loss of call {i}", run.backward(model, share, micro))
    run.keep_gradients(model, 0)


def peer():
    """Two calls of the schedule; the gradient of the last stage's weight."""
    x, layers = randn(4, 3).float(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for i, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.1 * (i + 1))
    mean = nn.MSELoss()
    want = torch.autograd.grad(2 * mean(layers(x), x), layers[1].weight)[0]
    stage = PipelineStage(layers[rank()], rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=mean)
    for _ in range(2):
        schedule.step(x) if rank() == 0 else schedule.step(target=x)
    got = layers[1].weight.grad if rank() else torch.zeros(3, 3)
    dist.broadcast(got, 1)
    return got, want
