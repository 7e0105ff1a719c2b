"""The breakdowns: input rows, call, output rows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from query_call import answer
from synthetic import MANIFEST

EXAMPLES = [
    {"example_id": 0, "verb": "walk", "tense": "past", "regularity": "regular"},
    {"example_id": 1, "verb": "talk", "tense": "past", "regularity": "regular"},
    {"example_id": 2, "verb": "go", "tense": "past", "regularity": "irregular"},
    {"example_id": 3, "verb": "be", "tense": "future", "regularity": "irregular"},
]


def losses(step: int, *loss_sums: float, split: str = "validation", **columns: Any) -> list[dict[str, Any]]:
    """Rows of `example_losses`: ten tokens per example, four of them the answer's with half the loss."""
    return [
        {
            "step": step,
            "split": split,
            "example_id": i,
            "loss_sum": loss_sum,
            "token_count": 10,
            "answer_loss_sum": loss_sum / 2,
            "answer_token_count": 4,
            "correct": loss_sum < 10,
        }
        | columns
        for i, loss_sum in enumerate(loss_sums)
    ]


def test_loss_by_label_at_the_last_evaluation(tmp_path: Path) -> None:
    """Token-weighted loss, answer loss, accuracy and counts of each value."""
    tables = {"examples": EXAMPLES, "example_losses": losses(0, 9, 9, 9, 9) + losses(50, 5, 15, 20, 40)}
    assert answer(tmp_path, tables, "FROM loss_by_label()") == [
        ("run", 50, "validation", "regularity", "irregular", 3.0, 3.75, 0.0, 20, 2, 0),
        ("run", 50, "validation", "regularity", "regular", 1.0, 1.25, 0.5, 20, 2, 0),
    ]


@pytest.mark.parametrize(("at", "expected"), [(49, 0), (50, 50), (1000, 50)])
def test_loss_by_label_at_a_step_is_the_last_evaluation_up_to_it(
    tmp_path: Path, at: int, expected: int
) -> None:
    """A step between two evaluations means the earlier one."""
    tables = {"examples": EXAMPLES, "example_losses": losses(0, 9, 9, 9, 9) + losses(50, 5, 15, 20, 40)}
    rows = answer(tmp_path, tables, f"SELECT DISTINCT step FROM loss_by_label(at_step := {at})")
    assert rows == [(expected,)]


def test_loss_by_any_label_of_another_split(tmp_path: Path) -> None:
    """Labels and splits are the user's: no name is built in."""
    tables = {"examples": EXAMPLES, "example_losses": losses(0, 10, 20, 30, 40, split="train")}
    sql = "SELECT label, value, loss FROM loss_by_label(label_name := 'tense', split_name := 'train')"
    assert answer(tmp_path, tables, sql) == [("tense", "future", 4.0), ("tense", "past", 2.0)]


def test_loss_by_label_of_every_split_when_none_is_primary(tmp_path: Path) -> None:
    """Without a primary split in the manifest nothing is left out."""
    tables = {"examples": EXAMPLES, "example_losses": losses(0, 10, 20) + losses(0, 30, 40, split="train")}
    manifest = dataclasses.replace(MANIFEST, primary_split=None)
    rows = answer(tmp_path, tables, "SELECT split, loss FROM loss_by_label()", manifest)
    assert rows == [("train", 3.5), ("validation", 1.5)]


def test_loss_by_label_counts_non_finite_examples(tmp_path: Path) -> None:
    """The mean is over finite examples; how many are not stands beside it."""
    tables = {"examples": EXAMPLES, "example_losses": losses(0, 10, math.nan, math.inf, math.inf)}
    rows = answer(tmp_path, tables, "SELECT value, loss, nonfinite_count FROM loss_by_label()")
    assert rows == [("irregular", None, 2), ("regular", 1.0, 1)]


