"""The programs of docs/coming_from/: both print the losses that the page shows.

The first Python block of a page is a program of the other library, the second is ours. A library
that is not installed is left out: `make peers` installs all of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import warnings
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support import pool
from tests.support.pages import ROOT, blocks
from tests.support.pool import run_on_ranks

PAGES = {  # the processes of the other library's program, and its package
    "accelerate": (4, "accelerate"),
    "ddp": (4, "torch"),
    "deepspeed": (4, "deepspeed"),
    "dtensor": (4, "torch"),
    "fsdp2": (4, "torch"),
    "jax": (1, "jax"),
    "megatron": (4, "megatron"),
    "paddle": (0, "paddle"),  # has its own launcher
    "pipelining": (2, "torch"),
    "torchtitan": (4, "torch"),
    "transformers": (4, "transformers"),
}

CHANGE_TORCH = {"deepspeed", "jax", "megatron"}  # for all programs of the process


def printed(page: str, which: int) -> str:
    """What a program of the page prints on this rank, in a world that has started already."""
    found = [(first, text) for kind, first, text in blocks(page) if kind == "python"][which]
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), dist.get_rank())
    names |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), dist.get_world_size())
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # which nobody calls
    code = compile("\n" * (found[0] - 1) + found[1], page, "exec")
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        mock.patch.multiple(dist, init_process_group=nothing, destroy_process_group=nothing),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        if which == 0:  # of the other library's own
            warnings.simplefilter("ignore")
        exec(code, {"__name__": "__main__"})
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(True)  # else it has found its processes for good
    return "".join(line for line in out.getvalue().splitlines(True) if line.startswith("step"))


def nothing(*_: object, **__: object) -> None:
    """In place of the start and the end of the world, which is the pool's."""


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", text)]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.limit(240)
def test_both_programs_print_what_the_page_shows(name: str) -> None:
    page = f"docs/coming_from/{name}.md"
    (shown,) = (text for kind, _, text in blocks(page) if kind == "text")
    ranks, package = PAGES[name]
    installed = importlib.util.find_spec(package)
    if name == "transformers" and not installed:  # our program uses its Trainer
        pytest.skip("transformers is not installed")
    programs = [(1, 1), (2 if name == "pipelining" else 4, 1)]
    if ranks and installed:
        programs.append((ranks, 0))
    for ranks, which in programs:
        lines = "".join(run_on_ranks(ranks, printed, page, which, timeout=120))
        assert re.findall("[a-z]+", lines) == re.findall("[a-z]+", shown)
        assert numbers(lines) == pytest.approx(numbers(shown), abs=3e-4), (ranks, which)
    if which == 0 and package in CHANGE_TORCH:
        pool.stop(ranks)


def test_every_page_is_in_the_list() -> None:
    folder = ROOT / "docs" / "coming_from"
    index = (folder / "index.md").read_text()
    pages = {p.stem for p in folder.glob("*.md") if "## A program\n" in p.read_text()}
    assert pages == PAGES.keys() and all(f"]({page}.md)" in index for page in pages)
