"""torch's own layers, with a batch each: the transformers, attention, and a recurrent network."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.models.case import Batch, Case, weighted

WIDTH, TIME, BATCH = 12, 5, 6


def numbers(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sequences() -> Batch:
    return {"x": numbers(BATCH, TIME, WIDTH, seed=1)}


def pairs() -> Batch:
    return {"src": numbers(BATCH, TIME, WIDTH, seed=1), "tgt": numbers(BATCH, 4, WIDTH, seed=2)}


def uneven() -> Batch:
    """A batch that two ranks do not divide."""
    return {"x": numbers(5, TIME, WIDTH, seed=1)}


def transformer() -> nn.Module:
    return nn.Transformer(
        WIDTH, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=20,
        dropout=0.0, batch_first=True,
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        WIDTH, nhead=4, dim_feedforward=20, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, num_layers=2)


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 4, batch_first=True)


def cross_attention() -> nn.Module:
    """q, k and v are three parameters, of other widths."""
    return nn.MultiheadAttention(WIDTH, 4, kdim=8, vdim=10, batch_first=True)


def queries() -> Batch:
    return {
        "query": numbers(BATCH, TIME, WIDTH, seed=1),
        "key": numbers(BATCH, 7, 8, seed=2),
        "value": numbers(BATCH, 7, 10, seed=3),
    }


def lstm() -> nn.Module:
    return nn.LSTM(WIDTH, 10, num_layers=2, batch_first=True, bidirectional=True)


def gru() -> nn.Module:
    return nn.GRU(WIDTH, 10)


def single() -> Batch:
    """Fewer sequences than ranks, and time before the batch."""
    return {"x": numbers(TIME, 1, WIDTH, seed=1)}


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    return weighted(model(*batch.values()))


def causal(model: nn.Module, batch: Batch) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    return weighted(model(**batch, tgt_mask=mask, tgt_is_causal=True))


def to_itself(model: nn.Module, batch: Batch) -> torch.Tensor:
    out, weights = model(batch["x"], batch["x"], batch["x"])
    return weighted(out) + weighted(weights)


def without_weights(model: nn.Module, batch: Batch) -> torch.Tensor:
    return weighted(model(**batch, need_weights=False)[0])


def last_states(model: nn.Module, batch: Batch) -> torch.Tensor:
    out, (h, c) = model(batch["x"])
    return weighted(out) + weighted(h) + weighted(c)


def last_state(model: nn.Module, batch: Batch) -> torch.Tensor:
    out, h = model(batch["x"])
    return weighted(out) + weighted(h)


COLUMN, ROW = 0, 1
MLP = {"*.linear1.*": COLUMN, "*.linear2.weight": ROW}
OUT = {"out_proj.weight": ROW}
SEPARATE = {"[qkv]_proj_weight": COLUMN, **OUT}

CASES = [
    Case("transformer", transformer, pairs, causal, {**MLP, "*.out_proj.weight": ROW}),
    Case("encoder", encoder, sequences, forward, MLP),
    Case("encoder in eval", encoder, uneven, forward, MLP, training=False),
    Case("attention", attention, sequences, to_itself, OUT),
    Case("attention, uneven", attention, uneven, to_itself, OUT),
    Case("cross-attention", cross_attention, queries, without_weights, SEPARATE),
    Case("lstm", lstm, sequences, last_states),
    Case("lstm, uneven", lstm, uneven, last_states),
    Case("gru, a batch of one", gru, single, last_state, batch_dim=1),
]
