"""strict: forbids implicit communication and fallbacks. Outside of it, each function that falls
back warns once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disttensor.core.spec import DistSpec
from disttensor.errors import StrictError, name_of, user_line, warn_once
from disttensor.settings import Setting
from reshard import cross_mesh


class strict(Setting, default=False):
    """``with strict():`` makes an implicit reshard that communicates, or a function without a rule,
    an error that names the call, the source line and the bytes.

    >>> with dt.debugging.strict():
    ...     y = dt.ones(4, 4, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]).relu().sum()
    """

    def __init__(self) -> None:
        super().__init__(True)


def check_moves(func: Any, sources: Sequence[DistSpec], wants: Sequence[DistSpec | None]) -> None:
    """Raises StrictError, within strict(), if the reshards of a plan communicate."""
    for i, (src, dst) in enumerate(zip(sources, wants, strict=True)):
        if dst is None:
            continue
        steps = cross_mesh.choose(src, dst)
        nbytes = sum(s.bytes for s in steps)
        if nbytes:
            raise StrictError(
                f"{name_of(func)} at {user_line()}: argument {i} is {src!r}, the call needs "
                f"{dst!r}: an implicit {' + '.join(s.kind for s in steps)} of {nbytes:,.0f} bytes "
                "per rank. Reshard it explicitly, or leave strict()"
            )


def fallback(func: Any, specs: list[DistSpec], why: str) -> None:
    """Reports a fallback: raises StrictError within strict(), else warns once per function."""
    if strict.current():
        nbytes = sum(cross_mesh.cost(s, s.replicated()) for s in specs)
        raise StrictError(
            f"{name_of(func)} at {user_line()} has no rule for this call ({why}): it would gather "
            f"{nbytes:,.0f} bytes per rank. Register one with ops.rule, wrap the code in "
            "local_map, or leave strict()"
        )
    warn_once(
        (getattr(func, "__module__", ""), name_of(func)),  # func may be created anew per call
        lambda: (
            f"{name_of(func)} at {user_line()} has no sharding rule for this call ({why}): its "
            "inputs are gathered and it runs on full tensors. Right, but slow; see ops.rule. (Said "
            "once per function.)"
        ),
    )
