"""Messages between two ranks: contents, order, tags, what is recorded, and what happens when nobody
comes."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import runtime
from disttensor.comm import messages, p2p
from tests.support.pool import fake_world, on_ranks

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16,
    torch.bool,
    torch.uint8, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def exchange(x, tag):
    """x of the other rank of two."""
    other = 1 - dist.get_rank()
    pending = p2p.receive(x.shape, x.dtype, CPU, other, tag, "a test")
    p2p.send(x, other, tag, "a test")
    return pending.wait()


@on_ranks(2)
def test_every_dtype_arrives_bit_for_bit():
    for dtype in DTYPES:
        for shape in [(), (3,), (2, 5), (0, 2)]:
            both = [(torch.arange(10)[: torch.Size(shape).numel()] + r) for r in range(2)]
            x, y = (t.reshape(shape).to(dtype) for t in both)
            mine, want = (x, y) if dist.get_rank() == 0 else (y, x)
            got = exchange(mine, p2p.next_tag())
            assert got.shape == want.shape and got.dtype == dtype
            assert torch.equal(
                got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
            )


@on_ranks(2)
def test_what_is_sent_is_a_copy_of_what_the_tensor_means():
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    for x in (torch.arange(6.0).reshape(2, 3).t(), z.conj(), z.conj().imag):
        assert torch.equal(exchange(x, p2p.next_tag()), x)
    tag, rank = p2p.next_tag(), dist.get_rank()
    if rank == 0:
        x = torch.ones(1 << 18, requires_grad=True)
        p2p.send(x, 1, tag)
        with torch.no_grad():
            x.zero_()  # the other rank has not even asked for it
    dist.barrier()
    if rank == 1:
        got = p2p.receive((1 << 18,), torch.float32, CPU, 0, tag).wait()
        assert torch.equal(got, torch.ones(1 << 18)) and not got.requires_grad
    p2p.flush(30)


@on_ranks(2)
def test_sending_does_not_wait_and_tags_keep_messages_apart():
    tags = [p2p.next_tag() for _ in range(5)]
    if dist.get_rank() == 0:
        for tag in tags:
            p2p.send(torch.full((1 << 16,), tag), 1, tag)
            p2p.send(torch.full((3,), -tag), 1, tag)
            p2p.send(torch.full((2,), tag + 1), 1, tag + 1)
        gc.collect()
    dist.barrier()  # all of it has been sent before any of it is asked for
    if dist.get_rank() == 1:
        for tag in reversed(tags):
            back = p2p.receive((2,), torch.int64, CPU, 0, tag + 1)
            first = p2p.receive((1 << 16,), torch.int64, CPU, 0, tag)
            second = p2p.receive((3,), torch.int64, CPU, 0, tag)
            assert second.wait().tolist() == [-tag] * 3  # in the order of one tag
            assert (first.wait() == tag).all() and back.wait().tolist() == [tag + 1] * 2
            assert first.wait() is not None  # as often as one likes
    p2p.flush(30)


@on_ranks(2)
def test_a_message_that_nobody_waits_for_is_taken():
    tag = p2p.next_tag()
    if dist.get_rank() == 0:
        p2p.send(torch.ones(1 << 16), 1, tag)
    else:
        p2p.receive((1 << 16,), torch.float32, CPU, 0, tag)  # and dropped
    gc.collect()
    p2p.flush(30)
    assert exchange(torch.ones(2), p2p.next_tag()).tolist() == [1, 1]


@on_ranks(2)
def test_a_message_is_recorded_once_by_its_sender():
    tag = p2p.next_tag()
    with dt.debugging.record_comms() as log:
        exchange(torch.zeros(3, 5, dtype=torch.bfloat16), tag)
    (entry,) = log
    rank = dist.get_rank()
    assert (entry.kind, entry.axis, entry.bytes) == ("send", f"{rank} -> {1 - rank}", 30)


@pytest.mark.parametrize(
    ("room", "sent", "same"),
    [(62, 2, False), (62, 60, True), (62, 63, True), (1000, 998, True), (1000, 1023, True)],
)
@on_ranks(2, timeout=120)
def test_a_message_of_another_size_is_an_error_with_the_lines_of_both(room, sent, same):
    """With the same tag it arrives, smaller or larger: there is room for each size of a class."""
    assert (messages.tag_with_size(0, 4 * room) == messages.tag_with_size(0, 4 * sent)) == same
    tag = p2p.next_tag()
    if dist.get_rank() == 0:
        p2p.send(torch.ones(sent), 1, tag, "a test")
        dist.barrier()
    else:
        pending = p2p.receive((room,), torch.float32, CPU, 0, tag, "a test")
        told = f"{4 * sent} bytes were sent at .*test_p2p.py:[0-9]+"
        told = f"{4 * sent} bytes were sent" if same else told
        what = "rank 1 receives from rank 0: a test"
        text = f"{what}: {told}, and {4 * room} are expected at .*test_p2p.py"
        with pytest.raises(dt.errors.MismatchError, match=text):
            pending.wait()
        if not same:  # rank 0 gets rid of it
            p2p.receive((sent,), torch.float32, CPU, 0, tag).wait()
        dist.barrier()
    p2p.flush(30)
    assert exchange(torch.ones(2), p2p.next_tag()).tolist() == [1, 1]


@on_ranks(2)
def test_what_is_sent_may_be_changed_after():
    tag = p2p.next_tag()
    sent = [torch.ones(1 << 12), torch.ones(1 << 13)[: 1 << 12], torch.ones(64, 64).t()]
    sent.append(torch.from_numpy(numpy.ones(1 << 12, dtype="float32")))
    if dist.get_rank() == 0:
        for x in sent:
            p2p.transfer([(1, x)], [], x.dtype, CPU, tag, "a test")
            x.zero_()  # the other rank has not even asked for it
    dist.barrier()
    if dist.get_rank() == 1:
        for x in sent:
            assert torch.equal(p2p.receive(x.shape, x.dtype, CPU, 0, tag).wait(), x)
    p2p.flush(30)


@on_ranks(2)
def test_what_is_asked_for_ahead_is_there_when_the_transfer_comes():
    other, known = 1 - dist.get_rank(), len(runtime.current_runtime().early)
    for shape, dtype in (((300,), torch.float32), ((150, 2), torch.int32), ((3,), torch.float32)):
        tag, x = p2p.next_tag(), torch.ones(shape, dtype=dtype)
        asked = p2p.post_early_receives([(other, (x.numel(),))], torch.float32, CPU, tag)
        assert p2p.is_unclaimed(asked) and asked == [(other, tag, messages.size_class(x.nbytes))]
        assert torch.equal(exchange(x, tag), x) and not p2p.is_unclaimed(asked)
    assert len(runtime.current_runtime().early) == known


@on_ranks(2)
def test_what_is_asked_for_ahead_and_never_comes_holds_nobody_up():
    other, tag = 1 - dist.get_rank(), p2p.next_tag()
    asked = p2p.post_early_receives([(other, (301,))], torch.float32, CPU, tag)
    assert exchange(torch.ones(600), tag).sum() == 600 and p2p.is_unclaimed(asked)
    p2p.flush(30)
    assert exchange(torch.ones(301), tag).sum() == 301 and not p2p.is_unclaimed(asked)


@on_ranks(2)
def test_what_is_asked_for_ahead_takes_each_size_of_its_class():
    other = 1 - dist.get_rank()
    for size in (300, 302, 319):
        tag = p2p.next_tag()
        asked = p2p.post_early_receives([(other, (301,))], torch.float32, CPU, tag)
        assert torch.equal(exchange(torch.arange(float(size)), tag), torch.arange(float(size)))
        assert not p2p.is_unclaimed(asked)


def test_classes_of_sizes():
    """There is room for each size of a class, at most an eighth more than needed."""
    sizes = [*range(5000), *(2**k + i for k in range(13, 39) for i in (-1, 0, 1))]
    sizes = [n for n in sizes if n < 1 << 38]
    classes = [messages.size_class(n) for n in sizes]
    assert classes == sorted(classes) and classes[0] == 0 and classes[-1] == 255
    for n, c in zip(sizes, classes, strict=True):
        room = messages._room(n)
        assert n < room and (messages.size_class(room - 1), messages.size_class(room)) in (
            (c, c + 1), (255, 255),
        )  # fmt: skip
        assert n < 64 or room <= 1.125 * n + 1


@on_ranks(2, timeout=60)
def test_a_sender_that_is_late_is_waited_for():
    """The receiver asks meanwhile."""
    tag = p2p.next_tag()
    if dist.get_rank() == 0:
        time.sleep(3.5)
        p2p.send(torch.ones(2), 1, tag)
    else:
        assert p2p.receive((2,), torch.float32, CPU, 0, tag).wait().tolist() == [1, 1]


def test_where_messages_have_no_tags_a_tensor_for_many_ranks_is_copied_once(monkeypatch):
    copied = []
    usual = p2p.copy_dense
    monkeypatch.setattr(p2p, "copy_dense", lambda x: (copied.append(x), usual(x))[1])
    with fake_world(8):
        x, y = torch.ones(3), torch.ones(3)
        p2p.send(x, range(1, 8), 1)
        assert [c is x for c in copied] == [True]
        p2p.transfer([(1, x), (2, y), (3, x)], [(4, (3,))], x.dtype, x.device, 2)
        assert [c is x for c in copied] == [True, True, False]


# Tags --------------------------------------------------------------------------------------------


def test_tags_count_by_channel():
    with fake_world(2):
        a, b = p2p.next_tag(), p2p.next_tag()
        with p2p.channel(3):
            c = p2p.next_tag()
            seen = []
            thread = threading.Thread(target=lambda: seen.append(p2p.next_tag()))
            thread.start()
            thread.join()  # a new thread is on everybody's channel
        with p2p.channel(p2p.CHANNELS - 1):
            last = p2p.next_tag()
        d = p2p.next_tag()
        tags = [a, b, c, last, d, *seen]
        assert len(set(tags)) == 6 and all(t % 2 == 0 and 2**30 <= t < 2**31 for t in tags)
        assert seen[0] - a == 4 and d - a == 6
    with fake_world(2):
        assert p2p.next_tag() == a  # another process group counts anew
    for bad in (-1, p2p.CHANNELS):
        with pytest.raises(ValueError, match="0 to 1023"), p2p.channel(bad):
            pass


def test_tags_wrap_within_an_int(monkeypatch):
    with fake_world(2), p2p.channel(p2p.CHANNELS - 1):
        first = p2p.next_tag()
        runtime.current_runtime().tags[p2p.CHANNELS - 1] = p2p._TRANSFERS - 1
        assert p2p.next_tag() == 2**30 + 2**messages.SIZES_AT - 2  # above are the bits of sizes
        assert p2p.next_tag() == first


# Failures ----------------------------------------------------------------------------------------


HEAD = """
import sys, time, datetime, torch, torch.distributed as dist
from disttensor.errors import CommError
from disttensor.comm import messages, p2p
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), None, False)
store.set(f"imported/{rank}", "")
store.wait(["imported/0", "imported/1"])  # not within the 3 s
dist.init_process_group("gloo", store=store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=3))
dist.barrier()
cpu = torch.device("cpu")
"""
BODIES = {
    "taken late": """
        if rank == 0:
            p2p.send(torch.ones(1 << 20), 1, p2p.next_tag())
            try:
                p2p.flush(0.1)
            except CommError as error:
                print(error, file=sys.stderr)
        else:
            time.sleep(1)
            got = p2p.receive((1 << 20,), torch.float32, cpu, 0, p2p.next_tag()).wait()
            assert (got == 1).all()
    """,
    "gone": """
        tag = p2p.next_tag()
        if rank == 1:
            raise KeyError("rank 1 has an error of its own")
        pending = p2p.receive((4,), torch.float32, cpu, 1, tag, "f32[4] on A -> f32[4] on B")
        for attempt in range(2):  # the second time it says the same, and gives no rubbish
            try:
                pending.wait()
                sys.exit(5)
            except CommError as error:
                print(error, file=sys.stderr)
        p2p.flush(3)
    """,
    "not taken": """
        tag = p2p.next_tag()
        if rank == 0:
            p2p.send(torch.ones(1 << 20), 1, tag, "the lost one")
            time.sleep(4)
            for attempt in range(2):
                try:
                    p2p.send(torch.ones(2), 1, tag + 2, "the next one")
                    sys.exit(5)
                except CommError as error:
                    print(error, file=sys.stderr)
        else:
            time.sleep(6)
    """,
}


@pytest.fixture(scope="module")
def ended() -> dict[str, list[tuple[int, str]]]:
    """(exit code, stderr) of two processes for each body, with a time limit of 3 s for messages.
    All run at once: they mostly wait."""
    started, stores = {}, []
    for name, body in BODIES.items():
        stores.append(dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False))
        command = [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(body)]
        started[name] = [
            subprocess.Popen(
                [*command, str(r), str(stores[-1].port)], cwd=ROOT, stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(2)
        ]  # fmt: skip
    try:
        return {
            name: [(p.returncode, err) for p in both for err in [p.communicate(timeout=200)[1]]]
            for name, both in started.items()
        }
    finally:
        for p in itertools.chain(*started.values()):
            p.kill()


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_process_stays_until_its_messages_are_taken(ended):
    """Rank 0 ends its program at once; rank 1 asks a second later."""
    first, second = ended["taken late"]
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "rank 0: 1 messages were not taken within 0.1 s" in first[1]


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_rank_that_is_gone_is_named(ended):
    first, second = ended["gone"]
    assert first[0] == 0 and second[0] == 1, (first, second)
    words = "rank 0 receives from rank 1: f32[4] on A -> f32[4] on B. This failed"
    assert first[1].count(words) == 2, first


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_message_that_is_not_taken_in_time_is_an_error_of_the_next(ended):
    first, second = ended["not taken"]
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert first[1].count("rank 0 sends to rank 1: the lost one. This failed") == 2, first
