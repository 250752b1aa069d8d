"""Under ZeRO 2 a loop that accumulates gradients by itself trained on its last micro-batch only.

allenai/open-instruct#1498, 2026-02-26, merged; also huggingface/accelerate#3877, 2025-12-05, open.

Each backward counted as the end of an accumulation, after which stage 2 forgets the sum so far.
"""

from tests.public_bugs.harness import full, randn, sgd
from tests.public_bugs.models import MLP, Residual, squares

STRATEGIES = {
    2: [{"sharding": 2, "zero_stage": stage} for stage in (2, 1, 3)],
    4: [{"dp": 2, "sharding": 2, "zero_stage": stage} for stage in (2, 1, 3)],
}


def program(run):
    """Plain backwards, one after the other, and a step after the third."""
    model = run.apply(Residual(MLP()))
    steps = sgd(model.parameters())
    for part in randn(7, 6).chunk(3):
        loss = squares(model, run.place(part)) / 3
        loss.backward()
        run.keep("loss", loss)
    run.keep_gradients(model, 0)
    steps.step()
    for name, p in model.named_parameters():
        run.keep(name, full(p))
