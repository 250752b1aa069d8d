"""Pickle for our own worker processes: lambdas and local functions travel too.

Plain pickle sends a function by its name. Test parameters are often lambdas, which have none, so
those go by their code (``marshal``: both ends are the same interpreter), defaults and closure;
their globals are the ones of the module they come from. A body whose ``assert``s pytest has
rewritten keeps them: the names that it needs for that ("@pytest_ar") go with it.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import types
from typing import Any


def dumps(value: Any) -> bytes:
    """``value`` as bytes for ``pickle.loads`` in a process that can import the same modules."""
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.FunctionType) or _has_name(obj):
            return NotImplemented
        cells = tuple(cell.cell_contents for cell in obj.__closure__ or ())
        code = marshal.dumps(obj.__code__)
        return _function, (
            code,
            obj.__module__,
            obj.__name__,
            obj.__defaults__,
            obj.__kwdefaults__,
            cells,
            _pytest_names(obj),
        )


def _pytest_names(function: types.FunctionType) -> dict[str, str]:
    """The modules that pytest's rewritten asserts refer to, by the name they have in the code."""
    scope = function.__globals__
    return {key: scope[key].__name__ for key in function.__code__.co_names if key[0] == "@"}


def _has_name(function: types.FunctionType) -> bool:
    """Whether importing the module and following the name gives this very function."""
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _function(
    code: bytes,
    module: str,
    name: str,
    defaults: tuple[Any, ...] | None,
    kwdefaults: dict[str, Any] | None,
    cells: tuple[Any, ...],
    pytest_names: dict[str, str],
) -> types.FunctionType:
    scope = importlib.import_module(module).__dict__
    scope.update({key: importlib.import_module(name) for key, name in pytest_names.items()})
    closure = tuple(types.CellType(value) for value in cells)
    function = types.FunctionType(marshal.loads(code), scope, name, defaults, closure)
    function.__kwdefaults__ = kwdefaults
    return function
