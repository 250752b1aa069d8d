"""A function that pauses runs as it would have run in the thread of its owner."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest
import torch

from disttensor.pipeline.coroutine import Coroutine

setting: ContextVar[str] = ContextVar("setting", default="usual")


def state():
    cast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    grad = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return setting.get(), torch.get_default_device(), *cast, *grad


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_it_has_the_state_of_its_maker(context):
    plain = state()
    token = setting.set("mine")
    try:
        with context(), torch.autocast("cpu", torch.float16), torch.device("meta"):
            want = state()
            one = Coroutine(state)
    finally:
        setting.reset(token)
    assert one.resume() and one.result == want != plain
    assert state() == plain


def test_what_it_sets_stays_over_a_pause_and_is_not_seen_outside():
    seen = []

    def run():
        setting.set("inside")
        with torch.no_grad():
            one.pause()
            seen.append((setting.get(), torch.is_grad_enabled()))
        return 3

    one = Coroutine(run)
    assert not one.resume()
    assert (setting.get(), torch.is_grad_enabled()) == ("usual", True)
    assert one.resume() and one.result == 3 and seen == [("inside", False)]


def test_one_thread_serves_one_after_another():
    def name():
        return threading.get_ident()

    both = [Coroutine(name) for _ in range(2)]
    assert all(one.resume() for one in both)
    assert both[0].result == both[1].result != threading.get_ident()


def test_an_error_is_raised_by_resume_and_an_abandoned_one_ends():
    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        Coroutine(fail).resume()
    ended = []

    def run():
        try:
            one.pause()
        finally:
            ended.append(True)

    one = Coroutine(run)
    assert not one.resume()
    one.abandon()
    assert ended and one.ended
