"""Text that every machine has: Python's language reference. Or the user's own files."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def read_text(files: Sequence[str | Path] = (), limit: int | None = None) -> Tensor:
    """uint8[bytes]: the files (none: the language reference) in a row, up to ``limit`` bytes."""
    texts = (Path(file).read_bytes() for file in files) if files else [language_reference()]
    data = bytearray()
    for text in texts:
        data += text
        if limit is not None and len(data) >= limit:
            break
    if not data:
        raise SystemExit("there is no text to train on: the files are empty")
    return torch.frombuffer(data[:limit], dtype=torch.uint8)


def language_reference() -> bytes:
    """The English text that ``help("with")`` and its like print, half a megabyte in all."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def split(text: Tensor, context: int, share: float = 0.05) -> tuple[Tensor, Tensor]:
    """(training text, validation text): the validation text is the last ``share`` of the whole."""
    held_out = max(int(len(text) * share), context + 1)
    if len(text) < 2 * held_out:
        raise SystemExit(
            f"the text has {len(text)} bytes, and with a context of {context} it needs at least "
            f"{2 * (context + 1)}: give more --data, or a smaller --context"
        )
    return text[:-held_out], text[-held_out:]


def sample_batch(
    text: Tensor, size: int, length: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64[size, length] each: random windows of the text.

    A pure function of its arguments: every process, whatever the mesh, sees the same global batch.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
