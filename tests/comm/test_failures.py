"""One rank fails: all end, soon, with an error that names it. Real processes, which die."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from disttensor import runtime
from disttensor.comm import failure_watch, groups, lone_failure, reports
from disttensor.comm.process_group import missing_ranks, open_store, read_key
from disttensor.comm.reports import process_state
from disttensor.simulate.world import simulated_rank
from tests.comm.deaths import PROGRAMS
from tests.support.part import part
from tests.support.pool import fake_world, on_ranks

ROOT = Path(__file__).resolve().parents[2]
SOME = 2  # of all, in a run
HOW = {
    "raise": "rank {} failed first: ValueError: out of cheese",
    "kill": "rank {} is gone without a word",
    "_exit": "rank {} is gone without a word",
    "leave": "rank {} has ended its program before the others",
}
ALL = [
    "-".join(point)
    for point in itertools.product(PROGRAMS, HOW, "012")
    if point[0] != "early" and (point[0] != "backward" or point[2] == "1")
]
ALWAYS = ["data-slow-1", "stages-raise-1", "stages-kill-1", "data-leave-2", "data-raise-0"]
ALWAYS += ["late-raise-2", "unheard-leave-0", "unheard-kill-1"]
EARLY = ["early-_exit-2", "early-leave-0"]


@pytest.fixture(scope="module")
def worlds():
    """{name: (exit status, seconds, stderr) of each rank}: one start for all worlds."""
    names = dict.fromkeys([*EARLY, *ALWAYS, *part(ALL, SOME)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.comm.deaths", *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.limit(400)
def test_the_rank_that_died_is_named_by_all(worlds):
    """Killed, ended early or by an error of its own; in stages, steps and while groups are made."""
    for name, ranks in worlds.items():
        if name in EARLY:
            continue
        where, how, dying = name.split("-")
        for rank, (status, seconds, text) in enumerate(ranks):
            if rank == int(dying):
                continue
            told = f"{name}: rank {rank}: {status} after {seconds} s\n{text}"
            if how == "slow":  # nobody died: all say where they are
                assert status == 1 and "All ranks live. Where they are:" in text, told
                assert f"rank {dying}: after 1 optimizer steps" in text, told
                continue
            assert seconds < 30, told  # groups wait for 60 s
            if status == 0:  # it needed nothing of that rank any more
                assert where == "backward" or (where, dying, how) == ("stages", "2", "leave"), told
                continue
            words = HOW[how].format(dying)
            if where == "unheard":
                words = f"ranks [{dying}] ended before they made a mesh"
            if dying == "0" and (where == "unheard" or how in ("kill", "_exit")):
                words = "The store of the world is gone, with rank 0"  # which keeps it
            assert status == 1 and words in text, told


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_rank_that_never_came_is_named(worlds):
    for name in EARLY:
        for rank, (status, _, text) in enumerate(worlds[name]):
            if str(rank) != name[-1]:
                assert status == 1, text
                words = (
                    "ranks [2] did not come within 4 s" if name[-1] == "2" else "rank 0 keeps it"
                )
                assert words in text, text


@on_ranks(2)
def test_a_process_lives_on_where_the_one_that_started_it_has_ended():
    """A worker may be started by a script that ends; torchrun ends its workers itself."""
    parent, os.environ["TORCHELASTIC_RUN_ID"] = os.getppid, "run"
    try:
        started = failure_watch.Watcher(runtime.current_runtime())
        os.getppid = lambda: parent() + 1
        time.sleep(2.5 * failure_watch.PERIOD)
    finally:
        os.getppid = parent
        del os.environ["TORCHELASTIC_RUN_ID"]
        started.stop()


@on_ranks(2)
def test_a_fork_of_a_rank_posts_neither_its_end_nor_its_error():
    watcher = failure_watch.watcher_of(runtime.current_runtime())
    assert watcher is not None
    child = os.fork()
    if not child:
        try:
            failure_watch.post("the child failed")
            failure_watch.leave()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    keys = [f"left/{r}" for r in range(2)]
    assert not any(watcher.store.check([key]) for key in ("failed", *keys))
    assert watcher.failed_rank() is None and watcher.store.add("ended", 0) == 0
    failure_watch.watcher_of(runtime.current_runtime()).submit(lambda store: None).wait()


@on_ranks(2)
def test_a_store_that_ends_while_a_watcher_starts_ends_no_program(monkeypatch):
    """The store has answered, and does not accept the connection of the watcher."""

    def refused(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(reports.socket, "create_connection", refused)
    now = runtime.current_runtime()
    before, now.watcher = now.watcher, None
    try:
        assert failure_watch.watcher_of(now) is None
        failure_watch.watch()
    finally:
        now.watcher = before


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "HashStore"])
def test_a_key_that_another_rank_deletes_is_read_whole_or_as_absent(kind, tmp_path):
    """And without a wait for it: ``get`` waits, or returns an empty text, after a deletion."""
    open_ = {
        "TCPStore": lambda: open_store("127.0.0.1", 0, True, 1, timedelta(seconds=5)),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "HashStore": dist.HashStore,
    }
    store = open_[kind]()
    store.set_timeout(timedelta(seconds=5))
    prefixed = dist.PrefixStore("world", store)
    assert read_key(prefixed, "key") is None and not prefixed.check(["key"])
    prefixed.set("key", "")
    assert read_key(prefixed, "key") == ""
    if kind == "TCPStore":
        stop = threading.Event()
        other = dist.PrefixStore("world", dist.TCPStore("127.0.0.1", store.port, None, False))

        def come_and_go():
            while not stop.is_set():
                other.set("key", "text")
                other.delete_key("key")

        prefixed.delete_key("key")
        thread = threading.Thread(target=come_and_go)
        thread.start()
        try:
            assert {read_key(prefixed, "key") for _ in range(5000)} == {None, "text"}
        finally:
            stop.set()
            thread.join()


def test_a_rank_that_comes_after_the_others_have_given_up_gets_their_answer():
    store = dist.HashStore()
    assert missing_ranks(store, "place", 0, range(3), 0.1, lambda: True) == [1, 2]
    for rank in (1, 2):
        assert missing_ranks(store, "place", rank, range(3), 60.0) == [1, 2]


class Beside(SimpleNamespace):
    """The watcher of rank 1, without its thread."""

    def __init__(self, **more):
        super().__init__(store=dist.HashStore(), rank=1, size=2, failed="", lost=False, **more)


def test_a_group_is_not_made_with_a_member_that_has_ended_since_it_came(monkeypatch):
    """torch would wait for the member until the time limit."""
    beside = Beside(failed_rank=lambda ranks: 0, runtime=lambda: None)
    for key in ("group/name/0", "group/name/0 is here"):
        beside.store.set(key, "")
    monkeypatch.setattr(failure_watch, "watcher_of", lambda now: beside)
    with pytest.raises(RuntimeError, match="one of them has failed"):
        groups._wait_for_members((0, 1), "", "name", timedelta(seconds=5))


def test_an_error_raised_while_an_earlier_one_is_withdrawn_is_posted(monkeypatch):
    def raised(nth):
        return lone_failure.Raised((0, 1), 0, nth, "", None, 0.0)

    beside = Beside()
    now = SimpleNamespace(watcher=beside, raised=raised(1)._replace(mark="a mark"), posted=None)

    def mark():
        now.raised = raised(2)

    monkeypatch.setattr(lone_failure, "last_runtime", lambda: now)
    monkeypatch.setattr(lone_failure, "_mark", mark)
    for _ in range(2):
        lone_failure._post(beside)
    assert json.loads(read_key(beside.store, "raised")) == [1, [[0, 1], 0, 2, ""]]


@on_ranks(2)
def test_a_watcher_lives_on_after_a_simulation():
    now = runtime.current_runtime()
    watcher = failure_watch.watcher_of(now)
    with simulated_rank(0, 4, data=True):
        watcher.submit(lambda store: None).wait()
        time.sleep(0.2)
    watcher.submit(lambda store: None).wait()
    assert watcher.thread.is_alive() and not watcher.stopped.is_set()


def test_two_threads_that_enter_a_world_share_its_state(monkeypatch):
    found = []
    monkeypatch.setattr(runtime, "clear_caches", lambda: time.sleep(0.2))
    with fake_world(2):
        enter = [
            threading.Thread(target=lambda: found.append(runtime.current_runtime()))
            for _ in range(2)
        ]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in enter:
                step(thread)
        assert found[0] is found[1] is runtime.current_runtime()


class Store:
    def __init__(self, ended: int) -> None:
        self.ended = ended

    def add(self, key: str, count: int) -> int:
        assert key == "ended" and not count
        return self.ended

    def set(self, key: str, value: str) -> None:
        assert key == "left/0"


@pytest.mark.parametrize("ended, raised", [(2, False), (1, False), (1, True)])
def test_the_rank_that_keeps_the_store_posts_its_end_to_those_that_still_run(
    ended, raised, monkeypatch
):
    """A rank with an error of its own has posted the error."""
    now = time.monotonic()
    clock = itertools.count(now)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))  # a second for each look
    posted: list[str] = []
    beside = SimpleNamespace(
        lost=False,
        failed="",
        rank=0,
        size=3,
        keeps_store=True,
        store=Store(ended),
        stop=list,
        is_closed=bool,
    )
    monkeypatch.setattr(failure_watch, "last_runtime", lambda: SimpleNamespace(watcher=beside))
    monkeypatch.setattr(failure_watch, "post", posted.append)
    if raised:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    else:
        monkeypatch.delattr(sys, "last_value", raising=False)
    failure_watch.leave()
    told = ["rank 0 has ended its program before the others"]
    assert posted == (told if ended < 2 and not raised else [])


def test_a_process_that_has_ended_does_not_run():
    assert process_state(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays, as a zombie
    assert not process_state(child.pid)
    child.wait()
    assert not process_state(child.pid)
