"""A switch is on in its own thread and context alone."""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

import disttensor as dt
from disttensor.switch import Switch


def in_a_thread(look: Callable[[], object]) -> object:
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_switch_nests_and_ends_with_its_block() -> None:
    switch = Switch("test")
    with pytest.raises(KeyError), switch:
        with switch:
            assert switch
        assert switch
        raise KeyError
    assert not switch


def test_other_threads_do_not_see_it_unless_they_take_the_context() -> None:
    switch = Switch("test")
    with switch:
        context = contextvars.copy_context()
        assert in_a_thread(lambda: bool(switch)) is False
        assert in_a_thread(lambda: context.run(bool, switch)) is True


def test_strict_is_of_one_thread() -> None:
    x = dt.ones(3, mesh=dt.ProcessMesh([0], ("dp",)))
    with dt.strict():
        with pytest.raises(dt.StrictError):
            torch.histc(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dt.FallbackWarning)
            assert isinstance(in_a_thread(lambda: torch.histc(x, bins=3)), dt.DistTensor)