def test_label_gap_with_its_jackknife_interval(tmp_path: Path) -> None:
    """irregular 3, regular 1.5; deletions of the four verbs and t(1), from the smaller value's two verbs.

    Without go 4 - 1.5, without be 2 - 1.5, without walk 3 - 2, without talk 3 - 1: 2.5, 0.5, 1, 2.
    Their population variance is 0.625; the error is sqrt(3 * 0.625).
    """
    tables = {"examples": EXAMPLES, "example_losses": losses(0, 10, 20, 20, 40)}
    ((run, step, value, other, gap, lower, upper),) = answer(tmp_path, tables, "FROM label_gap()")
    assert (run, step, value, other, gap) == ("run", 0, "irregular", "regular", 1.5)
    half_width = 12.706 * math.sqrt(3 * 0.625)
    assert lower == pytest.approx(1.5 - half_width, rel=1e-12)
    assert upper == pytest.approx(1.5 + half_width, rel=1e-12)


def test_label_gap_of_crossed_clusters_cancels_what_they_share(tmp_path: Path) -> None:
    """Two verbs in both tenses, the past always one nat worse: the gap is certain although verbs differ."""
    examples = [
        {"example_id": i, "verb": verb, "tense": tense}
        for i, (verb, tense) in enumerate(
            [("go", "past"), ("go", "future"), ("be", "past"), ("be", "future")]
        )
    ]
    tables = {"examples": examples, "example_losses": losses(0, 20, 10, 90, 80)}
    sql = "SELECT value, other_value, gap, lower, upper FROM label_gap(label_name := 'tense')"
    ((value, other, gap, lower, upper),) = answer(tmp_path, tables, sql)
    assert (value, other) == ("future", "past")
    assert (gap, lower, upper) == (pytest.approx(-1.0), pytest.approx(-1.0), pytest.approx(-1.0))


def test_label_gap_without_an_interval_where_a_value_has_one_cluster(tmp_path: Path) -> None:
    """One verb says nothing about the spread over verbs."""
    tables = {"examples": EXAMPLES[:3], "example_losses": losses(0, 10, 20, 20)}
    assert answer(tmp_path, tables, "SELECT gap, lower, upper FROM label_gap()") == [(0.5, None, None)]


def test_label_gap_has_one_row_per_pair_of_values(tmp_path: Path) -> None:
    """Three values are three pairs."""
    examples = [{"example_id": i, "kind": kind} for i, kind in enumerate("aabbcc")]
    tables = {"examples": examples, "example_losses": losses(0, 10, 10, 20, 20, 40, 40)}
    sql = "SELECT value, other_value, gap FROM label_gap(label_name := 'kind')"
    assert answer(tmp_path, tables, sql) == [("a", "b", -1.0), ("a", "c", -3.0), ("b", "c", -2.0)]


def test_loss_map_of_two_labels(tmp_path: Path) -> None:
    """Pairs that do not occur have no row."""
    tables = {
        "examples": EXAMPLES,
        "example_losses": losses(0, 9, 9, 9, 9) + losses(50, 10, math.nan, 30, 40),
    }
    assert answer(tmp_path, tables, "FROM loss_map()") == [
        ("run", 50, "be", "future", 4.0, 10, 0),
        ("run", 50, "go", "past", 3.0, 10, 0),
        ("run", 50, "talk", "past", None, 10, 1),
        ("run", 50, "walk", "past", 1.0, 10, 0),
    ]


def test_loss_map_of_other_labels(tmp_path: Path) -> None:
    """Rows and columns are any two labels."""
    tables = {"examples": EXAMPLES, "example_losses": losses(0, 10, 20, 30, 40)}
    call = "loss_map(row_label := 'tense', column_label := 'regularity')"
    sql = f"SELECT row_value, column_value, loss FROM {call}"
    assert answer(tmp_path, tables, sql) == [
        ("future", "irregular", 4.0),
        ("past", "irregular", 3.0),
        ("past", "regular", 1.5),
    ]


def test_steps_to_loss_is_the_first_evaluation_at_or_below(tmp_path: Path) -> None:
    """Regular verbs reach one nat at step 50, irregular ones never; NaN is no small loss."""
    tables = {
        "examples": EXAMPLES,
        "example_losses": losses(0, 5, math.nan, 30, 30)
        + losses(50, 10, 10, 20, 20)
        + losses(100, 5, 5, 11, 11),
    }
    rows = answer(tmp_path, tables, "FROM steps_to_loss(loss_threshold := 1.0)")
    assert rows == [("run", "irregular", None), ("run", "regular", 50)]
