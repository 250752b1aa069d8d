"""Refuses another module under the name of one of our top-level packages, ``ops`` and ``reshard``.

Such a module is usually a file of the user that comes before ours on ``sys.path``.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import NoReturn

_HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_WAY_OUT = (
    "Rename that module, or move it into a package of your own: mypackage/{0}.py, and `from "
    "mypackage import {0}`."
)


def check_names(*names: str) -> None:
    """Raises ImportError if ``import name`` returns another module than ours for one of the names.
    The other module does not run."""
    for name in names:
        loaded = sys.modules.get(name)
        spec = find_spec(name) if loaded is None else None
        if loaded is None:
            file = None if spec is None else spec.origin
            how = "stands before that package on sys.path"
        else:
            file, how = getattr(loaded, "__file__", None), "was imported before disttensor"
        if not _is_ours(name, file) and (file or loaded):
            raise ImportError(
                f"disttensor needs its package {name!r} ({_folder(name)}), but another module of "
                f"this name {how}: {file or loaded!r}. {_WAY_OUT.format(name)}",
                name=name,
            )


def raise_missing(package: str, name: str) -> NoReturn:
    """Raises the error for a name that our package lacks: its ``__getattr__``. If another module of
    the package's name lies on ``sys.path``, it was probably meant, and the error names it.

    Raises:
        AttributeError: as usual; ``hasattr`` and pickle expect it.
        ImportError: in ``from package import name``, which drops the text of an AttributeError.
    """
    text = f"module {package!r} has no attribute {name!r}"
    if PathFinder.find_spec(name, [_folder(package)]) is None:  # else it is a submodule
        found = [PathFinder.find_spec(package, [entry]) for entry in sys.path]
        files = [spec.origin for spec in found if spec and spec.origin]
        others = [file for file in files if not (_is_ours(package, file) or _is_copy(file))]
        if others:
            text += (
                f": this is disttensor's package ({_folder(package)}), which was imported first; "
                f"another module of this name is {others[0]}. {_WAY_OUT.format(package)}"
            )
            if sys._getframe(2).f_code.co_name == "_handle_fromlist":  # of importlib
                raise ImportError(text, name=package)
    raise AttributeError(text)


def _folder(name: str) -> str:
    return os.path.join(_HOME, name)


def _is_ours(name: str, file: str | None) -> bool:
    return file is not None and os.path.dirname(os.path.realpath(file)) == _folder(name)


def _is_copy(file: str) -> bool:
    """Returns True for a package of another installation of disttensor."""
    return os.path.exists(os.path.join(os.path.dirname(file), "..", "disttensor", "versions.py"))
