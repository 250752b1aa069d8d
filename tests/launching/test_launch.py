"""launch: results, the first error, and the end of all ranks, on real processes."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor import run
from disttensor.comm.process_group import open_store
from disttensor.launching import rank
from disttensor.launching.rank import LinePrefixer
from tests.support import forked
from tests.support.pages import blocks

SECONDS = 10.0  # "soon"


def double(x: float) -> float:
    return 2 * x


def a_sum(n: int, size: int) -> float:
    return dt.ones(n, mesh=dt.init_mesh((size,)), placements=[dt.Shard(0)]).sum().item()


@pytest.mark.feature("Starting")
def test_results_of_all_ranks_come_back_by_rank() -> None:
    base = torch.arange(3.0)

    def total(n: int) -> tuple[int, float, torch.Tensor]:
        value = a_sum(n, 3)
        return int(os.environ["RANK"]), value, base + value

    results = dt.launch(total, 3, (5,))
    assert [(rank, value) for rank, value, _ in results] == [(0, 5.0), (1, 5.0), (2, 5.0)]
    assert all(x.equal(torch.tensor([5.0, 6.0, 7.0])) for *_, x in results)
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()
    assert dt.launch(sys.exit, 1, (0,)) == [None]


def test_ranks_can_be_spawned() -> None:
    assert dt.launch(double, 1, (1.5,), start_method="spawn") == [3.0]


def test_ranks_compute_after_their_parent_has_used_threads() -> None:
    """The threads of OpenMP and of a backward do not survive a fork."""

    def work() -> float:
        x = torch.ones(300, 300, requires_grad=True)
        (x @ x).sum().backward()
        return x.grad[0, 0].item() + a_sum(4, 2)

    torch.set_num_threads(2)
    try:
        big = torch.randn(700, 700, requires_grad=True)
        (big @ big).sum().backward()
        assert dt.launch(work, 2, timeout=60) == [604.0, 604.0]
    finally:
        torch.set_num_threads(1)


def test_output_of_ranks_comes_in_whole_lines() -> None:
    """In a notebook each write is shown, and a print writes its parts one by one."""

    class Notebook:
        def write(self, text: str) -> None:
            os.write(1, text.encode())
            time.sleep(0.001)  # the other ranks write meanwhile

        def flush(self) -> None:
            pass

    def program() -> None:
        sys.stdout = sys.stderr = Notebook()
        dt.launch(lambda: [print("one", "line") for _ in range(20)], 3)

    status, out = forked.run(program)
    assert status == 0 and out == "one line\n" * 60, out


def test_output_of_ranks_is_written_before_their_parent_ends_them() -> None:
    """Python keeps what a program prints into a file or a pipe in a buffer."""

    def program() -> None:
        sys.stdout, leave = open(1, "w", closefd=False), rank.leave  # noqa: SIM115
        rank.leave = lambda status: (time.sleep(0.3), leave(status))
        dt.launch(lambda: print("line"), 2)

    assert forked.run(program) == (0, "line\n" * 2)


def test_ctrl_c_in_a_new_fork_does_not_run_the_rest_of_the_program() -> None:
    def program() -> None:
        fork = os.fork

        def interrupted() -> int:
            pid = fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return pid

        os.fork = interrupted
        try:
            print(dt.launch(double, 2, (1.5,)))
        finally:
            print("the end")

    assert forked.run(program) == (0, "[3.0, 3.0]\nthe end\n")


class Pieces(io.StringIO):
    """A stream that keeps what each write has written."""

    def write(self, text: str) -> int:
        pieces.append(text)
        return len(text)


pieces: list[str] = []


def test_lines_end_by_a_newline_or_a_carriage_return() -> None:
    for texts, expected in (
        (["a", "b\n", "c"], ["> ab\n", "> c\n"]),
        (["a\r\nb", "\r", "\nc\n\n"], ["> a\r\n", "> b\r\n> c\n> \n"]),
        (["\r1 %", "\r2 %", "\r3 %\n"], ["> \r", "> 1 %\r", "> 2 %\r> 3 %\n"]),
        (["wait", "\r", "", "done\n"], ["> wait\r> done\n"]),
    ):
        pieces.clear()
        lines = LinePrefixer(Pieces(), "> ")
        for text in texts:
            assert lines.write(text) == len(text)
        lines.finish()
        lines.finish()
        assert pieces == expected


@pytest.mark.parametrize("text", ["\r9 steps of a progress bar, 40 letters", "one of many dots"])
def test_the_time_of_output_without_newlines_grows_with_its_length(text: str) -> None:
    def seconds(count: int) -> float:
        lines, start = LinePrefixer(io.StringIO()), time.perf_counter()
        for _ in range(count):
            lines.write(text)
        assert "\r" not in text or len(lines.rest) < 50
        return time.perf_counter() - start

    assert min(seconds(16000) for _ in range(3)) < 8 * max(seconds(4000) for _ in range(3)) < 2


@pytest.mark.parametrize("how", ["launch", "local_ranks"])
def test_the_last_line_of_a_rank_is_printed_without_its_end(how: str) -> None:
    def program() -> None:
        if how == "launch":
            sys.stdout = Shown()
            dt.launch(lambda: print("almost", end=""), 2)
        else:
            with dt.local_ranks(2, output="all") as rank:
                print("almost" if rank else "", end="")

    class Shown:
        def write(self, text: str) -> None:
            os.write(1, text.encode())

        def flush(self) -> None:
            pass

    status, out = forked.run(program)
    assert status == 0 and out == ("almost\n" * 2 if how == "launch" else "[rank 1] almost\n"), out


def listening(port: int) -> set[str]:
    """Returns the addresses at which some process of this machine listens at ``port``."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for t in tables if t.exists() for row in t.read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, at in found if int(at, 16) == port}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_the_store_of_ranks_on_this_machine_listens_on_the_loopback_only() -> None:
    local = "0100007F"

    def at_store() -> set[str]:
        return listening(int(os.environ["MASTER_PORT"]))

    assert dt.launch(at_store, 2) == [{local}] * 2
    with dt.local_ranks(2):
        assert at_store() == {local}
    for host in ("127.0.0.1", "localhost"):  # as rank 0 that a script has started
        first = open_store(host, 0, keeps=True)
        again = open_store(host, first.port, keeps=True)  # a second world of this process
        first.set("key", "value")
        assert again.get("key") == b"value" and listening(first.port) == {local}
    elsewhere = open_store(socket.gethostname(), 0, keeps=True)
    assert listening(elsewhere.port) and local not in listening(elsewhere.port)


