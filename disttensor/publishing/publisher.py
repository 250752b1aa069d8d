"""publish: sends the weights of a model to other worlds, while training goes on.

Note on rounds. A thread of each rank sends. Rank 0 decides what comes next, and writes each
decision to a key of its own, which the other ranks read: "serve" (a receiver gets a version),
"drop" (a receiver has left or was lost), "end". So all ranks make the same rounds in one order.

Note on versions. ``send`` copies the pieces of this rank. When it returns, all ranks know how many
rounds rank 0 had decided before the version was there: later rounds use this version or a newer
one. So a rank may free the older copies after these rounds.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
from torch import nn

from disttensor.checks import check_dtype, check_int, check_positive
from disttensor.comm.agree import agree
from disttensor.comm.compare_values import compare_values, is_due
from disttensor.comm.groups import world_group
from disttensor.comm.objects import gather_results, run_on_all_ranks
from disttensor.comm.process_group import open_store, read_key, world
from disttensor.errors import CommError, MismatchError, headline
from disttensor.nn.shard_module import check_module
from disttensor.publishing.exchange import PieceExchange
from disttensor.publishing.lifeline import PAUSE, PUBLISHER, Lifeline, split_address
from disttensor.publishing.world_tensor import WorldTensor, tensors_of
from disttensor.tensor.checkpointable import has_box, spec_of_boxes
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import resharded

Tensor = torch.Tensor


def publish(
    model: nn.Module, address: str, *, dtype: torch.dtype | None = None, timeout: float = 60.0
) -> Publisher:
    """Offers the weights of ``model`` to other worlds (separate launches), which call
    ``dt.receive`` with the same address. Every rank of this world makes the call.

    Args:
        model: a module under any strategy, or a regular one, whose tensors are then global values.
        address: "host:port" of rank 0, which keeps a store there. Port 0: a free port, which
            ``publisher.address`` names. If the host is the loopback, only this machine can connect.
        dtype: in which floating-point tensors are sent, as ``torch.bfloat16``; None: as they are.
        timeout: seconds that one message to a receiver, and ``close``, may take.

    Returns:
        A Publisher. ``publisher.send(step)`` makes the weights available, ``publisher.close()``
        ends. Receivers may join and leave at any time.

    Raises:
        CommError: the address cannot be used.
        MismatchError: the ranks give other models.

    >>> model, copy = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    >>> publisher = dt.publish(dt.shard_module(model, mesh), "127.0.0.1:0", dtype=torch.bfloat16)
    >>> receiver = dt.receive(copy, publisher.address)  # mostly in another program
    >>> publisher.send(step=7)
    >>> receiver.update(), torch.equal(copy.weight, model.weight.full_tensor().bfloat16().float())
    (7, True)
    >>> receiver.close()
    >>> publisher.close()
    """
    check_module("publish: model", model)
    host, port = split_address("publish: address", address)
    check_dtype("publish: dtype", dtype)
    check_positive("publish: timeout", timeout, "a positive number of seconds")
    return Publisher(model, host, port, dtype, timeout)


@dataclass(slots=True)
class Subscriber:
    """A receiver as rank 0 sees it: its ranks, the number of its request that has no answer yet (or
    None), and the version that it has."""

    size: int
    request: int | None = None
    has: int = 0


class Publisher:
    """The result of ``publish``. ``address``: where receivers connect. ``nbytes``: that this rank
    has sent."""

    def __init__(
        self, model: nn.Module, host: str, port: int, dtype: torch.dtype | None, timeout: float
    ) -> None:
        self.model, self.timeout, self._dtype, self.nbytes = model, timeout, dtype, 0
        self._group, (self._rank, self._size) = world_group(), world()
        self._server: Any = None  # the store, on rank 0
        self._sent, _, numbers = self._collect()
        agree("publish", self._group, model=crc32(repr((numbers, self._sent)).encode()))

        def open_port() -> int:
            if self._rank == 0:
                limit = timedelta(seconds=timeout)
                self._server = open_store(host, port, keeps=True, limit=limit)
                if self._server.add(f"{PUBLISHER}/count", 1) > 1:
                    raise CommError(f"there is a publisher at {host}:{port} already")
            return self._server.port if self._rank == 0 else 0

        port = gather_results("publish", self._group, open_port, (CommError,))[0]

        def connect() -> Lifeline:
            return Lifeline(host, port, PUBLISHER, self._rank, self._size)

        self._line = run_on_all_ranks("publish", self._group, connect, (CommError,))
        self.address = self._line.address
        if self._rank == 0:
            self._line.write(f"{PUBLISHER}/facts", [self._size, numbers, self._sent])
        self._changed = threading.Condition()  # guards the following
        self._version = 0  # the newest
        self._is_sending = False  # rank 0 decides no round meanwhile
        self._decided = self._finished = 0  # rounds
        self._rounds_before: dict[int, int] = {}  # by version, see the note
        self._copies: dict[int, list[Tensor | None]] = {}  # by version
        self._steps: dict[int, int] = {}
        self._spare: list[list[Tensor | None]] = []  # memory of earlier versions
        self._losses: list[str] = []  # that no call has raised, on rank 0
        self._deadline: float | None = None  # of close
        self._failure: Exception | None = None  # of the thread
        # The thread's own
        self._exchanges: dict[str, PieceExchange] = {}
        self._subscribers: dict[str, Subscriber] = {}
        self._events = 0  # that rank 0 has read
        self._drops: dict[str, str] = {}  # receiver -> how it was lost; "": it has left
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def _collect(self) -> tuple[list[WorldTensor], list[Tensor], dict[str, int]]:
        """Returns the tensors of the model as facts, the tensors, and the number of each name."""
        numbers, tensors = tensors_of(self.model)
        dtypes = ((x.is_floating_point() and self._dtype) or x.dtype for x in tensors)
        facts = [WorldTensor.of(x, d, self._size) for x, d in zip(tensors, dtypes, strict=True)]
        return facts, tensors, numbers

    def send(self, step: int) -> None:
        """Makes the weights of now available as ``step``. Every rank makes the call.

        It copies the pieces of this rank, in the dtype of the wire, and exchanges one small message
        between the ranks; a thread sends the copy to each receiver that waits. A receiver that
        comes later gets the newest version. Two copies exist while a version is being sent.

        Raises CommError on all ranks if a receiver was lost since the last call: it names the rank.
        The weights are available nevertheless, and the publisher goes on without this receiver.
        Raises MismatchError if a regular tensor differs between the ranks, by a few elements that
        are compared at the calls 1, 2, 4, 8, ...
        """
        step = check_int("Publisher.send: step", step)
        if is_due(self._version + 1):
            regular = [x for x in tensors_of(self.model)[1] if not isinstance(x, DistTensor)]
            for error in filter(None, compare_values("Publisher.send", regular, self._group)):
                raise MismatchError(error)
        with self._changed:
            if self._deadline is not None:
                raise CommError("Publisher.send: the publisher was closed")
            self._is_sending = True
            before, losses, copies = self._decided, self._losses, list[Tensor | None]()
            self._losses = []

        def copied() -> Any:
            if self._failure is not None:
                raise self._failure
            copies.extend(self._copy())
            return step, before, losses

        try:
            rows = gather_results("Publisher.send", self._group, copied, (ValueError, CommError))
            if any(row[0] != step for row in rows):
                steps = [row[0] for row in rows]
                raise MismatchError(f"Publisher.send: step differs between the ranks: {steps}")
            _, before, losses = rows[0]
            with self._changed:
                self._version += 1
                self._copies[self._version], self._steps[self._version] = copies, step
                self._rounds_before[self._version] = before
                self._free()
        finally:
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
        if self._rank == 0:
            self._line.write(f"{PUBLISHER}/newest", self._version)
        if losses:
            raise CommError(
                f"Publisher.send: {'; '.join(losses)}. Step {step} is published, and the publisher "
                "goes on without it: catch this error to train on"
            )

    def _copy(self) -> list[Tensor | None]:
        """Returns copies of this rank's pieces, in the dtype of the wire; None: it has none."""
        facts, tensors, _ = self._collect()
        if facts != self._sent:
            raise ValueError(
                "the names, shapes or layouts of the model have changed since publish; call "
                "publish again, with another address"
            )
        spare = self._spare.pop() if self._spare else [None] * len(facts)
        out: list[Tensor | None] = []
        for x, fact, memory in zip(tensors, facts, spare, strict=True):
            local: Tensor | None = x.detach()
            if isinstance(x, DistTensor):
                with torch.no_grad():  # a pending value is reduced
                    x = resharded(x.detach(), spec_of_boxes(x.spec))
                local = x.local if has_box(x) else None
            if local is not None:
                if memory is None:
                    memory = torch.empty(local.shape, dtype=fact.torch_dtype(), device="cpu")
                memory.copy_(local)
            out.append(memory)
        return out

    def _free(self) -> None:
        """Frees the copies that no later round uses."""
        known = [v for v, rounds in self._rounds_before.items() if rounds <= self._finished]
        for version in [v for v in self._copies if v < max(known, default=0)]:
            self._spare = [self._copies.pop(version)]
            del self._rounds_before[version], self._steps[version]

    def close(self) -> None:
        """Ends. Waits, at most ``timeout`` seconds, until each receiver has the newest version; its
        next ``update`` returns None. Every rank makes the call."""
        with self._changed:
            if self._deadline is not None:
                return
            self._deadline = time.monotonic() + self.timeout
            self._changed.notify_all()

        def join() -> None:
            self._thread.join(3 * self.timeout)
            if self._server is not None:  # which may last: no receiver joins any more
                self._server.delete_key(f"{PUBLISHER}/facts")

        try:
            run_on_all_ranks("Publisher.close", self._group, join)
        finally:
            self._line.stopped.set()
            self._server = None

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for number in itertools.count():
                kind, *arguments = self._next_round(number)
                if kind == "end":
                    break
                (self._serve if kind == "serve" else self._drop)(*arguments)
                self._line.store.add(f"{PUBLISHER}/finished", 1)
                with self._changed:
                    self._finished = number + 1
                    self._free()
        except Exception as error:  # raised by the next call of send
            self._failure = error
            self._line.declare_lost(PUBLISHER, f"rank {self._rank} has failed: {headline(error)}")
        for receiver in list(self._exchanges):
            self._drop(receiver)

    def _next_round(self, number: int) -> Any:
        key = f"{PUBLISHER}/round/{number}"
        if self._rank:
            return self._line.read(key, PUBLISHER, self._size - 1)
        while (found := self._decide()) is None:
            with self._changed:
                self._changed.wait(PAUSE)
        if self._size > 1:
            self._line.write(key, found)
        return found

    def _decide(self) -> Any:
        """Returns the next round; None if there is nothing to do."""
        lost = dict(self._line.lost)  # before the events: a receiver that has left is not lost
        self._read_events()
        self._drops = {**lost, **self._drops}
        with self._changed:
            while self._drops:
                receiver, how = self._drops.popitem()
                if self._subscribers.pop(receiver, None) is not None:
                    if how:
                        self._losses.append(f"{receiver} was lost: {how}")
                    self._decided += 1
                    return "drop", receiver
            is_closing = self._deadline is not None
            is_free = not self._is_sending and self._all_finished()
            for receiver, each in self._subscribers.items():
                is_old = each.has < self._version
                if each.request is None or not (is_free and (is_old or is_closing)):
                    continue
                key, each.request = f"{receiver}/answer/{each.request}", None
                if is_old:
                    each.has = self._version
                    self._line.write(key, [each.has, self._steps[each.has], is_closing])
                    self._decided += 1
                    return "serve", receiver, each.size, each.has
                self._line.write(key, [0, None, True])
            late = self._deadline is not None and time.monotonic() > self._deadline
            return ("end",) if is_closing and (late or not self._subscribers) else None

    def _all_finished(self) -> bool:
        """Returns True if all ranks have finished all rounds: no receiver waits for another."""
        finished: int = self._line.store.add(f"{PUBLISHER}/finished", 0)
        return finished == self._decided * self._size

    def _read_events(self) -> None:
        """Reads the new requests, the receivers that have left, and those that have failed or to
        which a rank could not send."""
        while text := read_key(self._line.store, f"{PUBLISHER}/event/{self._events}"):
            self._line.store.delete_key(f"{PUBLISHER}/event/{self._events}")
            self._events += 1
            kind, receiver, *rest = json.loads(text)
            if kind == "request":
                size, request = rest
                self._subscribers.setdefault(receiver, Subscriber(size)).request = request
                self._line.watched[receiver] = size
            elif kind == "leave":
                self._drops[receiver] = ""
            elif receiver in self._subscribers:
                self._drops[receiver] = self._line.cause(receiver, rest[0])

    def _serve(self, receiver: str, joining: int, version: int) -> None:
        """Sends a version to a receiver. An error ends this receiver only."""
        try:
            exchange = self._exchanges.get(receiver)
            if exchange is None:
                self._line.watched[receiver] = joining
                rows = self._line.read(f"{receiver}/facts", receiver)
                exchange = self._exchanges[receiver] = PieceExchange(
                    self._line, receiver, self._rank, self._size, joining, self.timeout, self._sent,
                    [WorldTensor(*row) for row in rows],
                )  # fmt: skip
            with self._changed:
                self._changed.wait_for(lambda: version in self._copies)
                copies = self._copies[version]
            self.nbytes += exchange.send(copies)
        except Exception as error:
            self._line.post("error", receiver, headline(error))

    def _drop(self, receiver: str) -> None:
        self._line.watched.pop(receiver, None)
        exchange = self._exchanges.pop(receiver, None)
        if exchange is not None:
            exchange.close()
