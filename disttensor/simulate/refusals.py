"""Refuses effects on the world outside of a simulated rank, in its own process: connections, other
programs and signals. Where Linux has Landlock, also writes that ``scratch_files.py`` does not
redirect, as of C libraries.
"""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import platform
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from disttensor.errors import SimulationError, user_line


class Refused(SimulationError, PermissionError):
    """Also an OSError: libraries that try a program or a connection go on without."""

    __str__ = SimulationError.__str__


# The functions of os, and the methods of sockets, that have these effects. (An audit hook would see
# more, and is called each time that the engine looks at a frame, which doubles its time.)
_PROGRAMS = "system", "execv", "execve", "posix_spawn", "posix_spawnp", "startfile"
_PROCESSES = "kill", "killpg"
_NETWORK = "connect", "connect_ex", "sendto", "sendmsg"
_FREE = "/dev", "/proc"  # devices and facts of processes


def refuse_effects(folder: str) -> None:
    """Refuses effects outside of ``folder`` until this process ends."""
    _replace(os, _PROGRAMS, "another program")
    _replace(os, _PROCESSES, "another process", lambda pid, *_: pid in (os.getpid(), *_children()))
    _replace(socket.socket, _NETWORK, "the network")
    _replace(subprocess.Popen, ("__init__",), "another program")
    _replace(
        multiprocessing.util, ("spawnv_passfds",), "another program",
        lambda _, args, *__: any("resource_tracker" in os.fsdecode(a) for a in args),
    )  # fmt: skip
    _landlock([folder, *_FREE])


def _replace(
    owner: Any, names: Sequence[str], what: str,
    allows: Callable[..., bool] = lambda *_, **__: False,
) -> None:  # fmt: skip
    for name in names:
        usual = getattr(owner, name, None)
        if usual is not None:
            setattr(owner, name, _refusing(usual, f"{owner.__name__}.{name}", what, allows))


def _refusing(
    usual: Callable[..., Any], name: str, what: str, allows: Callable[..., bool]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if allows(*args):
            return usual(*args, **kwargs)
        given = [str(a)[:200] for a in args if not isinstance(a, subprocess.Popen | socket.socket)]
        raise Refused(
            f"the program reaches {what} at {user_line()} ({name}: {', '.join(given)}), which a "
            'simulated rank must not do. Leave this out if os.environ.get("DISTTENSOR_SIMULATION") '
            "is set, as it is here"
        )

    return call


def _children() -> list[int | None]:
    return [p.pid for p in multiprocessing.active_children()]


# Landlock -----------------------------------------------------------------------------------------

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # numbers of system calls, on all processors
# Rights by version of Landlock: to write, remove and make files, to move them, to truncate them.
_RIGHTS = {1: 0x1FF2, 2: 0x2000, 3: 0x4000}
_NO_NEW_PRIVILEGES = 38  # of prctl


def _landlock(folders: list[str]) -> None:
    """Lets this process and its children write in ``folders`` only, where Linux has Landlock."""
    if platform.system() != "Linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    call: Callable[..., int] = libc.syscall
    version = call(_CREATE, None, 0, 1)
    if version < 1:
        return
    rights = sum(bits for n, bits in _RIGHTS.items() if n <= version)
    ruleset = call(_CREATE, ctypes.c_char_p(struct.pack("Q", rights)), ctypes.c_size_t(8), 0)
    for folder in folders:
        at = os.open(folder, os.O_PATH)
        call(_ADD, ruleset, 1, ctypes.c_char_p(struct.pack("=Qi", rights, at)), 0)
        os.close(at)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call(_RESTRICT, ruleset, 0)
    os.close(ruleset)
