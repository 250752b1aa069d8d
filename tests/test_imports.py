"""Imports point down: modules have layers, and none imports from a layer above its own."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("disttensor", "ops", "reshard")

# Packages and modules at the root, from the bottom up. Each may import those before it.
LAYERS = (
    "module_names",
    "versions",
    "torch_private",
    "callbacks",
    "observe",
    "settings",
    "cache",
    "runtime",
    "checks",
    "errors",
    "pytree",
    "graph_nodes",
    "comm",
    "progress",
    "drawing",
    "core",
    "ops",
    "reshard",
    "autograd",
    "random",
    "tensor",
    "gradients",
    "off_mesh",
    "dispatch",
    "optim",
    "api",
    "trace",
    "graphs",
    "data",
    "experts",
    "nn",
    "checkpoint",
    "publishing",
    "pipeline",
    "fsdp",
    "parallel",
    "simulate",
    "pieces",
    "patches",
    "attention",
    "debugging",
    "pretrained",
    "integrations",
    "launching",
    "hangs",
    "verification",
    "run",
    "watch",
    "verify",
    "doctor",
)

# The families of rules, from the bottom up, above the engine at the root of ``ops``.
FAMILIES = (
    "pointwise",
    "reduction",
    "shape",
    "indexing",
    "linalg",
    "random",
    "nn",
    "foreach",
)

# The packages of the distribution load in one order, whichever of them is imported first: these
# two files begin with ``import disttensor``, the one import that points up.
FIRST_LINE = ("ops", "reshard")

# Rules are pure: shapes and placements, no mesh, no communication.
FORBIDDEN = {"ops": ("disttensor.core.mesh", "disttensor.comm.collectives", "torch.distributed")}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(f): f for name in PACKAGES for f in sorted((ROOT / name).rglob("*.py"))}
FOLDERS: dict[str, list[str]] = {}
for _module, _file in FILES.items():
    FOLDERS.setdefault(str(_file.parent.relative_to(ROOT)), []).append(_module)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer_of(module: str) -> int | None:
    """The layer of the package that ``module`` is in; ``disttensor`` itself is on top."""
    if module == "disttensor":
        return len(LAYERS)
    name = module.removeprefix("disttensor.").split(".")[0]
    return LAYERS.index(name) if name in LAYERS else None


def family(module: str) -> int:
    """The number of the family of rules that ``module`` is in; the engine is below all of them."""
    name = [*module.split("."), ""][1]
    return FAMILIES.index(name) if name in FAMILIES else -1


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) for each import of one of our modules, or of what ``FORBIDDEN`` names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                base = ".".join(
                    [*parts[: len(parts) - node.level + is_package], *filter(None, [base])]
                )
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in FILES or base == "torch" else base


@functools.cache
def parse(module: str) -> tuple[Path, ast.Module, list[tuple[int, str]]]:
    file = FILES[module]
    tree = ast.parse(file.read_text(), str(file))
    return file.relative_to(ROOT), tree, list(imports(tree, module, file.stem == "__init__"))


def first_import(tree: ast.Module) -> ast.stmt | None:
    for node in tree.body:
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not future and isinstance(node, (ast.Import, ast.ImportFrom)):
            return node
    return None


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down(folder: str) -> None:
    for module in FOLDERS[folder]:
        check_imports(module)


def check_imports(module: str) -> None:
    own = layer_of(module)
    assert own is not None, (
        f"{module} is in no layer: add its package to LAYERS in {Path(__file__).name}, above all "
        "that it imports and below what imports it"
    )
    file, tree, found = parse(module)
    start = first_import(tree)
    for line, target in found:
        exempt = module in FIRST_LINE and target == "disttensor" and line == start.lineno
        if target.split(".")[0] not in PACKAGES or exempt:
            continue
        assert target in FILES, f"{file}:{line}: imports {target}, and there is no such module"
        above = layer_of(target)
        # A target without a layer is reported where it is the module under test.
        assert above is None or above <= own, (
            f"{file}:{line}: {module} (layer {own}) imports {target} (layer {above}) above it"
        )
        if module != "ops" and is_in(module, "ops") and is_in(target, "ops"):
            assert family(target) <= family(module), (
                f"{file}:{line}: {module} imports {target}, a later family of rules"
            )


@pytest.mark.parametrize("package", [m for m, f in FILES.items() if f.stem == "__init__"])
def test_a_package_says_what_is_in_it(package: str) -> None:
    assert ast.get_docstring(ast.parse(FILES[package].read_text())), (
        f"{FILES[package]} has no docstring"
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_inside_a_function(folder: str) -> None:
    for file, tree, _ in map(parse, FOLDERS[folder]):
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    assert not isinstance(node, (ast.Import, ast.ImportFrom)), (
                        f"{file}:{node.lineno}: {function.name} imports; move it to the head"
                    )


@pytest.mark.parametrize("package", FORBIDDEN)
def test_rules_stay_pure(package: str) -> None:
    for file, _, found in (parse(module) for module in FILES if is_in(module, package)):
        for line, target in found:
            reached = [name for name in FORBIDDEN[package] if is_in(target, name)]
            assert not reached, f"{file}:{line}: {package} may not import {reached[0]}"


def test_no_cycle() -> None:
    """Modules can be put in an order in which each imports only earlier ones."""
    left = {
        module: {t for _, t in parse(module)[2] if t in FILES and t != module}
        - ({"disttensor"} if module in FIRST_LINE else set())
        for module in FILES
    }
    while left:
        free = [module for module, needs in left.items() if not needs & left.keys()]
        assert free, f"these import each other in a circle: {sorted(left)}"
        for module in free:
            del left[module]


def test_importing_loads_nothing_but_ours() -> None:
    """No more of torch than ``import torch`` does (torch.distributed.tensor takes longer than all
    that is ours), and no other package."""
    code = "import sys, torch; before = {*sys.modules}; import disttensor; "
    code += "print(*{name.split('.')[0] for name in {*sys.modules} - before})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} - sys.stdlib_module_names == {*PACKAGES}
