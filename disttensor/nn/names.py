"""Matches names and patterns of modules and parameters, and finds names similar to unknown ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

_GLOB = re.compile(r"[*?\[]")


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def match_names(pattern: str, names: Collection[str]) -> list[str]:
    """Returns the ``names`` that match ``pattern``: the name itself, else the matches of a glob by
    parts, in which ``*`` matches one part or some of it."""
    if pattern in names:
        return [pattern]
    want = pattern.split(".")
    split = ((name, name.split(".")) for name in names)
    return [n for n, have in split if len(have) == len(want) and all(map(fnmatchcase, have, want))]


def find_modules(root: nn.Module, pattern: str, where: str) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) for each match of ``pattern``; for a ModuleList, its elements.
    Raises ValueError, which begins with ``where``, if there is none."""
    modules = {name: module for name, module in root.named_modules() if name}
    found: list[tuple[str, nn.Module]] = []
    for name in match_names(pattern, modules):
        if isinstance(modules[name], nn.ModuleList) and not has_forward(modules[name]):
            found += [(f"{name}.{key}", m) for key, m in modules[name].named_children()]
        else:
            found.append((name, modules[name]))
    if not found:
        raise ValueError(
            f"{where}{pattern!r} matches no module of {type(root).__name__}; there are "
            f"{list_names(pattern, modules)}"
        )
    return found


def covers(pattern: str | re.Pattern[str], name: str, modules: Collection[str]) -> bool:
    """Returns True if an entry of a plan matches the tensor ``name``, by its own name or the name
    of a module that contains it. A regex has to match the full name; ``*`` in a glob matches any
    number of parts."""
    if isinstance(pattern, str) and (not _GLOB.search(pattern) or pattern in modules):
        return name == pattern or name.startswith(pattern + ".")
    parts = name.split(".")
    around = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
    if isinstance(pattern, re.Pattern):
        return any(map(pattern.fullmatch, around))
    return any(fnmatchcase(part, pattern) for part in around)


def close_to(name: Any, names: Iterable[str], most: int = 3) -> list[str]:
    """Returns names similar to ``name``, the likeliest first."""
    return get_close_matches(str(name), list(names), most, 0.5)


def list_names(name: str, names: Collection[str]) -> str:
    """Lists ``names`` for an error about an unknown ``name``: similar names first, at most 8."""
    shown = list(dict.fromkeys([*close_to(name, names), *names]))[:8]
    return ", ".join(shown) + (", ..." if len(names) > 8 else "")
