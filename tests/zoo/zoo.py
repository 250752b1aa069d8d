"""Networks that others wrote, on two ranks against plain torch: all model types of transformers,
and one of each family of torchvision and timm.

    python -m tests.zoo.zoo                            all, with a table; goes on where it stopped
    python -m tests.zoo.zoo --only qwen3               one, with the traceback of what it raised
    python -m tests.zoo.zoo --types qwen3,timm.dla34   some
    python -m tests.zoo.zoo --markdown docs/zoo.md  writes the table there

Each is built small, with random weights, in evaluation; its loss takes every number of its output.
Output and the gradient of every parameter are compared with plain torch, under data parallelism
(``dp``: the batch is split) and tensor parallelism (``tp``: the plan that ``dt.plans.megatron``
proposes). A network that hangs or ends its ranks is named; the others go on in new processes.
Results are kept in ``out/zoo.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support import pool
from tests.support.pool import Pool
from tests.zoo import check, recipes, table

SEARCH_LIMIT, LIMIT = 240.0, 120.0  # seconds
KEPT = Path("out/zoo.json")
Entry = dict[str, Any]


class Ranks:
    """Processes that stay until one of them fails in a way that the others do not share."""

    def __init__(self, world: int) -> None:
        self.world, self.pool = world, None

    pool: Pool | None

    def call(self, limit: float, fn: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        if self.pool is None:
            self.pool = Pool(self.world)
        answers = self.pool.call(fn, args, limit)
        if len({(kind, error_line(x) if kind == "error" else "") for kind, x in answers}) > 1 or (
            answers[0][0] not in ("ok", "error")
        ):
            self.stop()
        return answers

    def stop(self) -> None:
        if self.pool is not None:
            self.pool.stop()
        self.pool = None


def error_line(trace: str) -> str:
    """The type and the first line of the error in which a traceback ends."""
    last = trace.strip().rpartition('\n  File "')[2].split("\n")
    rest = [x for x in last[1:] if x and not x.startswith(" ")] or last[-1:]
    kind, colon, text = rest[0].partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{text}"


def measure(name: str, one: Ranks, two: Ranks, axes: Sequence[str] = table.AXES) -> Entry:
    """{"name", "shown", and for each axis {"kind", "says", "trace"}}; without a recipe "small"
    says why."""
    ((kind, value),) = one.call(SEARCH_LIMIT, recipes.search, name)
    if kind != "ok":
        says = error_line(value) if kind == "error" else kind
        return {"name": name, "small": says, "trace": str(value)[-3000:]}
    recipe = pickle.loads(value)
    entry: Entry = {"name": name, "shown": recipe.shown, "recipe": list(recipe)}
    for axis in axes:
        entry[axis] = verdict(two.call(LIMIT, check.on_rank, recipe, axis))
    return entry


def verdict(answers: list[tuple[str, Any]]) -> dict[str, str]:
    kinds = [kind for kind, _ in answers]
    for kind in ("died", "hung"):
        if kind in kinds:
            bad = [f"rank {i} {k}: {x}" for i, (k, x) in enumerate(answers) if k != "ok"]
            shown = next((error_line(x) for k, x in answers if k == "error"), "")
            return {"kind": kind, "says": shown, "trace": "\n".join(bad)[-6000:]}
    errors = [x for kind, x in answers if kind == "error"]
    if not errors:
        return {"kind": "right", "says": str(pickle.loads(answers[0][1])), "trace": ""}
    says = error_line(errors[0])
    kind = "wrong" if any("WrongError" in error_line(x) for x in errors) else "refused"
    if len({error_line(x) for x in errors}) > 1 or len(errors) < len(answers):
        kind = "wrong" if kind == "wrong" else "apart"
    return {"kind": kind, "says": says, "trace": errors[0][-6000:]}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.zoo", description=__doc__)
    parser.add_argument("--only", help="one, again, with its tracebacks")
    parser.add_argument("--types", help="separated by commas")
    parser.add_argument("--part", help="K/N: every N-th, from the K-th")
    parser.add_argument("--again", action="store_true", help="those that are known too")
    parser.add_argument("--bad", action="store_true", help="only those that were not right")
    parser.add_argument("--none", action="store_true", help="only the table of what is known")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(argv)
    names = options.types.split(",") if options.types else [options.only] if options.only else []
    names = names or recipes.names()
    if options.part:
        k, n = map(int, options.part.split("/"))
        names = names[k::n]
    known: dict[str, Entry] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if options.none:
        names = []
    elif options.bad:
        names = [n for n in names if n in known and table.state(known[n]) == "bad"]
    elif not (options.again or options.only):
        names = [name for name in names if name not in known]
    pool.warning_filters[:] = ["ignore"]
    os.environ["PYTHONHASHSEED"] = "0"  # models iterate over sets, as all ranks then do alike
    one, two = Ranks(1), Ranks(2)
    try:
        for i, name in enumerate(names):
            entry = known[name] = measure(name, one, two)
            ends = [(axis, entry[axis]) for axis in table.AXES if axis in entry]
            shown = [f"{axis} {end['kind']}: {end['says']}" for axis, end in ends]
            shown = shown or [entry["small"]]
            print(f"{i + 1}/{len(names)} {name}", *shown, sep=" | ", flush=True)
            if options.only:
                print(entry.get("trace", ""), *(end["trace"] for _, end in ends))
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(known, indent=1))
    finally:
        one.stop()
        two.stop()
    left = sum(name not in known for name in recipes.names())
    about = f"{recipes.versions()}; {len(known)} networks, {left} not run yet"
    if recipes.absent():
        about += f"; not installed: {', '.join(recipes.absent())}"
    print(f"{about}\n\n{table.page(known)}")
    if options.markdown:
        table.write(options.markdown, known, f"{about}.")
    return int(any(map(table.is_bad, known.values())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
