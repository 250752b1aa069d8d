"""The progress of a training run: a line that is updated (in a log file: some lines), and a
curve."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path


class Progress:
    """Call ``update`` after every step. ``quiet``: shows nothing, for all ranks except one.
    ``done``: the steps of the earlier run that this run resumes."""

    def __init__(
        self, steps: int, tokens_per_step: int, quiet: bool = False, done: int = 0
    ) -> None:
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.quiet = quiet
        self.moving = sys.stdout.isatty()
        self.every = 1 if self.moving else max(1, steps // 20)
        self.done = done
        self.times = [time.perf_counter()]

    def update(self, loss: float, sent: int) -> None:
        """Shows a step that has ended, with its loss and the bytes that this rank has sent."""
        self.done += 1
        self.times = [*self.times[-20:], time.perf_counter()]
        last = self.done == self.steps
        if self.quiet or (self.done % self.every and self.done != 1 and not last):
            return
        line = self._line(loss, sent)
        if self.moving:
            print(f"\r{line}\x1b[K", end="\n" if last else "", flush=True)
        else:
            print(line, flush=True)

    def _line(self, loss: float, sent: int) -> str:
        seconds = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        minutes, rest = divmod(round(seconds * (self.steps - self.done)), 60)
        filled = 20 * self.done // self.steps
        return (
            f"{self.done:{len(str(self.steps))}}/{self.steps} [{'=' * filled:20}] loss {loss:.4f}"
            f"  {self.tokens_per_step / seconds:,.0f} tokens/s  {sent / 1e6:.2f} MB sent/step"
            f"  {minutes}:{rest:02} left"
        )


def save_curve(losses: Sequence[float], path: str) -> str:
    """Draws the losses to a PNG. Returns a message for the user: the path, or the reason why there
    is none."""
    try:
        from matplotlib.figure import Figure  # half a second, on the one rank that draws
    except ImportError:
        return "no loss curve: matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)")
    axes.grid(alpha=0.3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return f"loss curve: {path}"
