"""An observer that makes reshards wait where they are called."""

from __future__ import annotations

from disttensor.observe import Observer


class Blocking(Observer):
    sees_calls = True
