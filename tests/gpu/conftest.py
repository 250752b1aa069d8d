"""Tests that need a CUDA device; `make gpu` runs them. Ranks are two processes on one device, which
communicate by gloo: NCCL refuses two ranks on one device, so it is tested in a world of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.oracle import DEVICE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if DEVICE != "cuda":
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: make gpu"))
