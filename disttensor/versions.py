"""Checks the version of torch: a version that is too old is refused, and an unknown newer version
imports or raises a clear error."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__version__ = "0.3.0"  # of disttensor: pyproject.toml takes it from here
OLDEST, NEWEST = (2, 12), (2, 15)  # the two ends of constraints-torch.txt


def number(version: str) -> tuple[int, int] | None:
    """Returns the first two numbers of a version; None for another form."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def dotted(parts: tuple[int, int]) -> str:
    return ".".join(map(str, parts))


@contextmanager
def importing(version: str = torch.__version__) -> Iterator[None]:
    """Surrounds the imports of the package. Raises one error, with the version and the tested
    range, for a torch that is too old, and for a newer torch on which the imports fail. Garbage
    collection is off meanwhile: a search through all objects of torch takes as long as the imports.

    On a tested torch errors are not changed, nor is the error of a missing package.
    """
    found, tested = number(version), f"torch {dotted(OLDEST)} to {dotted(NEWEST)}"
    if found is not None and found < OLDEST:
        raise ImportError(
            f"disttensor is tested on {tested}, and this is torch {version}, which lacks functions "
            f"that it needs. Install a newer one: pip install 'torch>={dotted(OLDEST)}'",
            name="torch",
        )
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("torch")
        if missing or (found is not None and found <= NEWEST):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        above = NEWEST[0], NEWEST[1] + 1
        raise ImportError(
            f"disttensor is tested on {tested}, and does not import on torch {version}, where "
            f"something that it needs has moved: {where.filename}:{where.lineno}: "
            f"{type(error).__name__}: {error}. Install a newer disttensor, or a torch that is "
            f"tested: pip install 'torch<{dotted(above)}'",
            name="torch",
        ) from None
    finally:
        if collects:
            gc.enable()
