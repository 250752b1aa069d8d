"""Converts sharding configs, a dict of degrees and segments, to fields of a Strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disttensor.fsdp.segment_policy import SegmentByAnchors, SegmentBySize
from disttensor.nn.names import close_to

_MB, _ANCHORS = "segment_broadcast_MB", "segment_anchors"
DEFAULT_MB = 32.0

# key -> (types, their description). None is the same as leaving a key out.
KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "sharding_segment_strategy": ((str,), f"{_MB!r} or {_ANCHORS!r}"),
    _MB: ((int, float), "a number of megabytes"),
    _ANCHORS: ((list, tuple), "a list of names of modules"),
    "sharding_degree": ((int,), "a whole number"),
    "mp_degree": ((int,), "a whole number"),
    "dp_degree": ((int,), "a whole number"),
    "pp_degree": ((int,), "a whole number"),
    "hybrid_dp": ((bool,), "True or False"),
    "gradient_merge_acc_step": ((int,), "a whole number"),
    "optimize_offload": ((bool,), "True or False"),
}


def strategy_fields(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of Strategy for ``configs``. Raises TypeError and ValueError for unknown
    keys, values of another type, and keys that contradict each other.

    Defaults: ``mp_degree`` and ``pp_degree`` are 1. ``sharding_degree`` is the remaining factor of
    the world size. ``dp_degree`` is 1, or with ``hybrid_dp`` the remaining factor.
    """
    given = _checked(configs)
    sharding, dp = given.get("sharding_degree"), given.get("dp_degree")
    hybrid = given.get("hybrid_dp", dp is not None and dp > 1)
    if dp is not None and (dp > 1) is not hybrid:
        raise ValueError(
            f"sharding configs: hybrid_dp={hybrid} and dp_degree={dp} contradict each other: with "
            "hybrid_dp, dp_degree groups hold the same shards, so it is 2 or more. Leave one of "
            "them out"
        )
    if hybrid and dp is None and sharding is None:
        raise ValueError(
            "sharding configs: hybrid_dp=True needs sharding_degree or dp_degree, the number of "
            "shards or of their replicas; the other one gets the remaining factor"
        )
    return {
        "pp": given.get("pp_degree", 1),
        "dp": dp if hybrid else 1,
        "sharding": sharding,
        "cp": 1,
        "tp": given.get("mp_degree", 1),
        "segments": _segments(given),
        "accumulate_steps": given.get("gradient_merge_acc_step", 1),
        "offload": given.get("optimize_offload", False),
    }


def _checked(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configs whose values are not None."""
    if not isinstance(configs, Mapping):
        raise TypeError(
            f"sharding configs: a dict is expected, as {{'sharding_degree': 8}}; got {configs!r}"
        )
    for key, value in configs.items():
        if key not in KEYS:
            close = close_to(key, KEYS)
            there = (
                f"close to it are {', '.join(close)}" if close else f"there are {', '.join(KEYS)}"
            )
            raise ValueError(f"sharding configs: there is no key {key!r}; {there}")
        types, words = KEYS[key]
        if value is not None and (
            not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        ):
            raise TypeError(f"sharding configs: {key}={value!r}: {words} is expected")
        if isinstance(value, (int, float)) and int in types and not value > 0:
            raise ValueError(f"sharding configs: {key}={value!r}: {words} above 0 is expected")
    return {key: value for key, value in configs.items() if value is not None}


def _segments(given: Mapping[str, Any]) -> SegmentBySize | SegmentByAnchors:
    how = given.get("sharding_segment_strategy", _MB)
    size: float = given.get(_MB, DEFAULT_MB)
    anchors: Sequence[str] = given.get(_ANCHORS, ())
    if how not in (_MB, _ANCHORS):
        close = close_to(how, (_MB, _ANCHORS), 1)
        raise ValueError(
            f"sharding configs: sharding_segment_strategy={how!r}: it is {_MB!r} or {_ANCHORS!r}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )
    if how == _MB and anchors:
        raise ValueError(
            f"sharding configs: segment_anchors={list(anchors)} have no meaning for "
            f"sharding_segment_strategy={how!r}: set that to {_ANCHORS!r}, or leave the anchors out"
        )
    if how == _ANCHORS and not anchors:
        raise ValueError(
            f"sharding configs: sharding_segment_strategy={how!r} needs segment_anchors, the names "
            "of the modules that begin a segment"
        )
    if how == _ANCHORS and size != DEFAULT_MB:
        raise ValueError(
            f"sharding configs: segment_broadcast_MB={size} has no meaning for "
            f"sharding_segment_strategy={how!r}: leave it out, or set the strategy to {_MB!r}"
        )
    return SegmentByAnchors(tuple(anchors)) if how == _ANCHORS else SegmentBySize(size)
