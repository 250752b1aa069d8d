"""Each simulation collects garbage several times, and each time would walk over torch and all
tests: 40 % of what these tests take."""

from __future__ import annotations

import gc
import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    importlib.import_module("torch._dynamo")  # which the first simulation imports
    gc.freeze()
