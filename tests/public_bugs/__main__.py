"""Runs all programs on 2 and 4 ranks, and what the libraries themselves compute; records it in
results.json, and writes docs/public_bugs.md.

    python -m tests.public_bugs            all of it (make bugs, which installs the libraries)
    python -m tests.public_bugs --page     the page only, from the record
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def peer(name: str) -> list[str] | None:
    """What the library computes: right, wrong or error; text; the library. None: not installed."""
    package = getattr(bug(name), "PEER", "torch")
    try:
        library = f"{package} {version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return None
    ranks = getattr(bug(name), "PEER_RANKS", 2)
    try:
        answers = pool.run_on_ranks(ranks, run_peer, name)
    except pool.RanksFailed as failed:
        return ["error", str(failed).splitlines()[0], library]
    finally:
        if package != "torch":  # the library has changed the processes
            pool.stop(ranks)
    kinds = [kind for kind, _ in answers]
    kind = "wrong" if "wrong" in kinds else max(kinds)
    return [kind, next(text for found, text in answers if found == kind), library]


def measure(name: str, before: dict[str, Any]) -> dict[str, Any]:
    print(name, end=": ", flush=True)
    ours = []
    for ranks, strategies in bug(name).STRATEGIES.items():
        for number, fields in enumerate(strategies):
            error = worst(pool.run_on_ranks(ranks, run_ours, name, number))
            assert error <= TOLERANCE, f"{name} on {ranks} ranks, {fields}: differs by {error:.1e}"
            ours.append([ranks, fields, float(f"{error:.1e}")])
    found: dict[str, Any] = {"ours": ours}
    if hasattr(bug(name), "peer"):
        found["peer"] = peer(name) or before.get("peer")
    print(f"{len(ours)} strategies, within {max(o[2] for o in ours):.0e}", *found.get("peer", ()))
    return found


def main() -> None:
    if "--page" not in sys.argv:
        before = json.loads(RECORD.read_text())
        record = {name: measure(name, before.get(name, {})) for name in NAMES}
        lines = (f" {json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    Path(PAGE).write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
