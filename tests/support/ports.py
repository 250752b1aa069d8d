"""Ports for stores of worlds that a test starts."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)  # below those that the system gives to connections


def free_port() -> int:
    """Returns a free port, which no other connection takes before it is used."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"of 100 ports in {PORTS} none is free")
