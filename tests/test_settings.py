"""A setting holds in its own thread and context only, and snapshots contain it."""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.settings import snapshot


def in_a_thread(look: Callable[[], object]) -> object:
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_setting_nests_and_ends_with_its_block() -> None:
    before = snapshot("cpu")
    with pytest.raises(KeyError), dt.random.rng("fast"):
        with dt.random.rng("invariant"):
            assert dt.random.rng.current() == "invariant"
        assert dt.random.rng.current() == "fast"
        raise KeyError
    assert snapshot("cpu") == before


def test_other_threads_do_not_see_it_unless_they_take_the_context() -> None:
    with dt.attention.policy("ring"):
        context = contextvars.copy_context()
        assert in_a_thread(dt.attention.policy.current) == "auto"
        assert in_a_thread(lambda: context.run(dt.attention.policy.current)) == "ring"


SET = [
    lambda: dt.random.rng("fast"),
    lambda: dt.attention.policy("heads"),
    dt.debugging.strict,
    dt.values_everywhere,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
]


@pytest.mark.parametrize("set_up", SET)
def test_a_snapshot_has_each_setting(set_up: Callable[[], Any]) -> None:
    before = snapshot("cpu")
    with set_up():
        assert snapshot("cpu") != before
    assert snapshot("cpu") == before


def test_strict_is_of_one_thread() -> None:
    x = dt.ones(3, mesh=dt.ProcessMesh([0], ("dp",)))
    with dt.debugging.strict():
        with pytest.raises(dt.errors.StrictError):
            torch.histc(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dt.errors.FallbackWarning)
            assert isinstance(in_a_thread(lambda: torch.histc(x, bins=3)), dt.DistTensor)


def test_one_block_entered_by_two_threads_restores_the_value_of_each() -> None:
    shared, inside, left = dt.random.rng("fast"), threading.Event(), threading.Event()

    def other() -> object:
        with dt.random.rng("invariant"):
            with shared:
                inside.set()
                left.wait(10)
            return dt.random.rng.current()

    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(other()))
    with shared:
        thread.start()
        inside.wait(10)
    assert dt.random.rng.current() is None
    left.set()
    thread.join()
    assert seen == ["invariant"]
