"""Runs all programs on 2 and 4 ranks, and what the libraries themselves compute; records it in
results.json, and writes docs/public_bugs.md.

    python -m tests.public_bugs            all of it (make bugs)
    python -m tests.public_bugs --page     the page only, from the record
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.public_bugs.harness import FOLDER, NAMES, TOLERANCE, bug, run_ours, run_peer
from tests.public_bugs.page import page
from tests.support import pool

RECORD = FOLDER / "results.json"
PAGE = FOLDER.parents[1] / "docs" / "public_bugs.md"


def worst(by_rank: list[dict[str, float]]) -> float:
    """Returns the largest difference of a value on any rank. Raises AssertionError if no rank has a
    value."""
    found = {name: max(mine[name] for mine in by_rank) for name in by_rank[0]}
    missing = [name for name, error in found.items() if error < 0]
    assert found and not missing, f"on no rank: {missing}"
    return max(found.values())


def peer(name: str) -> list[str]:
    ranks = getattr(bug(name), "PEER_RANKS", 2)
    try:
        answers = pool.run_on_ranks(ranks, run_peer, name)
    except pool.RanksFailed as failed:
        return ["error", str(failed).splitlines()[0]]
    kinds = [kind for kind, _ in answers]
    kind = "wrong" if "wrong" in kinds else max(kinds)
    return [kind, next(text for found, text in answers if found == kind)]


def measure(name: str) -> dict[str, Any]:
    print(name, end=": ", flush=True)
    ours = []
    for ranks, strategies in bug(name).STRATEGIES.items():
        for number, fields in enumerate(strategies):
            error = worst(pool.run_on_ranks(ranks, run_ours, name, number))
            assert error <= TOLERANCE, f"{name} on {ranks} ranks, {fields}: differs by {error:.1e}"
            ours.append([ranks, fields, float(f"{error:.1e}")])
    found: dict[str, Any] = {"ours": ours}
    if hasattr(bug(name), "peer"):
        found["peer"] = peer(name)
    print(f"{len(ours)} strategies, within {max(o[2] for o in ours):.0e}", *found.get("peer", ()))
    return found


def main() -> None:
    if "--page" not in sys.argv:
        record = {"torch": torch.__version__.partition("+")[0]}
        record["bugs"] = {name: measure(name) for name in NAMES}  # type: ignore[assignment]
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    Path(PAGE).write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
