"""Caches are bounded, drop the oldest entry first, and can all be emptied at once."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from typing import Any

import torch

import disttensor as dt
from disttensor import cache, errors, runtime
from disttensor.cache import Cache, cached
from disttensor.comm import buffers
from disttensor.dispatch import function_body
from tests.support import forked


def test_the_oldest_entry_goes_first() -> None:
    squares: Cache[int, int] = Cache(3)
    for i in range(5):
        squares[i] = i * i
    assert squares == {2: 4, 3: 9, 4: 16}
    squares[3] = 10  # no new entry: nothing is dropped
    assert squares == {2: 4, 3: 10, 4: 16} and squares.get(0) is None


def test_clear_empties_every_cache() -> None:
    calls = []

    @cached(8)
    def double(x: int) -> int:
        calls.append(x)
        return 2 * x

    own: Cache[str, int] = Cache(8)
    own["a"] = double(1) + double(1)
    assert own == {"a": 4} and calls == [1]
    cache.clear_caches()
    assert not own and double(1) == 2 and calls == [1, 1]


def test_a_cache_dies_with_its_owner() -> None:
    own: Cache[str, int] = Cache(8)
    known, gone = len(cache._dicts), weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None and len(cache._dicts) == known - 1


def test_threads_may_share_a_cache() -> None:
    shared: Cache[int, int] = Cache(4)

    def fill(start: int) -> None:
        for i in range(start, start + 5000):
            shared[i] = i

    threads = [threading.Thread(target=fill, args=(10000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shared) == 4 and shared == {i: i for i in shared}


def test_functions_that_are_made_for_each_call_are_not_kept() -> None:
    mesh = dt.ProcessMesh([0], ("x",))
    x, gone = dt.ones(3, mesh=mesh), []
    before = len(function_body._bodies), len(errors.warned)

    def call() -> None:
        def local(t: Any) -> Any:
            if type(t) is torch.Tensor:
                return t
            return torch.overrides.handle_torch_function(local, (t,), t)

        local.__module__ = "mine"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            local(x)
        gone.append(weakref.ref(local))

    for _ in range(5):
        call()
    cache.clear_caches()  # of the plans, which hold their functions
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5
    after = len(function_body._bodies), len(errors.warned)
    assert after[0] == before[0] and after[1] <= before[1] + 1


def test_a_fork_finds_the_locks_free() -> None:
    """A loader forks its workers while a thread saves in the background."""
    held = threading.Event()

    def hold() -> None:
        with cache._lock, runtime._entering, buffers._lock:
            held.set()
            time.sleep(0.3)

    def use() -> int:
        signal.alarm(20)
        Cache[int, int](1)[0] = 0
        with runtime._entering, buffers._lock:
            return 0

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid, output = forked.start(use)
    with output:
        assert output.read() == ""
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
