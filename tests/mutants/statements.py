"""Notes which statements of this project run, in this process and in the processes that it starts.

Modules are compiled with a store before each statement of a function: ``__ran__[n] = 1``, where n
is the number of its line among the lines of all files. ``__ran__`` is a file that all processes
map, so the statements of ranks are noted too. As a plugin of pytest it writes a row for each test
that passes (torch.compile refuses the stores):

    python -m pytest -p tests.mutants.statements      out/statements/*.jsonl: [test, seconds, lines]
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import itertools
import json
import marshal
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.mutants.changed import ROOT, set_environment

ROWS = ROOT / "out" / "statements"
PACKAGES = ("disttensor", "ops", "reshard")
FILES = sorted(f for package in PACKAGES for f in (ROOT / package).rglob("*.py"))
_ends = itertools.accumulate(f.read_bytes().count(b"\n") + 2 for f in FILES)
FIRST = dict(zip(map(str, FILES), [0, *_ends], strict=False))  # the number of line 0 of each file
SIZE = 1 << 17  # more than the lines of all files


class _Marked(ast.NodeTransformer):
    """Adds a store before each statement of a function."""

    def __init__(self, first: int) -> None:
        self.first, self.inside = first, False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        before = self.inside
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.inside = not isinstance(node, ast.ClassDef)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, [x for statement in value for x in self._marked(statement)])
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)
        self.inside = before
        return node

    def _marked(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        declares = isinstance(statement, (ast.Global, ast.Nonlocal))
        if self.inside and not is_text and not declares:
            store = ast.parse(f"__ran__[{self.first + statement.lineno}] = 1").body[0]
            for node in ast.walk(store):
                ast.copy_location(node, statement)
            yield store
        yield self.visit(statement)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file with its marks, once for all processes of a run."""

    def get_code(self, fullname: str) -> CodeType:
        first = FIRST[self.path]
        kept = Path(os.environ["RAN_STATEMENTS"]).with_name(f"code-{first}")
        if kept.exists():
            return marshal.loads(kept.read_bytes())  # type: ignore[no-any-return]
        tree = _Marked(first).visit(ast.parse(Path(self.path).read_text()))
        code = compile(tree, self.path, "exec", dont_inherit=True)
        part = kept.with_name(f"{kept.name}-{os.getpid()}")
        part.write_bytes(marshal.dumps(code))
        part.replace(kept)
        return code  # type: ignore[no-any-return]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] not in PACKAGES:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is not None and found.origin in FIRST:
            found.loader = _Loader(name, found.origin)
        return found


def start() -> None:
    """Notes statements of modules that are imported from now on, here and in new processes."""
    folder = tempfile.mkdtemp(prefix="statements-")
    path = Path(folder) / "ran"
    path.write_bytes(bytes(SIZE))
    set_environment(RAN_STATEMENTS=str(path))
    begin()


def begin() -> None:
    """Notes statements in the file that the environment names."""
    with open(os.environ["RAN_STATEMENTS"], "r+b") as file:
        builtins.__ran__ = mmap.mmap(file.fileno(), SIZE)  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder())


def take() -> list[int]:
    """Returns the numbers of the lines noted since the last call."""
    ran = builtins.__ran__  # type: ignore[attr-defined]
    found = ran[:]
    ran[:] = bytes(SIZE)
    return [n for n, is_noted in enumerate(found) if is_noted]


def forget() -> None:
    """Drops decisions and torch's answers, so that the next test runs the code that makes them."""
    from disttensor.cache import clear_decisions  # compiled with marks by now
    from disttensor.dispatch.resolve import DECISIONS
    from ops.answer import KNOWN

    clear_decisions()
    DECISIONS.clear()
    KNOWN.clear()


def by_file(numbers: list[int]) -> Iterator[tuple[str, int]]:
    """Yields the file, from the root of the repository, and the line of each number."""
    files = iter(sorted((first, file) for file, first in FIRST.items()))
    following, (first, file) = next(files), (0, "")
    for number in sorted(numbers):
        while following[0] <= number:
            first, file = following
            following = next(files, (SIZE, ""))
        yield str(Path(file).relative_to(ROOT)), number - first


# As a plugin --------------------------------------------------------------------------------------

_rows: list[Any] = []  # the open file
_failed: set[str] = set()


def pytest_load_initial_conftests(args: list[str]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in args:  # this process runs tests
        start()
        ROWS.mkdir(parents=True, exist_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not _rows:
        _rows.append(open(ROWS / f"{os.getpid()}.jsonl", "w"))  # noqa: SIM115
    forget()
    take()
    begun = time.monotonic()
    try:
        return (yield)
    finally:
        mark = item.get_closest_marker("candidate")  # tests/support/quick.py
        name = mark.args[0] if mark is not None else item.nodeid
        row = [name, round(time.monotonic() - begun, 3), take()]
        if item.nodeid not in _failed:
            print(json.dumps(row, separators=(",", ":")), file=_rows[0], flush=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_unconfigure() -> None:
    while _rows:
        _rows.pop().close()
