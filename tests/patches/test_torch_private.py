"""The private names of torch stand in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from disttensor import torch_private

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    file
    for package in ("disttensor", "ops", "reshard")
    for file in sorted((ROOT / package).rglob("*.py"))
    if file != ROOT / "disttensor/torch_private.py"
]
# Of tensors, storages, nodes and groups, whose type the syntax does not show.
METHODS = {
    "_cdata", "_execution_engine", "_get_backend", "_is_view", "_make_subclass", "_sequence_nr",
}  # fmt: skip
OPS = frozenset(dir(torch._C._VariableFunctions)) | frozenset(dir(torch.ops.aten))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of torch that is reached from one of its modules or
    classes, except the names of its operators, which are data."""
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    ours.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                ours.add(alias.asname or alias.name)
                if any(map(is_private, f"{node.module}.{alias.name}".split("."))):
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.AST = node
            while isinstance(root, ast.Attribute):
                root = root.value
            of_torch = isinstance(root, ast.Name) and root.id in ours
            if node.attr in METHODS or (of_torch and node.attr not in OPS):
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("folder", sorted({str(f.parent.relative_to(ROOT)) for f in FILES}))
def test_private_names_of_torch_stand_in_one_module(folder: str) -> None:
    found = [
        f"{file}:{line}: {name}"
        for file in FILES
        if file.parent == ROOT / folder
        for line, name in private_names(ast.parse(file.read_text()))
    ]
    assert not found, "\n".join([*found, "take them from disttensor/torch_private.py"])


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("import torch\ntorch._C._nn", 2),
        ("from torch import distributed as d\nd.distributed_c10d._get_default_group()", 1),
        ("from torch._subclasses import FakeTensorMode", 1),
        ("node._sequence_nr()", 1),
        ("import torch\nclass A: pass\ntorch._foreach_add\nA._x\ntorch.__version__", 0),
    ],
)
def test_private_names_are_found(code: str, count: int) -> None:
    assert len(list(private_names(ast.parse(code)))) == count


def test_a_name_that_is_gone_is_one_error_with_the_version() -> None:
    words = (
        rf"torch {torch.__version__} has no torch\._new or _old, which .* needs for a test".replace(
            "+", r"\+"
        )
    )
    with pytest.raises(ImportError, match=words):
        torch_private.need("for a test", torch, "_new", "_old")
    assert torch_private.need("for a test", torch, "_new", "add") is torch.add


def test_another_name_for_a_process_group_is_put_back() -> None:
    c10d = torch.distributed.distributed_c10d
    usual = c10d._process_group_name
    with pytest.raises(KeyError), torch_private.group_name("mine"):
        assert c10d._process_group_name([0], False) == "mine"
        raise KeyError
    assert c10d._process_group_name is usual