def fails(how: Callable[[], Any]) -> Callable[[], Any]:
    """On rank 1, while the others wait for it."""

    def work() -> Any:
        a_sum(4, 3)
        if os.environ["RANK"] == "1":
            return how()
        return a_sum(5, 3)

    return work


def bad() -> None:
    raise ValueError("a bad value")


ERRORS = {
    "raises": (
        bad,
        r"ValueError: a bad value\n\nTraceback .*in work\n.*in bad\n.*ValueError: a bad value$",
    ),
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        r"\(process \d+\) was killed by SIGKILL",
    ),
    "exits": (lambda: os._exit(3), r"\(process \d+\) ended with exit code 3"),
    "sys.exit": (lambda: sys.exit("no data"), "SystemExit: no data"),
}


@pytest.mark.parametrize("how", ERRORS)
def test_the_first_error_comes_back_with_its_rank_and_traceback(how: str) -> None:
    function, words = ERRORS[how]
    start = time.monotonic()
    with pytest.raises(dt.errors.RankError, match=r"^launch: rank 1 of 3") as caught:
        dt.launch(fails(function), 3)
    assert caught.value.rank == 1
    assert re.search(words, str(caught.value), re.DOTALL), caught.value
    assert "run_rank" not in str(caught.value)  # no frames of the launcher
    assert time.monotonic() - start < SECONDS


