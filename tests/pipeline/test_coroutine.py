"""A function that pauses runs as it would have run in the thread of its owner."""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from disttensor.pipeline.coroutine import Coroutine, _saved_tensors_hooks

setting: ContextVar[str] = ContextVar("setting", default="usual")


def state():
    cast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    grad = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return setting.get(), torch.get_default_device(), *cast, *grad


class Counted(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def kept_for_a_thread():
    """All that torch keeps for each thread, and Python code can see."""
    return {
        "autocast": [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward derivatives": torch._C._is_fwd_grad_enabled(),
        "threads of a backward": torch._C._is_multithreading_enabled(),
        "saved-tensor hooks": _saved_tensors_hooks(),
        "function modes": torch.overrides._get_current_function_mode_stack()[-1:],
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "default device": torch.get_default_device(),
        "cuda": torch.cuda.is_initialized() and (
            torch.cuda.current_device(), torch.cuda.current_stream(),
        ),
    }  # fmt: skip


def test_everything_that_torch_keeps_for_a_thread_is_carried():
    plain = kept_for_a_thread()
    hooks = torch.autograd.graph.saved_tensors_hooks
    contexts = [
        torch.device("meta"), torch.autocast("cpu", torch.float16, cache_enabled=False),
        torch.no_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(False),
        torch.autograd.set_multithreading_enabled(False), hooks(abs, abs), hooks(len, len),
        Counted(), FlopCounterMode(display=False),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        want = kept_for_a_thread()
        one = Coroutine(kept_for_a_thread)
    assert one.resume() and one.result == want
    same = {name for name in want if want[name] == plain[name]}
    assert same <= {"inference", "cuda"}, same
    assert kept_for_a_thread() == plain
    torch.set_default_device("meta")
    try:
        other = Coroutine(torch.get_default_device)
    finally:
        torch.set_default_device(None)
    assert other.resume() and other.result == torch.device("meta")
    again = Coroutine(kept_for_a_thread)  # in the same thread
    assert again.resume() and again.result == plain


def test_save_on_cpu_around_a_coroutine_packs_what_its_graph_saves():
    packed = []

    def run():
        return (torch.ones(2, requires_grad=True) * torch.ones(2)).exp()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        one = Coroutine(run)
    assert one.resume() and len(packed) == 2
    one.result.sum().backward()


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
