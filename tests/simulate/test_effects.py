"""A simulation changes no files and nothing of the process; its later reads see what it wrote."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import glob
import gzip
import logging
import os
import pathlib
import pickle
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.request
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor.errors import SimulationError
from disttensor.simulate import devices, simulate
from disttensor.simulate.run import simulate_program
from disttensor.simulate.run_rank import of_script

OLD = "old contents"
OPEN_BEFORE: list[Any] = []


def text(path: str) -> str:
    with open(path) as file:
        return file.read()


def append() -> bool:
    with open("old", "a") as file:
        file.write("!")
    return text("old") == OLD + "!"


def change_in_place() -> bool:
    with open("second", "r+") as file:
        file.write("new")
    return text("second") == "new" + OLD[3:]


def overwrite() -> bool:
    pathlib.Path("third").write_text("new")
    return text("third") == "new" and os.path.getsize("third") == 3


def make_once() -> bool:
    with open("x", "x"), contextlib.suppress(FileExistsError):
        open("old", "x").close()
        return False
    return pathlib.Path("x").exists()


def low_level() -> bool:
    fd = os.open("low", os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"12")
    os.close(fd)
    return text("low") == "12" and os.stat("low").st_size == 2


def folders() -> bool:
    os.makedirs("runs/one/two")
    pathlib.Path("runs/one/file").touch()
    found = sorted(os.listdir("runs/one")), sorted(p.name for p in pathlib.Path("runs").rglob("*"))
    return found == (["file", "two"], ["file", "one", "two"])


def beside_old_files() -> bool:
    pathlib.Path("folder/new").write_text("1")
    return sorted(os.listdir("folder")) == ["a", "b", "new"] == sorted(
        os.path.basename(p) for p in glob.glob("folder/*")
    )  # fmt: skip


def rename() -> bool:
    os.rename("fourth", "moved")
    return text("moved") == OLD and not os.path.exists("fourth")


def replace() -> bool:
    pathlib.Path("temporary").write_text("new")
    os.replace("temporary", "fifth")
    return text("fifth") == "new"


def remove() -> bool:
    os.remove("sixth")
    pathlib.Path("seventh").unlink()
    return not {"sixth", "seventh"} & {*os.listdir()}


def remove_tree() -> bool:
    shutil.rmtree("tree")
    return not os.path.exists("tree/inner/a") and "tree" not in os.listdir(".")


def remove_folder() -> bool:
    try:
        os.rmdir("folder")
    except OSError:
        os.rmdir("empty")
    return os.path.isdir("folder") and not os.path.isdir("empty")


def copy() -> bool:
    shutil.copytree("folder2", "copied")
    shutil.copy("eighth", "copied/b")
    return text("copied/b") == OLD and text("copied/a") == OLD


def move() -> bool:
    shutil.move("folder2", "elsewhere")
    return text("elsewhere/a") == OLD and not os.path.exists("folder2")


def link() -> bool:
    os.symlink("eighth", "link")
    with open("link", "w") as file:
        file.write("through")
    return os.path.islink("link") and text("eighth") == "through"


def truncate() -> bool:
    os.truncate("ninth", 3)
    os.chmod("ninth", 0o600)
    os.utime("ninth", (1, 1))
    return text("ninth") == OLD[:3] and os.path.getmtime("ninth") == 1


def arrays() -> bool:
    np.save("array.npy", np.ones(3))
    np.ones(3).tofile("raw")
    return float(np.load("array.npy").sum()) == 3.0 == np.fromfile("raw").sum()


def tensors() -> bool:
    x = torch.ones(512, 512)
    torch.save({"x": x, "n": 3}, "model.pt")
    loaded = torch.load("model.pt")
    return loaded["n"] == 3 and loaded["x"].shape == (512, 512)


def values() -> bool:
    torch.save({"n": 3}, "values.pt")
    return bool(torch.load("values.pt") == {"n": 3})


def database() -> bool:
    with contextlib.closing(sqlite3.connect("base.db")) as base:
        base.execute("create table t (a)")
        base.execute("insert into t values (3)")
        base.commit()
    with contextlib.closing(sqlite3.connect("base.db")) as base:
        return base.execute("select a from t").fetchall() == [(3,)]


def archives() -> bool:
    with gzip.open("a.gz", "wb") as packed:
        packed.write(b"1")
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr("name", "1")
    with gzip.open("a.gz") as packed:
        return packed.read() == b"1" and zipfile.is_zipfile("a.zip")


def logs() -> bool:
    logging.getLogger().addHandler(logging.FileHandler("log"))
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger().warning("said")
    return "said" in text("log")


def temporary_files() -> bool:
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"1")
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(b"1")
    return not os.path.exists(folder)


def file_of_parent() -> bool:
    OPEN_BEFORE[0].write("more")
    OPEN_BEFORE[0].flush()
    return bool(OPEN_BEFORE[1].read() == OLD)


def other_folder() -> bool:
    os.makedirs("made/inner")
    os.chdir("made/inner")
    pathlib.Path("here").write_text("1")
    found = os.listdir(), pathlib.Path.cwd().name, text("../inner/here")
    os.chdir("../..")
    return found == (["here"], "inner", "1")


def environment() -> bool:
    os.environ["OF_A_RANK"] = "1"
    sys.path.insert(0, "nowhere")
    sys.argv.append("more")
    sys.modules["of_a_rank"] = sys
    return True


def numbers() -> bool:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    return True


def settings() -> bool:
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_num_threads(2)
    torch.set_grad_enabled(True)
    return True


def hooks() -> bool:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    atexit.register(lambda: pathlib.Path("at_exit").touch())
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.excepthook = print
    warnings.simplefilter("error", UserWarning)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    nn.Linear.forward = lambda self, x: x  # type: ignore[method-assign]
    return True


def refused() -> bool:
    calls: list[Callable[[], Any]] = [
        lambda: subprocess.run(["true"], check=False),
        lambda: os.system("touch by_a_shell"),
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: urllib.request.urlopen("http://127.0.0.1:9"),
        lambda: os.kill(os.getppid(), signal.SIGCONT),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
    ]
    for call in calls:
        try:
            call()
        except OSError as error:
            if "simulated rank must not" not in str(error):
                return False
        else:
            return False
    return True


EFFECTS: list[Callable[[], bool]] = [
    append, change_in_place, overwrite, make_once, low_level, folders, beside_old_files, rename,
    replace, remove, remove_tree, remove_folder, copy, move, link, truncate, arrays, tensors,
    values, database, archives, logs, temporary_files, file_of_parent, other_folder, environment,
    numbers, settings, refused, hooks,
]  # fmt: skip


def state() -> dict[str, Any]:
    """The state of this process that a program may change."""
    handlers = logging.getLogger()
    return {
        "folder": os.getcwd(), "environment": dict(os.environ), "path": list(sys.path),
        "argv": list(sys.argv), "modules": "of_a_rank" in sys.modules,
        "dtype": torch.get_default_dtype(), "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(), "flash": torch.backends.cuda.flash_sdp_enabled(),
        "grad": torch.is_grad_enabled(), "threads of torch": torch.get_num_threads(),
        "numbers": (torch.get_rng_state().tolist(), repr(np.random.get_state()),
                    random.getstate()),
        "hooks": len(torch.nn.modules.module._global_forward_hooks),
        "handlers": list(handlers.handlers), "level": handlers.level,
        "filters": list(warnings.filters), "signal": signal.getsignal(signal.SIGTERM),
        "excepthook": sys.excepthook, "threads": len(threading.enumerate()),
        "forward": nn.Linear.forward, "connect": socket.create_connection, "open": open,
        "gone": tempfile.gettempdir(),
    }  # fmt: skip


def contents(folder: pathlib.Path) -> dict[str, Any]:
    """The files of a folder with what they contain, their modes and times."""
    out = {}
    for path in sorted(folder.rglob("*")):
        found = path.lstat()
        data = path.read_bytes() if path.is_file() else None
        out[str(path)] = data, found.st_mode, found.st_mtime_ns
    return out


@pytest.fixture
def folder(
    tmp_path: pathlib.Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """Files that there were before, and a folder for temporary files that no other process uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    names = ["old", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"]
    names += ["folder/a", "folder/b", "folder2/a", "tree/inner/a", "model.pt", "held", "read"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(OLD)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_simulation_changes_no_files_and_nothing_of_the_process(folder: pathlib.Path) -> None:
    def build() -> Callable[[], None]:
        wrong = []
        for effect in EFFECTS:
            try:
                if not effect():
                    wrong.append(effect.__name__)
            except BaseException as error:
                wrong.append(f"{effect.__name__}: {type(error).__name__}: {error}")
        if wrong:
            raise RuntimeError("; ".join(wrong))
        return lambda: None

    with open("held", "a") as held, open("read") as read:
        OPEN_BEFORE[:] = held, read
        before = state(), contents(folder), os.listdir(tempfile.gettempdir())
        report = simulate(build, 2)
        after = state(), contents(folder), os.listdir(tempfile.gettempdir())
        assert read.read() == OLD
    assert before == after
    found = {os.path.relpath(path, folder): n for path, (n, _) in report.files.items()}
    assert found["third"] == 3 and found["model.pt"] > 512 * 512 * 4 and "read" not in found
    assert "sixth" not in found and report.files[str(folder / "third")][1] == (0, 1)


SAVING = """
import os, sys
import torch, torch.distributed as dist
import disttensor as dt
os.makedirs("run"); os.chdir("run")
strategy = dt.Strategy(dp=4)
model = torch.nn.Linear(512, 512)
strategy.apply(model)
optimizer = torch.optim.AdamW(model.parameters())
saver = dt.Checkpointer("states")
for it in range(3):
    x = dt.shard_tensor(torch.ones(256, 512), strategy.stages()[0], strategy.batch(sequence=None))
    model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    full = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(full, sys.argv[1])
    saver.save(it, model=model)
    print("saved", dist.get_rank())
"""


def test_a_script_that_saves_its_model_leaves_the_real_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It also changes its folder, in which the next rank does not look for the script."""
    monkeypatch.chdir(tmp_path)
    real, script = tmp_path / "model.pt", tmp_path / "train.py"
    torch.save(nn.Linear(512, 512).state_dict(), real)
    script.write_text(SAVING)
    before = contents(tmp_path)
    report = simulate_program(of_script("train.py", [str(real)]), 4)
    assert contents(tmp_path) == before and os.getcwd() == str(tmp_path)
    nbytes, ranks = report.files[str(real)]
    assert ranks == (0,) and 512 * 513 * 4 < nbytes < 512 * 513 * 4 + 1000
    whole = [(n, by) for path, (n, by) in report.files.items() if "states" in path]
    assert sum(n for n, _ in whole) == 512 * 513 * 4  # of the weight and the bias, once
    assert sorted(by for _, by in whole) == [(0,), (1,)]
    folder, apart = str(tmp_path / "run" / "states"), devices.Network(ranks_per_node=1)
    assert report.bytes_by_node(folder) == {0: 512 * 513 * 4}
    assert report.on(network=apart).bytes_by_node(folder) == {by[0]: n for n, by in whole}
    assert report.bytes_by_node()[0] == 512 * 513 * 4 + nbytes
    assert "model.pt, 1.00 MiB of ranks 0" in str(report)
    assert capsys.readouterr().out == "saved 0\n"


class Local(ValueError):
    """An error that takes two arguments, which pickle does not know."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def test_errors_of_a_rank_come_with_their_class_and_line() -> None:
    def of(error: BaseException | None) -> Callable[[], Any]:
        def build() -> Any:
            if error is None:
                os._exit(3)
            raise error

        return build

    with pytest.raises(pickle.PicklingError, match="mine") as caught:
        simulate(of(pickle.PicklingError("mine")), 2)
    assert "in build" in str(caught.value.__cause__)
    with pytest.raises(SimulationError, match="Local: one two"):
        simulate(of(Local("one ", "two")), 2)
    with pytest.raises(SimulationError, match=r"called sys.exit\(2\) at .*test_effects.py:\d+"):
        simulate(of(SystemExit(2)), 2)
    with pytest.raises(SimulationError, match="process of rank 0 ended with exit code 3"):
        simulate(of(None), 2)


def test_what_has_no_data_and_other_ranks_is_named_with_the_line() -> None:
    def of(call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
        def build() -> Any:
            x = dt.ones(4, mesh=dt.init_mesh((2,), ("dp",)))
            return lambda: call(x.to_local())

        return build

    calls: list[tuple[Callable[[torch.Tensor], Any], str]] = [
        (lambda x: x.numpy(), "reads all data of a tensor by numpy"),
        (lambda x: dist.all_gather_object([0, 0], 1), "all_gather_object at"),
    ]
    for call, message in calls:
        with pytest.raises(SimulationError, match=message) as caught:
            simulate(of(call), 2)
        assert "test_effects.py:" in str(caught.value) and "SIMULATION" in str(caught.value)
    product = of(lambda x: x.to(torch.complex64)[:, None] @ x.to(torch.complex64)[None])
    half = dataclasses.replace(devices.H100, peak={torch.float16: 1e12})
    line = r"no peak for torch.float32, in which mm at .*effects.py:\d+ computes"
    with pytest.raises(ValueError, match=line):
        simulate(product, 2, device=half)
    assert simulate(product, 2).kinds[0].flops == 4 * 2 * 4 * 4  # four products of real numbers
