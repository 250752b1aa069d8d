"""The Python of the pages for people, as programs.

As a script (``pages.py RESULT PAGE ...``) it runs pages one after the other and writes what each
has printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHANGED = "README.md, with the one line changed"


def blocks(page: str) -> Iterator[tuple[str, int, str]]:
    """(language, number of the first line, text) of each fenced block."""
    language, first, lines = None, 0, []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, first, lines = line[3:], number + 1, []
        else:
            yield language, first, "\n".join(lines)
            language = None


def program(page: str) -> str:
    """The page's Python, each line where it stands in the page, so that tracebacks point there."""
    if page == CHANGED:
        line = r"strategy = .*  # change one line: (.*)"
        return re.sub(line, r"strategy = dt.Strategy(\1)", program("README.md"))
    lines: list[str] = []
    for language, first, text in blocks(page):
        if language == "python":
            lines += [""] * (first - 1 - len(lines)) + text.split("\n")
    return "\n".join(lines)


def run_pages(result: str, pages: list[str]) -> None:
    printed = {}
    for page in pages:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(program(page), page, "exec"), {"__name__": "page"})
        printed[page] = out.getvalue()
    if os.environ.get("RANK", "0") == "0":
        Path(result).write_text(json.dumps(printed))


if __name__ == "__main__":
    run_pages(sys.argv[1], sys.argv[2:])
