"""The thread that watches: it looks at this rank, answers other ranks, and prints a diagnosis."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

from disttensor.checks import check_positive
from disttensor.comm.process_group import attempt, read_key, world
from disttensor.comm.reports import Reports, Topic, address_of
from disttensor.hangs.diagnosis import diagnose, situation
from disttensor.hangs.flight import StartedCollective, start_recorder
from disttensor.hangs.status import MainThread, Status
from disttensor.torch_private import default_group, default_store, import_names_of_lines

PERIOD = 0.5  # seconds between two looks
_ANSWERS = 1.5  # seconds for other ranks to post where they are


def watch(seconds: float = 3.0) -> None:
    """Prints why the ranks of this program wait for each other, whatever library they use.

    Call it on every rank, before the process group starts. When a rank has waited for ``seconds``
    in a collective or a message of ``torch.distributed``, one rank prints which rank differs and
    where each rank is: its line, its collective with sizes, group and number, an exception that it
    handles, a data loader that it waits for. The program goes on as before. Use ``python -m
    disttensor.watch --nproc 4 script.py`` to watch a script without changes.

    >>> dt.watch()  # doctest: +SKIP
    """
    check_positive("watch: seconds", seconds, "a positive number")
    start_recorder()
    import_names_of_lines()
    running = [t for t in threading.enumerate() if isinstance(t, Watch)]
    if running:
        running[0].seconds = float(seconds)
    else:
        Watch(float(seconds)).start()


class Watch(threading.Thread):
    """Keys in the store: asked (the number of questions so far), asker (the rank that asks, and
    the questions before), told (the situation that was printed last), status/n/r (the answer of
    rank r to question n)."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.seconds = seconds
        self.main = MainThread()
        self.reports: Reports | None = None
        self.world: Any = None  # the process group of ``reports``, or "agent"
        self.asker = ""  # which was found to ask
        self.answered = 0  # the last question that this rank has answered
        self.told = ""  # the last situation that has been printed
        self.next = 0.0  # when this rank may ask again
        self.ended = threading.Event()

    def start(self) -> None:
        super().start()
        atexit.register(self.end)

    def end(self) -> None:
        """Ends the thread before Python does, which would abort the process if the thread is in a
        call of the store."""
        self.ended.set()
        self.join(2 * _ANSWERS)

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                self._look()
            except Exception:  # the store is gone, with the rank or the launcher that keeps it
                self.reports = None
            self.ended.wait(PERIOD)

    def _look(self) -> None:
        still = self.main.look()
        reports = self._connect()
        if reports is None or reports.is_closed():
            return
        number = reports.store.add("asked", 0)
        if number > self.answered:
            self._answer(reports, number, self.main.status(reports.rank))
        if still < self.seconds:
            if self.told and still < PERIOD:
                self._print(f"watch: rank {reports.rank} goes on")
                self.told, self.next = "", 0.0
                reports.store.delete_key("told")
        elif time.monotonic() >= self.next:
            self.next = time.monotonic() + self.seconds
            status = self.main.status(reports.rank)
            if status.waits():
                self._ask(reports, status)

    def _connect(self) -> Reports | None:
        """Returns the posts of the world, from the time when its store can be known."""
        is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        now = "agent" if is_agent and "RANK" in os.environ else default_group()
        if now is None or now is self.world:
            return self.reports
        if is_agent:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        else:
            try:
                address, (rank, size) = address_of(default_store()), world()
            except AttributeError:  # of another type, as in a simulation, which ends
                return self.reports
        self.reports, self.world = Reports(*address, f"watch/{attempt()}", rank, size), now
        return self.reports

    def _answer(self, reports: Reports, number: int, status: Status) -> None:
        self.answered = number
        _answers(number).post(reports, status)

    def _ask(self, reports: Reports, status: Status) -> None:
        """Collects where all ranks are, and prints a diagnosis unless it is known. One rank of the
        waiting ones does this at a time."""
        store, rank = reports.store, reports.rank
        mine = f"{rank} {store.add('asked', 0)}"
        asker = store.compare_set("asker", "", mine).decode()
        is_gone = reports.process_state(int(asker.split()[0])) == ""
        if asker not in (mine, self.asker) and not is_gone:
            self.asker = asker  # if it still asks at the next look, it has ended elsewhere
            self.next = time.monotonic() + max(self.seconds, 2 * _ANSWERS)
            return
        store.set("asker", mine)
        try:
            self._collect(reports, store.add("asked", 1), status)
        finally:
            store.delete_key("asker")

    def _collect(self, reports: Reports, number: int, status: Status) -> None:
        store = reports.store
        self._answer(reports, number, status)
        topic = _answers(number)
        found = topic.gather(reports, range(reports.size), _ANSWERS)
        silent = {r: reports.process_state(r) for r in range(reports.size) if r not in found}
        now = situation(found, silent)
        if now != (read_key(store, "told") or ""):
            store.set("told", now)
            self._print(diagnose(found, silent))
        self.told, self.next = now, time.monotonic() + 2 * self.seconds
        for r in range(reports.size):
            topic.withdraw(reports, r)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _answers(number: int) -> Topic[Status]:
    """Returns the topic of the answers to a question."""
    return Topic(f"status/{number}", _status)


def _status(*values: Any) -> Status:
    status = Status(*values)
    return status._replace(collectives=[StartedCollective(*c) for c in status.collectives])
