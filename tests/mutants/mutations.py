"""Small changes of a source file, each of which a test should notice."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPARED: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(), ast.Lt: ast.LtE(), ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip
COMPUTED: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.FloorDiv(), ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.Mult(), ast.BitOr: ast.BitAnd(), ast.BitAnd: ast.BitOr(),
}  # fmt: skip
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min", "sorted": "list"}


class Mutant(NamedTuple):
    """``source``: the whole file, changed in one place. ``lines``: where that was."""

    path: Path
    lines: range
    source: str

    def __str__(self) -> str:
        before, after = self.path.read_text().splitlines(), self.source.splitlines()
        changed = difflib.unified_diff(before, after, lineterm="", n=0)
        shown = [x for x in changed if x[:3] not in ("---", "+++") and x[:2] != "@@"]
        return "\n".join([f"{self.path}:{self.lines.start}", *(f"  {line}" for line in shown)])


def mutants(path: Path) -> list[Mutant]:
    """All of a file, from top to bottom."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    found = []
    for node, text in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        code = source.encode()
        changed = (code[:begin] + text.encode() + code[end:]).decode()
        found.append(Mutant(path, range(node.lineno, node.end_lineno + 1), changed))
    return sorted(found, key=lambda m: (m.lines.start, m.lines.stop, m.source))


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """(node, what stands there instead)"""
    for node in _code(tree):
        match node:
            case ast.Compare(ops=[op]) if type(op) in COMPARED:
                yield node, _text(ast.Compare(node.left, [COMPARED[type(op)]], node.comparators))
            case ast.BoolOp(op, values):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield node, _text(ast.BoolOp(other, values))
            case ast.BinOp(left, op, right) if type(op) in COMPUTED:
                yield node, _text(ast.BinOp(left, COMPUTED[type(op)], right))
            case ast.UnaryOp(ast.Not(), operand):
                yield node, _text(operand)
            case ast.Constant(bool() as value):
                yield node, str(not value)
            case ast.Constant(int() as value):
                yield node, str(value + 1)
            case ast.Call(ast.Name(name)) if name in NAMES:
                yield node.func, NAMES[name]
            case ast.If(test) | ast.IfExp(test) if not isinstance(test, (ast.Compare, ast.UnaryOp)):
                yield test, f"(not {_text(test)})"
            case ast.Expr(ast.Call() | ast.Yield()) | ast.AugAssign() | ast.Raise():
                yield node, "pass"
            case ast.Continue():
                yield node, "break"
            case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
                yield value, "None"


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes in order, without types and without the text of messages."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns") or isinstance(tree, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _code(child)


def _text(node: ast.AST) -> str:
    """In brackets: it stands where another one was."""
    text = ast.unparse(node)
    return text if isinstance(node, (ast.Name, ast.Call, ast.Constant)) else f"({text})"
