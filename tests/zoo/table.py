"""What became of each network, as the page docs/zoo.md shows it."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.zoo.vision import PACKAGES

BEGIN, END = "<!-- the table of the zoo -->", "<!-- its end -->"
AXES = ("dp", "tp")
KINDS = {
    "right": "right",
    "refused": "refused by name",
    "wrong": "wrong",
    "apart": "ranks differ",
    "hung": "hang",
    "died": "die",
}
Entry = dict[str, Any]


def family(name: str) -> str:
    """The package, and whether it trains."""
    package = name.partition(".")[0]
    return package + name.partition(",")[2] if package in PACKAGES else "transformers"


def state(entry: Entry) -> str:
    """right, bad, or small: it could not be built small."""
    if "small" in entry:
        return "small"
    return "right" if all(entry[axis]["kind"] == "right" for axis in AXES) else "bad"


def is_bad(entry: Entry) -> bool:
    """Is there a number, a hang or an end that plain torch does not have?"""
    return any(entry.get(a, {}).get("kind", "right") not in ("right", "refused") for a in AXES)


def page(known: dict[str, Entry]) -> str:
    entries = [known[name] for name in sorted(known)]
    lines = [_counts(entries)]
    rows = [
        f"| {e['name']} | {axis} | {KINDS[e[axis]['kind']]} | {_short(e[axis]['says'], 110)} |"
        for e in entries
        if state(e) == "bad"
        for axis in AXES
        if e[axis]["kind"] != "right"
    ]
    if rows:
        lines += ["| network | | | the first line of the error |", "|---|---|---|---|", *rows, ""]
    for kind in dict.fromkeys(family(e["name"]) for e in entries):
        right = [e["name"] for e in entries if family(e["name"]) == kind and state(e) == "right"]
        if right:
            lines += [_paragraph(f"Right under both, of {kind}:", [_bare(n) for n in right]), ""]
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for e in entries:
        if state(e) == "small":
            reasons[_reason(e["small"])].append(e["name"])
    for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        lines += [_paragraph(f"Not built small, {reason}:", names), ""]
    return "\n".join(lines).strip()


def _counts(entries: Sequence[Entry]) -> str:
    head = ["networks of", "", *KINDS.values(), "not built small"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    for kind in dict.fromkeys(family(e["name"]) for e in entries):
        group = [e for e in entries if family(e["name"]) == kind]
        small = sum(state(e) == "small" for e in group)
        for axis in AXES:
            ends = collections.Counter(e[axis]["kind"] for e in group if axis in e)
            numbers = [*(ends[k] for k in KINDS), small]
            lines.append(f"| {kind} | {axis} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join([*lines, ""])


def _reason(says: str) -> str:
    """Grouped by what was missing."""
    if "it has no class" in says or "Error" not in says:
        return "since no inputs are known for it"
    if found := re.search(r"requires the (\w+) library|No module named '(\w+)'", says):
        return f"since {found[1] or found[2]} is not installed"
    if "million parameters" in says:
        return "since it stays large"
    if "random numbers" in says:
        return "since it draws random numbers in evaluation"
    return "as neither its configuration nor its inputs were guessed"


def _short(text: str, most: int) -> str:
    text = re.sub(r"(/[\w.+-]+)+/(?=[\w.-]+\.py)", "", text.replace("|", "\\|"))
    return text if len(text) <= most else text[: most - 1] + "…"


def _bare(name: str) -> str:
    inner = name.partition(".")[2].partition(",")[0]
    return name if family(name) == "transformers" else inner


def _paragraph(title: str, names: Sequence[str]) -> str:
    text = f"{title} {', '.join(names)}."
    lines = textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def write(file: Path, known: dict[str, Entry], about: str) -> None:
    """``about``: a line over the table."""
    before, _, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    about = textwrap.fill(about, 100)
    text = f"{before}{BEGIN}\n{about}\n\n{page(known)}\n{END}{rest.partition(END)[2]}"
    file.write_text(text, encoding="utf-8")


def right_ones(file: Path) -> list[str]:
    """The types of transformers that the page calls right."""
    text = file.read_text(encoding="utf-8")
    found = re.search(r"^Right under both, of transformers:(.*?)\.\n\n", text, re.DOTALL | re.M)
    return re.split(r",\s+", found[1].strip()) if found else []
