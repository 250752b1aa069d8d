"""The page docs/public_bugs.md, from the docstrings of the files and the record of a run."""

from __future__ import annotations

import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.public_bugs.harness import NAMES, bug

TEXT = Path(__file__).with_name("page.md")
SECTIONS = {  # by the first axis of the first strategy; the parts of torch have a section
    "tp": "Tensor and sequence parallelism",
    "dp": "Data parallelism, sharded state, accumulation",
    "cp": "Context parallelism",
    "pp": "Pipelines",
    "torch": "Parts of torch",
}


class Story(NamedTuple):
    what: str
    where: str
    cause: str


def story(name: str) -> Story:
    """The three parts of a file's docstring."""
    parts = [" ".join(part.split()) for part in (bug(name).__doc__ or "").split("\n\n")]
    return Story(*parts)


def section(name: str) -> str:
    if name.startswith("pytorch_"):
        return "torch"
    axis = next(iter(bug(name).STRATEGIES[2][0]))
    return "dp" if axis == "sharding" else axis


def link(where: str) -> str:
    """``owner/name#12, 2026-01-01, open``, with a link for each number."""
    owners = re.findall(r"([\w-]+/[\w.-]+)#", where)

    def linked(found: re.Match[str]) -> str:
        repository, number = found[1] or owners[0], found[2]
        return f"[{found[0]}](https://github.com/{repository}/issues/{number})"

    return re.sub(r"([\w-]+/[\w.-]+)?#(\d+)", linked, where)


def show(fields: dict[str, Any]) -> str:
    """``tp 2, ring`` for {"tp": 2, "attention": "ring"}."""
    named = {"zero_stage": "ZeRO {}", "attention": "{}", "segments": "segments {}"}
    texts = []
    for name, value in fields.items():
        if isinstance(value, list):
            value = "of " + ", ".join(value)
        texts.append(named.get(name, f"{name} {{}}").format(value))
    return " ".join(texts)


def ours(found: list[Any]) -> str:
    lines = [
        f"{ranks} ranks: " + "; ".join(show(fields) for r, fields, _ in found if r == ranks)
        for ranks in dict.fromkeys(r for r, _, _ in found)
    ]
    error = max(error for _, _, error in found)
    return f"{'. '.join(lines)}. Equal{f' within {error:.0e}' if error else ''}"


def theirs(peer: list[str] | None) -> str:
    if peer is None:
        return ""
    kind, text, library = peer
    text = re.sub(r"([|*<>])", r"\\\1", text.partition(". ")[0])
    said = {"wrong": f"**wrong**: {text}", "error": f"an error: {text}"}
    return f" · {library}: {said.get(kind, 'this program is right by now')}"


def table(names: list[str], record: dict[str, Any]) -> str:
    rows = ["| what went wrong, and why | where | here |", "|---|---|---|"]
    for name in names:
        told, found = story(name), record[name]
        program = f"[program](../tests/public_bugs/{name}.py)"
        there = link(told.where).rstrip(".") + theirs(found.get("peer"))
        cells = f"{told.what} {told.cause}", there, f"{ours(found['ours'])} · {program}"
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def page(record: dict[str, Any]) -> str:
    peers = [found["peer"] for found in record.values() if "peer" in found]
    runs = [run for found in record.values() for run in found["ours"]]
    libraries = ", ".join(sorted({library for *_, library in peers}))
    numbers = {
        "bugs": len(NAMES), "runs": len(runs), "libraries": libraries,
        "within": f"{max(error for _, _, error in runs):.0e}", "peers": len(peers),
        **{kind: [p[0] for p in peers].count(kind) for kind in ("wrong", "error", "right")},
        "planted": sum(hasattr(bug(name), "planted") for name in NAMES),
    }  # fmt: skip
    tables = [
        f"## {title}\n\n{table([n for n in NAMES if section(n) == key], record)}"
        for key, title in SECTIONS.items()
    ]
    text = TEXT.read_text().format(**numbers, tables="\n\n".join(tables))
    return "\n\n".join(map(wrap, text.rstrip().split("\n\n"))) + "\n"


def wrap(paragraph: str) -> str:
    """Wraps prose, and each item of a list, at 100 columns."""
    if paragraph.startswith(("#", "|", "    ")):
        return paragraph
    items = re.split(r"\n(?=- )", paragraph)
    fill = partial(textwrap.fill, width=100, break_on_hyphens=False, break_long_words=False)
    return "\n".join(
        fill(" ".join(item.split()), subsequent_indent="  " if item[0] == "-" else "")
        for item in items
    )
