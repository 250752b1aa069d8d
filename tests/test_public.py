"""The public names: of disttensor and of its modules. Each has an example that runs in a world of
one."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

import disttensor as dt
import ops
import reshard
from disttensor import pipeline
from disttensor.core import placement
from tests.support.pool import on_ranks

NAMES = [
    "Checkpointer", "DistTensor", "Partial", "Placement", "ProcessMesh", "Replicate", "Shard",
    "Strategy", "accumulate", "arange", "broadcast_value", "capture", "clip_grad_norm_", "compile",
    "distribute_tensor", "empty", "from_dtensor", "from_local", "from_pretrained", "full",
    "fully_shard", "init_mesh", "launch", "local_map", "local_ranks", "manual_seed", "ones",
    "publish", "rand", "randint", "randn", "randperm", "receive", "replay", "replicate", "reshard",
    "shard_data_parallel", "shard_loader", "shard_module", "shard_tensor", "sync_gradients",
    "to_dtensor", "values_everywhere", "verify", "visualize", "watch", "zeros",
]  # fmt: skip
MODULES = {
    "disttensor.attention": ["Balanced", "policy"],
    "disttensor.debugging": [
        "CommLog", "CommRecord", "Explanation", "check_replicas", "compare_ranks",
        "compare_regular", "explain", "info", "pieces", "record_comms", "strict",
    ],
    "disttensor.errors": [
        "CaptureError", "CommError", "CustomFunctionError", "DistTensorError", "FallbackWarning",
        "MismatchError", "PieceWarning", "RankError", "SimulationError", "StrictError",
        "VerifyError",
    ],
    "disttensor.experts": ["combine_tokens", "dispatch_tokens", "expert_load"],
    "disttensor.fsdp": ["FSDPModule", "SegmentByAnchors", "SegmentBySize", "unshard"],
    "disttensor.integrations": [
        "lightning_strategy", "one_process", "shard_accelerator", "shard_trainer",
    ],
    "disttensor.optim": ["own", "shard_scaler"],
    "disttensor.pipeline": [
        "Action", "Costs", "Event", "Recorder", "Schedule", "Split", "Tick", "Timeline",
        "dualpipev", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "named", "never_skip",
        "one_f_one_b", "plot", "record", "run", "search", "skip", "split", "visits", "zbv",
        "zero_bubble",
    ],
    "disttensor.pretrained": ["load", "save"],
    "disttensor.random": ["rng"],
    "disttensor.simulate": ["devices", "measure", "plan_strategy", "simulate"],
    "ops": [
        "RULES", "Arg", "DistSpec", "Factors", "Inferred", "Layout", "NoRule", "Rule", "infer",
        "letters", "pointwise_factors", "register", "replace_rule", "rule",
    ],
    "reshard": ["Group", "Step", "background", "choose", "cost", "register", "run"],
}  # fmt: skip
# The other names of ops and reshard are for authors of rules and movements: docs/rules.md and
# docs/reshard.md show them.
FOR_USERS = {"ops": ["DistSpec", "Layout"], "reshard": ["Group"]}
SHOWN = [
    *(("disttensor", name) for name in NAMES),
    *(
        (module, name)
        for module, names in MODULES.items()
        for name in FOR_USERS.get(module, names)
        if name != "devices"  # a module
    ),
]
MADE_HERE = {"DistTensor", "Recorder", "Split", "Tick"}  # users do not write these names


def test_the_door_is_what_it_says():
    assert dt.__all__ == sorted(dt.__all__) == NAMES
    loose = {
        n
        for n, v in vars(dt).items()
        if not n.startswith("_") and not isinstance(v, types.ModuleType)
    }
    assert loose == set(dt.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_is_what_it_says(module):
    assert importlib.import_module(module).__all__ == MODULES[module]


def test_no_name_of_the_door_is_a_module_of_the_package():
    """The import of a module would replace the object that has its name. ``disttensor.verify`` and
    ``disttensor.watch`` are commands, which cannot be imported."""
    folder = Path(dt.__file__).parent
    taken = [n for n in NAMES if (folder / n).exists() or (folder / f"{n}.py").exists()]
    assert taken == ["verify", "watch"]
    for name in taken:
        with pytest.raises(ImportError, match=rf"python -m disttensor\.{name}"):
            importlib.import_module(f"disttensor.{name}")
        assert callable(getattr(dt, name))


def test_names_of_0_1_are_gone():
    page = (Path(dt.__file__).parents[1] / "docs" / "coming_from" / "disttensor_0_1.md").read_text()
    old = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    names = {*re.findall(r"`dt\.(\w+)`", "".join(old))}
    assert len(names) > 30 and not names & {*dt.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'rng'"):
        _ = dt.rng


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'disttensor' has no attribute 'shard_tensr'"):
        dt.shard_tensr  # noqa: B018
    with pytest.raises(ImportError, match="shard_tensr"):
        from disttensor import shard_tensr  # noqa: F401


def test_the_reference_has_an_entry_for_each_name():
    """An entry of autodoc in docs/reference/AREA.rst, and the name in the table of its index."""
    folder = Path(dt.__file__).parents[1] / "docs" / "reference"
    pages = "".join(page.read_text() for page in folder.glob("*.rst"))
    entries = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)(?:\(.*\))?$", pages, re.MULTILINE)
    assert len(entries) == len(set(entries)), sorted(entries)
    listed = set(re.findall(r"`([\w.]+)`", (folder / "index.md").read_text()))
    for module, names in {"disttensor": NAMES, **MODULES}.items():
        for name in (f"{module}.{name}" for name in names):
            assert name in entries or any(entry.startswith(f"{name}.") for entry in entries), name
            assert name.replace("disttensor.", "dt.") in listed, name


def text_of(module: str, name: str) -> str:
    """The docstring with the example; of a union of types that is the module's."""
    thing = getattr(importlib.import_module(module), name)
    return inspect.getdoc(placement if name == "Placement" else thing) or ""


@pytest.mark.parametrize(("module", "name"), SHOWN)
def test_every_name_says_what_it_is_and_shows_it(module, name):
    text = text_of(module, name)
    assert text.split("\n")[0].strip() and ">>> " in text, f"{name} has no example in its docstring"
    path = f"dt.{name}" if module == "disttensor" else f"{module.rpartition('.')[2]}.{name}"
    imported = rf"from {module} import .*\b{name}\b"
    assert path in text or re.search(imported, text) or name in MADE_HERE


@on_ranks(1)
def test_examples_run():
    mesh = dt.init_mesh((1, 1), ("dp", "tp"))
    known = {"torch": torch, "dt": dt, "ops": ops, "reshard": reshard, "mesh": mesh}
    failed = []
    for module, name in SHOWN:
        names = {**known, "pipeline": pipeline} if module == pipeline.__name__ else {**known}
        test = doctest.DocTestParser().get_doctest(text_of(module, name), names, name, None, None)
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
        ):  # plot writes a file
            runner.run(test, out=report.append)
        if report:
            failed.append("".join(report))
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("package", ["disttensor", "ops", "reshard"])
def test_each_package_can_be_imported_first_and_starts_nothing(package):
    code = (
        f"import {package}, torch.distributed as d, threading;assert not d.is_initialized() and "
        "threading.active_count() == 1; import disttensor, ops, reshard"
    )
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert out.returncode == 0 and not out.stderr, out.stderr
