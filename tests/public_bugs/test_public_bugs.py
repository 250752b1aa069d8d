"""The programs of public bugs are right on two ranks, and a bug that is planted is found. ``make
bugs`` runs them on 2 and 4 ranks under more strategies."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.public_bugs.__main__ import PAGE, RECORD, worst
from tests.public_bugs.harness import NAMES, TOLERANCE, bug, differences, run_ours
from tests.public_bugs.page import page, story
from tests.support.pages import ROOT
from tests.support.pool import run_on_ranks

PLANTED = [name for name in NAMES if hasattr(bug(name), "planted")]


@pytest.mark.parametrize("name", NAMES)
def test_the_program_that_was_meant_is_right(name: str) -> None:
    assert worst(run_on_ranks(2, run_ours, name)) <= TOLERANCE


def test_planted_bugs_are_found() -> None:
    found = {name: worst(run_on_ranks(2, run_ours, name, 0, "planted")) for name in PLANTED}
    assert len(found) >= 10 and all(error > 1e-3 for error in found.values()), found


def test_a_value_that_is_missing_or_of_another_shape_is_found() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert differences({"a": one, "b": one}, {"a": one}) == {"a": 0.0, "b": -1.0}
    assert differences({"a": one}, {"a": two})["a"] == float("inf")
    with pytest.raises(AssertionError, match=r"on no rank: \['b'\]"):
        worst([{"a": 0.0, "b": -1.0}, {"a": 0.0, "b": -1.0}])
    with pytest.raises(AssertionError, match=r"on ranks only: \['b'\]"):
        differences({"a": one}, {"a": one, "b": one})


def test_each_file_names_its_bug() -> None:
    where = r"[\w-]+/[\w.-]+#(\d+)( \([^)]+\))?, (20\d\d-\d\d-\d\d, )?(open|closed|merged)"
    for name in NAMES:
        told = story(name)
        found = re.match(where, told.where)
        assert found and f"_{found[1]}" in name, (name, told.where)
        assert told.what.endswith(".") and told.cause.endswith("."), name


def test_the_page_follows_the_files_and_the_record() -> None:
    record = json.loads(RECORD.read_text())
    assert record.keys() == set(NAMES)
    for name in NAMES:
        ran = [(ranks, fields) for ranks, fields, _ in record[name]["ours"]]
        stated = bug(name).STRATEGIES.items()
        assert ran == [(ranks, fields) for ranks, every in stated for fields in every], name
        assert {ranks for ranks, _ in ran} == {2, 4}
        assert hasattr(bug(name), "peer") == ("peer" in record[name]), name
    assert page(record) == PAGE.read_text(), "run: python -m tests.public_bugs --page"


def test_the_readme_has_the_number_of_bugs() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    (number,) = re.findall(r"\[(\d+) bugs of public trackers", text)
    assert int(number) == len(NAMES) >= 40
