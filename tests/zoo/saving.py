"""What small models of other people's libraries save on two ranks, loaded by one process.

    python -m tests.zoo.saving                          all that are installed, with a table
    python -m tests.zoo.saving --only zuko              one, with the traceback of its error
    python -m tests.zoo.saving --markdown docs/zoo.md   writes the table there

Each model of ``strangers.py`` trains two steps under data parallelism, tensor parallelism and stage
3, and is saved on all ranks by each way of ``ways.py`` in ``process.saving``. One process without
DistTensors loads each file: every tensor equals the training of one process. Then two ranks resume
under the next of the three, from the first way and from ``torch.save``, with the state of the
optimizer, and after two steps equal one process that has trained four.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.zoo import recipes, saved, table
from tests.zoo.strangers import AXES, PREFIX, Stranger, report
from tests.zoo.ways import ways
from tests.zoo.zoo import SEARCH_LIMIT, Ranks, error_line, verdict

BEGIN, END = "<!-- the table of saving -->", "<!-- the end of saving -->"
NEXT = dict(zip(AXES, (*AXES[1:], AXES[0]), strict=True))


def measure(library: str, one: Ranks, two: Ranks) -> dict[str, Any]:
    """{"name", "shown", "plain": errors of plain torch, and for each axis {"kind", "says"}}."""
    ((kind, value),) = one.call(SEARCH_LIMIT, recipes.search, PREFIX + library)
    if kind != "ok":
        return _not_run(library, kind, value)
    recipe = pickle.loads(value)
    entry: dict[str, Any] = {"name": library, "shown": recipe.shown}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ((kind, value),) = one.call(SEARCH_LIMIT, saved.in_one_process, recipe, folder)
        if kind != "ok":
            return _not_run(library, kind, value)
        entry["plain"] = plain = pickle.loads(value)
        if len(plain) == len(ways(library)):
            return _not_run(library, str(plain), "")
        for axis in AXES:
            entry[axis] = _measure(recipe, axis, folder, plain, one, two)
    entry["ways"] = [way.name for way in ways(library) if way.name not in plain]
    entry["trace"] = f"not saved by plain torch: {plain}" if plain else ""
    return entry


def _not_run(library: str, kind: str, value: Any) -> dict[str, Any]:
    says = error_line(value) if kind == "error" else kind
    return {"name": library, "small": says, "trace": str(value)[-3000:]}


def _measure(
    recipe: Stranger, axis: str, folder: Path, plain: dict[str, str], one: Ranks, two: Ranks
) -> dict[str, str]:
    answers = two.call(SEARCH_LIMIT, saved.on_ranks, recipe, axis, folder)
    end = verdict(answers)
    if end["kind"] != "right":
        return end
    errors = {k: v for k, v in pickle.loads(answers[0][1]).items() if k not in plain}
    known = plain | errors
    ((kind, value),) = one.call(SEARCH_LIMIT, saved.loaded, recipe, folder, axis, known)
    wrong = pickle.loads(value) if kind == "ok" else {"loading": str(value)}
    if wrong:
        return {"kind": "wrong", "says": str(wrong), "trace": str(wrong)}
    next_axis, place = NEXT[axis], folder / axis
    end = verdict(two.call(SEARCH_LIMIT, saved.resumed, recipe, next_axis, place, known))
    if end["kind"] == "right" and errors:
        says = "; ".join(f"{name}: {error}" for name, error in errors.items())
        return {"kind": "refused", "says": says, "trace": says}
    return end


def rows(entries: Sequence[dict[str, Any]]) -> str:
    """One row for each library."""
    lines = ["| library | saved by | " + " | ".join(AXES) + " |", "|---|---|---|---|---|"]
    for e in entries:
        if "small" in e:
            lines.append(f"| {e['name']} | not run: {table._short(e['small'], 90)} | | | |")
            continue
        ends = [e[axis] for axis in AXES]
        shown = [
            table.KINDS[x["kind"]]
            + ("" if x["kind"] == "right" else f": {table._short(x['says'], 90)}")
            for x in ends
        ]
        own = e["ways"][0] if len(e["ways"]) > len(ways("")) - len(e["plain"]) else "a state dict"
        lines.append(f"| {e['name']} | {own} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    return report("tests.zoo.saving", argv, measure, rows, BEGIN, END)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
