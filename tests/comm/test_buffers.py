"""Memory that is kept on the host for what is needed for a moment."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from disttensor.comm import buffers
from disttensor.comm.buffers import Buffers
from disttensor.gradients import memory
from disttensor.gradients.memory import GradBucket

CPU = torch.device("cpu")


def sizes(some: Buffers) -> list[int]:
    return [storage.nbytes() for storage in some.storages]


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    buffers.current_buffers().storages.clear()
    first = buffers.empty(100, torch.float32, CPU)
    at, kept = first.data_ptr(), first[10:20].fill_(1)
    del first
    assert buffers.empty(100, torch.float32, CPU).data_ptr() != at  # a view holds it
    assert kept.tolist() == [1] * 10
    del kept
    again = {buffers.empty(n, torch.float32, CPU).data_ptr() for n in (90, 100)}
    assert len(again) == 1 and buffers.empty(50, torch.float64, CPU).shape == (50,)
    assert sizes(buffers.current_buffers()) == [400, 400]


def test_memory_is_used_again_after_a_compilation_that_failed() -> None:
    """torch.compile leaves its own evaluation of frames in place, in which a call of a Python
    function holds one more reference to each argument."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(breaks, fullgraph=True, backend="eager")(torch.ones(2))
    some = Buffers()
    some.take(100)
    some.take(100)
    assert sizes(some) == [100]
    bucket = GradBucket([torch.Size([2])], [2], torch.ones(2), torch.float32)
    assert bucket.is_free(0) and memory.users([torch.zeros(1)], 0) == memory.FREE


def test_what_is_much_larger_is_taken_where_there_would_be_too_much() -> None:
    some = Buffers()
    some.take(900)
    assert some.take(800).nbytes() == 900
    assert some.take(200).nbytes() == 200
    assert some.take(700).nbytes() == 900
    assert some.take(400).nbytes() == 400 and sizes(some) == [400]


def test_little_more_is_kept_than_was_in_use_at_once() -> None:
    some = Buffers()
    for nbytes in (100, 300, 140):
        some.take(nbytes)
        assert sum(sizes(some)) <= some.most * 5 / 4
    assert some.most == 300 and sizes(some) == [140]  # what was used last is kept
    both = [some.take(nbytes) for nbytes in (140, 300)]
    assert sizes(some) == [140, 300] and some.most == 440
    del both
    some.take(900)
    assert sizes(some) == [900] and some.most == 900
    some.take(200)
    assert sizes(some) == [900, 200]
    some = Buffers()
    held = some.take(100)
    for nbytes in (300, 110):  # behind what is in use
        some.take(nbytes)
    assert sizes(some) == [held.nbytes(), 110] and some.most == 400


def test_a_storage_keeps_its_place_while_its_memory_goes() -> None:
    some, storages = Buffers(), [torch.UntypedStorage(0) for _ in range(2)]
    one, other = storages
    some.fill(one, 64)
    at, x = one.data_ptr(), torch.empty(0).set_(one, 0, (16,), (1,))
    x.fill_(2)
    some.drain(one)
    assert one.nbytes() == 0 and sizes(some) == [64]
    some.fill(other, 60)
    assert other.data_ptr() == at and not some.storages and some.lent == 64
    some.fill(one, 64)  # both at once
    assert one.data_ptr() != at and some.most == 128
    x.fill_(3)
    assert torch.empty(0).set_(other, 0, (15,), (1,)).tolist() == [2] * 15


def test_who_watches_operators_sees_memory_come_and_go() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    buffers.current_buffers().storages.clear()
    storage = torch.UntypedStorage(0)
    buffers.fill(storage, 64)
    with Watching():
        buffers.empty(4, torch.float32, CPU)
        buffers.drain(storage)
    assert storage.nbytes() == 0 and not buffers.current_buffers().storages


def test_two_threads_never_have_the_same_memory() -> None:
    before, wrong = sys.getswitchinterval(), list[Any]()

    def run(own: int) -> None:
        try:
            for i in range(4000):
                x = buffers.empty(1000 + i % 7, torch.int64, CPU).fill_(own)
                assert int(x.sum()) == own * len(x)
        except Exception as error:
            wrong.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(own,)) for own in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