def test_a_result_that_cannot_be_sent_is_an_error_that_says_so() -> None:
    with pytest.raises(dt.errors.RankError, match=r"rank 0 .* of type generator, cannot be sent"):
        dt.launch(lambda: (i for i in range(3)), 1)
    with pytest.raises(RuntimeError, match=r"result of rank 0 .*return x.full_tensor\(\)"):
        dt.launch(lambda: dt.ones(2, mesh=dt.init_mesh((2,))), 2)


def test_a_time_limit_ends_all_ranks() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 had not ended after 1.5 s"):
        dt.launch(lambda: time.sleep(100 * int(os.environ["RANK"])), 2, timeout=1.5)


@pytest.mark.parametrize(
    "by", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name
)
@pytest.mark.parametrize("how", ["launch", "local_ranks", "run"])
def test_no_rank_is_left_when_the_parent_is_ended(
    how: str, by: signal.Signals, tmp_path: Path
) -> None:
    """The output of the program is at its end when no process is left."""
    script = tmp_path / "loop.py"
    script.write_text("import os\nos.write(1, b'rank ')\nwhile True: pass")

    def busy(write: int) -> None:
        x = dt.ones(4, mesh=dt.init_mesh((2,)), placements=[dt.Shard(0)])
        x.sum().item()
        os.write(write, b"rank ")
        while True:
            if os.environ["RANK"] == "1":  # the other rank waits for it
                time.sleep(0.01)
            x.sum().item()

    def program() -> int | None:
        if how == "run":
            return run.main(["--nproc=2", str(script)])
        if how == "launch":
            dt.launch(busy, 2, (1,))
        write = os.dup(1)  # the output of rank 1 is silenced
        with dt.local_ranks(2):
            busy(write)
        return 0

    pid, out = forked.start(program)
    seen = ""
    while seen.count("rank ") < 2:
        seen += out.read(1)
    os.kill(pid, by)
    killed = time.monotonic()
    status, text = forked.end_of(pid, out)
    assert time.monotonic() - killed < SECONDS
    if by == signal.SIGINT:
        assert "KeyboardInterrupt" in text or "interrupted: all 2 processes have ended" in text
        assert status in (1, 130)
    elif by == signal.SIGKILL:
        assert status == -by


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_while_the_launcher_looks_at_its_ranks_ends_them(
    by: signal.Signals, tmp_path: Path
) -> None:
    """An exception where ``Popen.poll`` has taken its lock would leave the lock taken."""
    script = tmp_path / "loop.py"
    script.write_text("while True: pass")

    def signal_in_poll(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_return" and frame.f_code.co_name == "_internal_poll":
            assert function.__name__ == "acquire"
            sys.setprofile(None)
            os.kill(os.getpid(), by)

    def program() -> int:
        sys.setprofile(signal_in_poll)
        return run.main(["--nproc=2", str(script)])

    start = time.monotonic()
    status, text = forked.run(program)
    assert time.monotonic() - start < 3 * SECONDS  # with the start; a lock is taken for ever
    assert status == 128 + by and "all 2 processes have ended" in text


def test_what_cannot_be_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match=r"launch: .* started as a rank \(RANK in the env"):
        dt.launch(double, 2, (1,))
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="start_method='fork': this process has used CUDA"):
        dt.launch(double, 2, (1,), start_method="fork")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(double, "__module__", "__main__")
    with pytest.raises(RuntimeError, match="double is defined in a notebook or a shell"):
        dt.launch(double, 2, (1,))


def test_the_page_prints_what_it_shows() -> None:
    found = [*blocks("docs/launching.md")]
    code = "\n".join(text for language, _, text in found if language == "py")
    shown = [text for language, _, text in found if language == "text"]
    status, out = forked.run(lambda: exec(code, {"__name__": "__main__"}))
    assert status == 0 and out.splitlines() == "\n".join(shown).splitlines(), out
