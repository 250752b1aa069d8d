"""The pages that describe the code keep up with it: docs/errors.md quotes messages that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.pages import ROOT
from tests.test_imports import FILES

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
