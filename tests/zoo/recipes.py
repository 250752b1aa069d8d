"""The names of all networks, and how one is built."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from tests.zoo import vision


def names() -> list[str]:
    """Those of the packages that are installed."""
    found = importlib.util.find_spec("transformers")
    types = importlib.import_module("tests.zoo.huggingface").names() if found else []
    return [*types, *vision.names()]


def absent() -> list[str]:
    """Packages that are not installed: their networks are not run."""
    every = ("transformers", *vision.PACKAGES)
    return [package for package in every if not importlib.util.find_spec(package)]


def versions() -> str:
    """torch and the packages that are installed."""
    names = ("torch", "transformers", *vision.PACKAGES)
    found = [name for name in names if name not in absent()]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)


def search(name: str) -> Any:
    """Has ``shown`` and ``build()``. In a process of its own: this imports transformers."""
    if name.startswith("pypi."):
        return importlib.import_module("tests.zoo.strangers").recipe(name)
    if name.partition(".")[0] in vision.PACKAGES:
        return vision.network(name)
    return importlib.import_module("tests.zoo.huggingface").recipe(name)
