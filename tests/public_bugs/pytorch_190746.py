"""Inside loss_parallel, a log-softmax over a split vocabulary that is not followed by nll_loss had
the gradient of the identity.

pytorch/pytorch#190746, 2026-07-22, open.

Its backward is left to that of the loss, which is replaced for all calls of the process.
"""

import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.public_bugs.harness import randint, randn, torch_mesh
from tests.public_bugs.models import MLP, ROWS, Decoder

STRATEGIES = {2: [{"tp": 2}], 4: [{"tp": 4}, {"tp": 2, "dp": 2}]}


def loss(model, tokens, labels):
    """Cross entropy, and the entropy of the prediction."""
    words = F.log_softmax(model(tokens), -1)
    entropy = -(words.exp() * words).sum(-1).mean()
    return F.nll_loss(words.flatten(0, 1), labels.flatten()) - 0.3 * entropy


def program(run):
    model = run.apply(Decoder(MLP()), {"head.weight": ROWS})
    run.train(model, loss, randint(11, 5, 4), randint(11, 5, 4, seed=1), sequence=None)


def peer():
    x, weights, mesh = randn(3, 6), randn(3, 6, seed=1), torch_mesh()
    plain = x.clone().requires_grad_()
    (F.log_softmax(plain, -1) * weights).sum().backward()
    split = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        words = F.log_softmax(split, -1)
        (words * distribute_tensor(weights, mesh, [Shard(1)])).sum().backward()
    return split.grad.full_tensor(), plain.grad
