"""receive: takes the weights that another world publishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
from torch import nn

from disttensor.checkpoint.load_pretrained import find_parts
from disttensor.checkpoint.save_pretrained import check_names
from disttensor.checks import check_bool, check_positive
from disttensor.comm.agree import agree
from disttensor.comm.groups import world_group
from disttensor.comm.objects import gather_results, run_on_all_ranks
from disttensor.comm.process_group import open_store, read_key, world
from disttensor.errors import CommError, headline
from disttensor.nn.shard_module import check_module
from disttensor.publishing.exchange import PieceExchange
from disttensor.publishing.lifeline import PUBLISHER, Lifeline, split_address
from disttensor.publishing.world_tensor import WorldTensor
from disttensor.tensor.checkpointable import prepare_to_read, spec_of_boxes
from disttensor.tensor.dist_tensor import DistTensor

Tensor = torch.Tensor


def receive(
    model: nn.Module,
    address: str,
    *,
    names: Mapping[str, Any] | Callable[[str], Any] | None = None,
    strict: bool = True,
    timeout: float = 60.0,
) -> Receiver:
    """Joins the publisher at ``address``, from another launch of processes: another strategy,
    another number of ranks, or one process with a regular module. Every rank makes the call.

    Args:
        model: the module that takes the weights, with memory. It keeps its placements and dtypes.
        address: "host:port", as ``dt.publish`` has it. The publisher may start later.
        names: name in the model -> place in the publisher's model, as in ``dt.pretrained.load``:
            another name, a list of names that are joined along dim 0, or (name, slice of rows).
        strict: False allows names that only one of the two models has.
        timeout: seconds to wait for the publisher to start, and for one message.

    Returns:
        A Receiver. ``receiver.update()`` takes a new version, ``receiver.close()`` leaves.

    Raises:
        ValueError: names or shapes do not fit, on all ranks.
        CommError: there is no publisher within ``timeout``.
        MismatchError: the ranks give other models.

    >>> publisher = dt.publish(dt.shard_module(torch.nn.Linear(4, 2), mesh), "127.0.0.1:0")
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> receiver = dt.receive(model, publisher.address, names=lambda name: name.split(".")[1])
    >>> publisher.send(step=1)
    >>> receiver.update()
    1
    >>> receiver.close()
    >>> publisher.close()
    """
    check_module("receive: model", model)
    host, port = split_address("receive: address", address)
    check_names("receive", names)
    check_bool("receive: strict", strict)
    check_positive("receive: timeout", timeout, "a positive number of seconds")
    return Receiver(model, host, port, names, strict, timeout)


class Receiver:
    """The result of ``receive``. ``step``: of the weights that the model has; None before the
    first ``update``. ``nbytes``: that this rank has received."""

    def __init__(
        self, model: nn.Module, host: str, port: int, names: Any, strict: bool, timeout: float
    ) -> None:
        self.model, self.timeout, self.step, self.nbytes = model, timeout, None, 0
        self._group, (self._rank, self._size) = world_group(), world()

        def join() -> int:
            if self._rank:
                return 0
            try:
                store = open_store(host, port, keeps=False, limit=timedelta(seconds=timeout))
            except RuntimeError as error:
                where = f"{host}:{port} within {timeout:g} s"
                raise CommError(f"no publisher answers at {where}: {error}") from error
            return int(store.add(f"{PUBLISHER}/receivers", 1)) - 1

        who, kinds = "receive", (CommError,)
        self.name = f"receiver {gather_results(who, self._group, join, kinds)[0]}"

        self._line = run_on_all_ranks(
            who, self._group, lambda: Lifeline(host, port, self.name, self._rank, self._size), kinds
        )

        def connect() -> None:
            read = self._line.read(f"{PUBLISHER}/facts", PUBLISHER, seconds=timeout)
            self._senders, numbers, rows = read
            self._sent = [WorldTensor(*row) for row in rows]
            stored = {name: self._sent[n].as_stored(name, n) for name, n in numbers.items()}
            where = "the tensors of the publisher"
            self._parts = find_parts(who, where, model, stored, names, strict, copies=False)
            self._facts, _ = self._collect()

        try:
            run_on_all_ranks(who, self._group, connect, (CommError, ValueError))
            agree(who, self._group, model=crc32(repr((list(self._parts), self._facts)).encode()))
        except BaseException:
            self._line.stopped.set()
            raise
        if self._rank == 0:
            self._line.write(f"{self.name}/facts", self._facts)
        self._line.watched[PUBLISHER] = self._senders
        self._exchange: PieceExchange | None = None
        self._requests = self._version = 0
        self._is_over = False

    def _collect(self) -> tuple[list[WorldTensor], list[Tensor]]:
        """Returns the tensors that are received, as facts and themselves."""
        state: dict[str, Any] = self.model.state_dict(keep_vars=True)
        facts = []
        for name, parts in self._parts.items():
            x = state[name]
            if x.is_meta or (isinstance(x, DistTensor) and spec_of_boxes(x.spec) is not x.spec):
                how = "on the meta device" if x.is_meta else f"pending or placed by you ({x.spec})"
                raise ValueError(f"receive: {name!r} is {how}: give it memory of its own first")
            rows = [(stored.begin, start, stop) for stored, start, stop in parts]
            facts.append(WorldTensor.of(x, x.dtype, self._size)._replace(parts=rows))
        return facts, [state[name] for name in self._parts]

    def update(self, wait: bool = True) -> int | None:
        """Takes the newest version, and returns its step; None if the publisher has closed. Every
        rank makes the call.

        It waits for a version that this receiver does not have; with ``wait=False`` it returns
        None at once if there is none. The pieces of a rank arrive in memory of their own. They are
        copied to the model when all ranks have received all, so the model has one version, on all
        ranks, at any time: after an error the earlier one.

        Raises CommError on all ranks, naming the rank, if the publisher has ended without
        ``close``, or if a message fails. The receiver has left then; ``dt.receive`` joins again.
        """
        check_bool("Receiver.update: wait", wait)
        who, kinds = "Receiver.update", (ValueError, CommError)
        if self._line.stopped.is_set() and not self._is_over:
            raise CommError(f"{who}: this receiver has left")
        if self._is_over or not (wait or gather_results(who, self._group, self._is_old, kinds)[0]):
            return None
        self._requests += 1
        try:
            tensors, arrived = run_on_all_ranks(who, self._group, self._fetch, kinds)
        except BaseException as error:  # also an interrupt: messages may be on the way
            self._leave("error", headline(error))
            raise
        if self._is_over:
            self.close()
        if not tensors:
            return None
        with torch.no_grad():
            for x, piece in zip(tensors, arrived, strict=True):
                if isinstance(x, DistTensor):
                    prepare_to_read(x)  # on all ranks
                    x = x.local
                if piece is not None and piece.numel():
                    x.detach().copy_(piece)
        self.step = self._step
        return self.step

    def _is_old(self) -> bool:
        self._line.check(PUBLISHER)
        newest = read_key(self._line.store, f"{PUBLISHER}/newest") or 0
        return int(newest) > self._version

    def _fetch(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Receives the pieces of this rank, and returns the tensors and their pieces."""
        facts, tensors = self._collect()
        if facts != self._facts:
            raise ValueError("the layouts of the model have changed: call dt.receive again")
        if self._rank == 0:
            self._line.post("request", self.name, self._size, self._requests)
        key = f"{self.name}/answer/{self._requests}"
        version, self._step, self._is_over = self._line.read(key, PUBLISHER, self._size)
        if not version:
            return [], []
        try:
            if self._exchange is None:
                self._exchange = PieceExchange(
                    self._line, self.name, self._senders + self._rank, self._senders, self._size,
                    self.timeout, self._sent, facts,
                )  # fmt: skip
            arrived, nbytes = self._exchange.receive()
        except RuntimeError as error:
            raise CommError(self._line.cause(PUBLISHER, error)) from error
        self._version, self.nbytes = version, self.nbytes + nbytes
        return tensors, arrived

    def close(self) -> None:
        """Leaves the publisher, which goes on. Every rank makes the call."""
        if not self._line.stopped.is_set():
            self._leave("leave")

    def _leave(self, *event: str) -> None:
        if self._rank == 0:
            self._line.post(event[0], self.name, *event[1:])
        self._line.stopped.set()
        if self._exchange is not None:
            self._exchange.close()
