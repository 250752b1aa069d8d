"""The pages of the site keep up with the code: docs/errors.md quotes messages that exist, and the
cells of the notebooks run in one process. ``make docs`` builds the site and opens its pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support import forked
from tests.support.pages import ROOT, blocks
from tests.test_imports import FILES

NOTEBOOKS = ["docs/start/ten_minutes.md", "docs/start/one_page.md"]
QUOTED = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)


def texts() -> Iterator[str]:
    """Yields the strings of the packages, with ``{}`` in place of what is filled in."""
    for file in FILES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}"
                    for part in node.values
                )


@pytest.fixture(scope="module")
def source() -> str:
    return "\0".join(texts())


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_source(message: str, source: str) -> None:
    parts = map(re.escape, message.split("..."))
    assert re.search("[^\0]*?".join(parts), source), f"no error or warning says {message!r}"


def test_the_page_of_errors_quotes_messages() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 30


@pytest.mark.limit(240)
@pytest.mark.parametrize("page", NOTEBOOKS)
def test_the_cells_of_a_notebook_run(page: str) -> None:
    cells = [text for language, _, text in blocks(page) if language == "{code-cell} python"]
    status, printed = forked.run(lambda: exec("\n".join(cells), {"__name__": "__main__"}))
    assert status == 0 and printed, printed
