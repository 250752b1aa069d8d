"""Inputs for a model of transformers, guessed from the parameters of its ``forward`` and from its
configuration."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf

from tests.zoo.shrink import read

Batch = dict[str, Any]
BATCH, TIME, LATER = 4, 8, 5  # sequences, tokens of each, tokens of a decoder
LOW, HIGH = 8, 50  # tokens without a special meaning
MOST_TRIES = 8  # of one group of parameters


def configs(config: Any) -> Iterator[Any]:
    """The configuration and those inside it; of pictures and sounds first."""
    inner = [v for v in vars(config).values() if isinstance(v, hf.PreTrainedConfig)]
    for sub in sorted(inner, key=lambda c: "text" in type(c).__name__.lower()):
        yield from configs(sub)
    yield config


def said(config: Any, *names: str, default: Any) -> Any:
    """What the first of them that has one of the names says."""
    for each in configs(config):
        for name in names:
            value = read(each, name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                return value[0]
    return default


class Inputs:
    """``tokens``: how many placeholders of pictures or sounds stand in each text."""

    def __init__(self, config: Any, tokens: int = 0) -> None:
        self.config, self.tokens = config, tokens
        self.generator = torch.Generator().manual_seed(11)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(LOW, HIGH, shape, generator=self.generator)

    # Each gives the options for one parameter, the likeliest first.

    def input_ids(self) -> list[torch.Tensor]:
        books = said(self.config, "num_codebooks", default=0)
        if self.tokens:
            marks = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
            mark = said(self.config, *marks, "video_token_id", default=HIGH)
            out = self.ids(BATCH, TIME + self.tokens)
            out[:, 2 : 2 + self.tokens] = mark
            return [out]
        options = [self.ids(BATCH, TIME)]
        if books:
            options += [self.ids(BATCH, TIME, books), self.ids(BATCH, books, TIME)]
        return options

    def decoder_input_ids(self) -> list[torch.Tensor]:
        return [self.ids(BATCH, LATER)]

    def attention_mask(self) -> list[torch.Tensor]:
        mask = torch.ones(BATCH, TIME + self.tokens, dtype=torch.long)
        mask[BATCH // 2 :, -2:] = 0
        return [mask]

    def pixel_values(self) -> list[torch.Tensor]:
        channels = said(self.config, "num_channels", "in_channels", "in_chans", default=3)
        side = said(self.config, "image_size", "img_size", "input_image_size", default=32)
        frames = said(self.config, "num_frames", default=2)
        patch, time = self.patch()
        shapes = [
            (BATCH, channels, side, side),
            (BATCH, frames, channels, side, side),
            (BATCH, 1, channels, side, side),
            (BATCH * 16, channels * time * patch * patch),
            (BATCH, 16, channels * patch * patch),
            (BATCH, channels, frames, side, side),
            (BATCH, channels, 64, 64),
        ]
        return [self.floats(*shape) for shape in shapes]

    def patch(self) -> tuple[int, int]:
        patch = said(self.config, "patch_size", "spatial_patch_size", default=8)
        return patch, said(self.config, "temporal_patch_size", default=1)

    def image_grid_thw(self) -> list[torch.Tensor]:
        return [torch.tensor([[1, 4, 4]] * BATCH)]

    def grid_thw(self) -> list[torch.Tensor]:
        return self.image_grid_thw()

    def spatial_shapes(self) -> list[torch.Tensor]:
        return [torch.tensor([[4, 4]] * BATCH)]

    def pixel_attention_mask(self) -> list[torch.Tensor]:
        return [torch.ones(BATCH, 16, dtype=torch.long)]

    def image_sizes(self) -> list[torch.Tensor]:
        side = said(self.config, "image_size", default=32)
        return [torch.tensor([[side, side]] * BATCH)]

    def input_features(self) -> list[torch.Tensor]:
        names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim")
        bins = said(self.config, *names, "feature_projection_input_dim", default=80)
        exact = 2 * said(self.config, "max_source_positions", default=32)
        shapes = [(bins, exact), (exact, bins), (bins, 64), (64, bins), (1, exact, bins)]
        return [self.floats(BATCH, *shape) for shape in shapes]

    def input_values(self) -> list[torch.Tensor]:
        bins = said(self.config, "num_mel_bins", default=16)
        length = said(self.config, "max_length", default=64)
        shapes = [(2000,), (1, 2000), (length, bins), (1, length, bins), (64,)]
        return [self.floats(BATCH, *shape) for shape in shapes]

    def decoder_input_values(self) -> list[torch.Tensor]:
        return [self.floats(BATCH, LATER, said(self.config, "num_mel_bins", default=16))]

    def bbox(self) -> list[torch.Tensor]:
        corner = torch.randint(0, 20, (BATCH, TIME, 2), generator=self.generator)
        return [torch.cat([corner, corner + 5], -1)]

    def past_values(self) -> list[torch.Tensor]:
        length = said(self.config, "context_length", default=16)
        lags = getattr(self.config, "lags_sequence", None) or [0]
        channels = said(self.config, "num_input_channels", "input_size", default=1)
        shapes = [(length + max(lags),), (length, channels), (length + max(lags), channels)]
        return [self.floats(BATCH, *shape) for shape in shapes]

    def _times(self, length: int) -> list[torch.Tensor]:
        return [self.floats(BATCH, length, said(self.config, "num_time_features", default=1))]

    def past_time_features(self) -> list[torch.Tensor]:
        return self._times(self.past_values()[0].shape[1])

    def past_observed_mask(self) -> list[torch.Tensor]:
        return [torch.ones_like(self.past_values()[0])]

    def future_time_features(self) -> list[torch.Tensor]:
        return self._times(said(self.config, "prediction_length", default=4))

    def future_values(self) -> list[torch.Tensor]:
        return [self.floats(BATCH, said(self.config, "prediction_length", default=4))]

    def state(self, name: str, default: int) -> torch.Tensor:
        return self.floats(BATCH, LATER, said(self.config, name, default=default))

    def states(self) -> list[torch.Tensor]:
        return [self.state("state_dim", 17)]

    def actions(self) -> list[torch.Tensor]:
        return [self.state("act_dim", 4)]

    def rewards(self) -> list[torch.Tensor]:
        return [self.floats(BATCH, LATER, 1)]

    def returns_to_go(self) -> list[torch.Tensor]:
        return [self.floats(BATCH, LATER, 1)]

    def timesteps(self) -> list[torch.Tensor]:
        return [torch.arange(LATER).repeat(BATCH, 1)]

    def audio_codes(self) -> list[torch.Tensor]:
        return [self.ids(BATCH, said(self.config, "num_codebooks", default=4), TIME)]

    def hidden_states(self) -> list[torch.Tensor]:
        width = said(self.config, "hidden_size", "d_model", default=32)
        channels = said(self.config, "num_channels", "in_channels", default=3)
        patch, time = self.patch()
        shapes = [(BATCH * 16, channels * time * patch * patch), (BATCH, TIME, width)]
        return [self.floats(*shape) for shape in shapes]

    def inputs_embeds(self) -> list[torch.Tensor]:
        return self.hidden_states()[1:]


TEXT = ["input_ids", "attention_mask"]
LATENT = ["decoder_input_ids", "decoder_input_values"]
PAST = ["past_values", "past_observed_mask"]
SIGHT = ["pixel_values", "image_grid_thw"]
SOUND = ["input_features"], ["input_values"], ["audio_codes"]
GROUPS: list[list[str]] = [
    [*TEXT, "bbox", "pixel_values"],
    [*TEXT, "bbox"],
    [*TEXT, *SIGHT],
    [*TEXT, "pixel_values", "image_sizes"],
    [*TEXT, "pixel_values"],
    ["input_ids", "pixel_values"],
    [*TEXT, "input_features"],
    [*TEXT, "input_values"],
    ["input_features", "decoder_input_ids"],
    ["input_values", "decoder_input_ids"],
    ["input_values", "decoder_input_values"],
    ["pixel_values", "decoder_input_ids"],
    [*TEXT, "decoder_input_ids"],
    [*TEXT, "decoder_input_values"],
    ["pixel_values", "pixel_attention_mask", "spatial_shapes"],
    SIGHT,
    ["pixel_values"],
    *SOUND,
    TEXT,
    ["input_ids"],
    [*PAST, "past_time_features", "future_values", "future_time_features"],
    PAST,
    ["past_values"],
    ["states", "actions", "rewards", "returns_to_go", "timesteps"],
    ["inputs_embeds"],
    ["hidden_states", "grid_thw"],
    ["pixel_values", "grid_thw"],
    ["hidden_states", "image_grid_thw"],
    ["hidden_states"],
]


def guesses(model: Any, tokens: int = 0) -> Iterator[Batch]:
    """The richest first. ``tokens``: with so many placeholders in a text."""
    takes = set(inspect.signature(model.forward).parameters)
    groups = [group for group in GROUPS if takes.issuperset(group)]
    for group in groups:
        yield from itertools.islice(_filled(group, Inputs(model.config, tokens)), MOST_TRIES)


def _filled(group: list[str], inputs: Inputs) -> Iterator[Batch]:
    options = [getattr(inputs, name)() for name in group]
    for chosen in itertools.product(*options):
        yield dict(zip(group, chosen, strict=True))


def missing_tokens(error: Exception, batch: Batch) -> int:
    """How many placeholders a text needs, where the error says that there are too few; else 0."""
    text = str(error)
    if "token" not in text or "input_ids" not in batch or len(batch) < 2:
        return 0
    numbers = [int(n) for n in re.findall(r"\d+", text.split("token", 1)[1])]
    wanted = [n // BATCH for n in numbers if n >= BATCH and n % BATCH == 0 and n // BATCH <= 600]
    return wanted[-1] if wanted else 0
