"""Some of the networks that docs/zoo.md calls right are right in this state of the code: others
for each part. ``make zoo`` runs them all."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import pytest

from tests.support import pool
from tests.support.part import EVERYTHING, part
from tests.zoo import check, recipes, saving, strangers, table
from tests.zoo.zoo import LIMIT, SEARCH_LIMIT, Ranks, measure

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
COUNT = 6
COMPILED = [
    "gpt2", "llama", "mistral", "bert", "vit", "qwen2", "qwen3", "gemma", "gemma2", "phi", "opt",
    "gpt_neox", "gptj", "falcon", "t5", "bart", "roberta", "distilbert", "albert", "electra",
    "deberta-v2", "clip", "whisper", "deit", "mpt", "gpt_bigcode", "olmo",
]  # fmt: skip
installed = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@installed
@pytest.mark.slow
@pytest.mark.limit(300)
def test_networks_of_this_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONHASHSEED", "0"
    )  # models iterate over sets, as all ranks then do alike
    monkeypatch.setattr(pool, "warning_filters", ["ignore"])  # those of transformers
    right = table.right_ones(PAGE)
    names = part(right, COUNT)
    assert names, "the page names no network that is right: make zoo"
    one, two = Ranks(1), Ranks(2)
    try:
        entries = [measure(name, one, two) for name in names]
    finally:
        one.stop()
        two.stop()
    bad = [entry for entry in entries if table.state(entry) != "right"]
    assert not bad, f"python -m tests.zoo.zoo --only {bad[0]['name']}\n{bad}"


@installed
@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_network_of_this_commit_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "warning_filters", ["ignore"])
    every = [(name, axis) for name in COMPILED for axis in ("tp", "dp")]
    ((name, axis),) = part(every, 1) if not EVERYTHING else every[:1]
    one, two = Ranks(1), Ranks(2)
    try:
        ((kind, recipe),) = one.call(SEARCH_LIMIT, recipes.search, name)
        assert kind == "ok", recipe
        recipe = pickle.loads(recipe)
        answers = two.call(LIMIT, check.compiled_on_rank, recipe, axis, "aot_eager")
    finally:
        one.stop()
        two.stop()
    ends = [pickle.loads(x) if kind == "ok" else x for kind, x in answers]
    assert ends == [(2, [], [])] * 2, f"{name} {axis}: {ends}"


@installed
@pytest.mark.slow
@pytest.mark.limit(300)
def test_one_process_loads_what_libraries_save_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "warning_filters", ["ignore"])
    names = [name for name in ("torch", "transformers", "peft") if strangers.installed(name)]
    one, two = Ranks(1), Ranks(2)
    try:
        entries = [saving.measure(name, one, two) for name in names]
    finally:
        one.stop()
        two.stop()
    bad = [e for e in entries if any(e.get(a, {}).get("kind") != "right" for a in saving.AXES)]
    assert not bad, f"python -m tests.zoo.saving --only {bad[0]['name']}\n{bad}"


def entry(name: str, **ends: str) -> table.Entry:
    if "small" in ends:
        return {"name": name, **ends}
    return {"name": name, **{axis: {"kind": kind, "says": "why"} for axis, kind in ends.items()}}


def test_the_page_says_what_became_of_each(tmp_path: Path) -> None:
    known = {
        e["name"]: e
        for e in (
            entry("a", dp="right", tp="right"),
            entry("b", dp="right", tp="refused"),
            entry("c", dp="wrong", tp="hung"),
            entry("d", small="NoRecipeError: ImportError: D requires the natten library"),
            entry("timm.e, in training", dp="right", tp="right"),
            entry("kosmos-2.5", dp="right", tp="right"),
        )
    }
    file = tmp_path / "page.md"
    file.write_text(f"before {table.BEGIN} old {table.END} after", encoding="utf-8")
    table.write(file, known, "about")
    text = file.read_text(encoding="utf-8")
    assert text.startswith("before ") and text.endswith(" after") and " old " not in text
    assert "| transformers | dp | 3 | 0 | 1 | 0 | 0 | 0 | 1 |" in text
    assert "| transformers | tp | 2 | 1 | 0 | 0 | 1 | 0 | 1 |" in text
    assert "| b | tp | refused by name | why |" in text and "| b | dp" not in text
    assert "since natten is not installed: d." in text
    assert table.right_ones(file) == ["a", "kosmos-2.5"]
    assert [name for name in known if table.is_bad(known[name])] == ["c"]
