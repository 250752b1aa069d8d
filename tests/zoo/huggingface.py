"""All model types of transformers: which of them can be built small and run in plain torch, and
how.

``recipe(name)`` searches once, in plain torch; ``Recipe.build()`` gives the same network and inputs
in every process. Nothing is downloaded.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto

from tests.zoo import check
from tests.zoo.inputs import Batch, guesses, missing_tokens
from tests.zoo.shrink import WAYS, Shrinker

MOST = 15_000_000  # parameters
PATIENCE = 12.0  # seconds of computing, after which no other way is tried
# The class of a type: the first of these tasks that it has, or what has no head.
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM",
    "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "TIME_SERIES_PREDICTION", "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM", "PRETRAINING", "BACKBONE",
)  # fmt: skip


class NoRecipeError(Exception):
    """It cannot be built small, or does not run in plain torch."""


class Recipe(NamedTuple):
    """``guess``: which of the inputs that were tried; ``tokens``: of pictures in each text."""

    name: str
    cls: str
    way: str
    guess: int
    tokens: int
    double: bool

    @property
    def shown(self) -> str:
        return self.cls

    def build(self) -> tuple[nn.Module, Batch]:
        model = made(self.name, self.cls, self.way).to(self.dtype)
        batch = next(itertools.islice(guesses(model, self.tokens), self.guess, None))
        return model, typed(batch, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32


def names() -> list[str]:
    """The types that have a model."""
    return sorted(name for name in hf.CONFIG_MAPPING if any(classes(name)))


def classes(name: str) -> list[str]:
    """Names of classes, at most two: one with a head, and that without."""
    tables = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS]
    found: list[str] = []
    for table in [*tables, "MODEL_MAPPING_NAMES"]:
        value = getattr(modeling_auto, table, {}).get(name)
        if value and (not found or table == "MODEL_MAPPING_NAMES"):
            found.append(value if isinstance(value, str) else value[0])
    return list(dict.fromkeys(found))


def made(name: str, cls: str, way: str) -> nn.Module:
    """In evaluation, without a weight that is 0 or 1."""
    model_class = getattr(hf, cls)
    with torch.device("meta"):
        empty = model_class(Shrinker(way).config(hf.CONFIG_MAPPING[name]))
        count = sum(p.numel() for p in empty.parameters())
    if count > MOST:
        raise NoRecipeError(f"{cls} made small has {count / 1e6:.0f} million parameters")
    torch.manual_seed(3)
    model: nn.Module = model_class(Shrinker(way).config(hf.CONFIG_MAPPING[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def typed(batch: Batch, dtype: torch.dtype) -> Batch:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}


def recipe(name: str) -> Recipe:
    """The first that runs, and gives the same twice. Raises NoRecipeError with what was said
    last."""
    said: list[str] = []  # of the last class and way that could be built
    start = time.process_time()
    for cls, way in itertools.product(classes(name), WAYS):
        if time.process_time() - start > PATIENCE:
            break
        try:
            model = made(name, cls, way)
        except Exception as error:
            said = said or [line(error)]
            continue
        said = []
        for double in (True, False):
            model = model.to(torch.float64 if double else torch.float32)
            for found in _running(model, Recipe(name, cls, way, 0, 0, double), said):
                return found
    raise NoRecipeError(said[0] if said else "it has no class, or no inputs are known")


def _running(model: nn.Module, start: Recipe, said: list[str]) -> Iterator[Recipe]:
    """Those of the guesses that run; one whose text lacks placeholders is tried again with them."""
    count = sum(1 for _ in guesses(model))
    for guess in range(count):
        tokens = 0
        for _ in range(2):
            tried = start._replace(guess=guess, tokens=tokens)
            batch = typed(next(itertools.islice(guesses(model, tokens), guess, None)), tried.dtype)
            model.zero_grad()
            try:
                first = check.run(model, batch)
                if not _repeats(model, batch, first):
                    raise NoRecipeError("it draws random numbers in evaluation")
            except Exception as error:
                said.append(line(error))
                tokens = missing_tokens(error, batch)
                if not tokens:
                    break
                continue
            yield tried
            break


def _repeats(model: nn.Module, batch: Batch, first: Any) -> bool:
    torch.manual_seed(6)
    pairs = zip(check.tensors(first), check.tensors(model(**batch)), strict=True)
    return all(check.distance(x.detach(), y.detach()) < 1e-4 for (_, x), (_, y) in pairs)


def line(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).strip().split("\n")
    text = re.sub(r"\s+", " ", lines[-1 if "validator" in lines[0] else 0])
    return f"{type(error).__name__}: {text}"[:160]
