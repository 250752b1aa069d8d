"""Statistics of a synchronized batch norm were wrong if the ranks have different numbers of rows.

PaddlePaddle/Paddle#32464, 2021-04-22, closed; in torch it was pytorch/pytorch#22192, 2019-06-25,
closed.

The mean over the ranks was taken of the ranks' means.
"""

from torch import nn

from tests.public_bugs.harness import randn
from tests.public_bugs.models import squares

STRATEGIES = {2: [{"dp": 2}], 4: [{"dp": 4}, {"sharding": 2, "tp": 2}]}


def program(run):
    """5 rows; the running statistics are compared too."""
    model = run.apply(nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6)))
    run.train(model, squares, randn(5, 6), sequence=None)
    for name, value in model.named_buffers():
        run.keep(name, value)
