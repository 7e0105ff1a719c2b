"""Series from tables, thinning, what an axis cannot show, ranges, ticks, colours and words of the charts."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.charts.frame import Context, number, step_range, value_range
from analyzer.charts.heatmaps import grid_of, short_name
from analyzer.charts.layers import draw_dead_units
from analyzer.charts.palette import DARK_COLOURS, SERIES_COLOURS, series_style
from analyzer.charts.series import (
    KEPT_PER_BIN,
    Run,
    Series,
    nonfinite_as_nan,
    series_by,
    series_of,
    thin,
    undrawable_runs,
)
from analyzer.charts.ticks import LEAST_GAP, perplexity_ticks, value_ticks

NAN, INFINITY = math.nan, math.inf


def series(values: list[float], name: str = "loss") -> Series:
    """A series over steps 0, 1, ..."""
    return Series(name, np.arange(len(values)), np.array(values, np.float64))


def test_null_is_left_out_and_nan_is_kept() -> None:
    """Not measured is no point; NaN is one."""
    table = pa.table({"step": [0, 1, 2, 3], "loss": pa.array([1.0, None, NAN, INFINITY])})
    one = series_of(table, "loss", "loss")
    assert one.steps.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(one.values, [1.0, NAN, INFINITY])


def test_series_are_split_by_key_in_order_of_appearance() -> None:
    """Module b comes first because its row does; a module without a value is left out."""
    table = pa.table({"step": [0, 0, 0], "module": ["b", "a", "c"], "value": pa.array([1.0, 2.0, None])})
    assert [one.name for one in series_by(table, "value", "module")] == ["b", "a"]


def test_value_over_the_finite_part_only_counts_as_nan() -> None:
    """A mean that left non-finite elements out is marked, even where it is null."""
    table = pa.table({"loss": pa.array([1.0, 2.0, None]), "nonfinite_count": [0, 3, 5]})
    np.testing.assert_array_equal(nonfinite_as_nan(table, "loss")["loss"].to_numpy(), [1.0, NAN, NAN])


def test_short_series_is_not_thinned() -> None:
    """All points are kept when they fit."""
    one = series([3.0, 2.0, 1.0])
    assert thin(one, [], 3) is one


@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=400),
    flagged=st.integers(0, 399),
)
def test_thinning_keeps_extremes_ends_and_flagged_steps(values: list[float], flagged: int) -> None:
    """Whatever the data, the extremes, both ends and the flagged step survive, within the promised size."""
    one = series(values)
    thinned = thin(one, [flagged], 50)
    finite = one.finite()
    assert thinned.steps[0] == 0
    assert thinned.steps[-1] == len(values) - 1
    assert flagged >= len(values) or flagged in thinned.steps
    assert len(thinned.steps) <= max(50, 50 // KEPT_PER_BIN * KEPT_PER_BIN + 1)
    if len(finite):
        assert (thinned.finite().min(), thinned.finite().max()) == (finite.min(), finite.max())


@given(st.lists(st.booleans(), min_size=200, max_size=300))
def test_thinning_keeps_gaps(lost: list[bool]) -> None:
    """A bin that holds a NaN keeps one, so that the line breaks there."""
    one = series([NAN if gone else 1.0 for gone in lost])
    thinned = thin(one, [], 100)
    assert bool(np.isnan(thinned.values).any()) == any(lost)


def test_runs_name_each_kind_with_its_steps() -> None:
    """Consecutive rows of a kind are one run; a log axis adds zeros and negative values."""
    one = series([1.0, NAN, NAN, INFINITY, 0.0, -2.0, NAN])
    assert set(undrawable_runs(one, log=True)) == {
        Run(1, 2, "NaN", 2),
        Run(6, 6, "NaN", 1),
        Run(3, 3, "+inf", 1),
        Run(4, 4, "zero on a log axis", 1),
        Run(5, 5, "negative on a log axis", 1),
    }


def test_linear_axis_can_show_zero() -> None:
    """Zero and negative values are lost on log axes only."""
    assert undrawable_runs(series([0.0, -1.0]), log=False) == ()


def test_many_runs_are_joined_without_losing_a_row() -> None:
    """5,000 single NaN rows are at most 150 marks, and their row counts still add up."""
    runs = undrawable_runs(series([NAN, 1.0] * 5000), log=True)
    assert len(runs) <= 150
    assert sum(run.row_count for run in runs) == 5000


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("values", [[], [NAN], [5.0], [1e-300, 1e300], [0.0], [-1.0, -1.0]])
def test_value_range_is_a_proper_interval(values: list[float], log: bool) -> None:
    """One value, none, and extremes all give start < end, positive on a log axis."""
    found = value_range(np.array(values), log)
    assert found.start < found.end < INFINITY
    assert not log or found.start > 0


@given(st.floats(1e-12, 1e12), st.floats(1.05, 1e9))
def test_ticks_lie_within_the_range_and_apart(low: float, ratio: float) -> None:
    """Neighbouring labels never come closer than the least gap."""
    high = low * ratio
    ticks = value_ticks(low, high)
    assert all(low <= tick <= high for tick in ticks)
    gaps = [math.log(b / a) / math.log(ratio) for a, b in pairwise(ticks)]
    assert all(gap >= LEAST_GAP - 1e-9 for gap in gaps)  # 1e-9: rounding of the two logarithms


def test_perplexity_ticks_are_exponentials_of_the_loss() -> None:
    """The tick labelled 2 lies at ln 2."""
    ticks = perplexity_ticks(0.2, 4.0)
    assert ticks[math.log(2)] == "2"
    assert all(float(label) == pytest.approx(math.exp(loss), rel=1e-6) for loss, label in ticks.items())


def test_twenty_four_series_look_different() -> None:
    """No pair of colour and dash comes twice among the first 24."""
    styles = [series_style(i) for i in range(24)]
    assert len({(style.colour, style.dash) for style in styles}) == 24


def test_dark_palette_can_be_undone() -> None:
    """Light to dark is one to one, and no colour is on both sides, so that a script can swap them."""
    assert len(set(DARK_COLOURS.values())) == len(DARK_COLOURS)
    assert set(DARK_COLOURS) & set(DARK_COLOURS.values()) == set()


@pytest.mark.parametrize("light", [True, False])
def test_lines_stand_out_from_the_page(light: bool) -> None:
    """Series colours have at least 3:1 against the page's background in page.css (WCAG 2.2, 1.4.11)."""
    css = (Path(__file__).parent.parent / "analyzer" / "page.css").read_text(encoding="utf-8")
    backgrounds = re.findall(r"--page: (#\w{6})", css)
    background = backgrounds[0 if light else 1]
    colours = SERIES_COLOURS if light else [DARK_COLOURS[colour] for colour in SERIES_COLOURS]
    assert [colour for colour in colours if contrast(colour, background) < 3] == []


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, WCAG 2.2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, WCAG 2.2."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_long_names_keep_their_layer_and_their_last_word() -> None:
    """Leading words shrink to a letter; numbers and the last word stay."""
    assert short_name("blocks.1.attention.query_key_value") == "b.1.a.query_key_value"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (12345.6, "12,346"),
        (1.23456e-5, "1.23e-05"),
        (NAN, "NaN"),
        (-INFINITY, "-inf"),
    ],
)
def test_numbers_are_short(value: float, words: str) -> None:
    """Four digits in words, non-finite values spelt out."""
    assert number(value) == words


def test_heat_map_cells_keep_both_extremes() -> None:
    """4,000 recorded steps share at most 320 columns; the spike of step 777 is the largest of its cell."""
    values = np.ones(4000)
    values[777], values[778] = 50.0, 0.5
    grid = grid_of([Series("relu", np.arange(4000), values)])
    column = int(np.searchsorted(grid.left, 777, side="right")) - 1
    assert len(grid.left) <= 320
    assert (grid.largest[0, column], grid.smallest[0, column]) == (50.0, 0.5)
    assert grid.recorded.sum() == 4000


def test_dead_units_are_told_in_the_order_of_the_layers() -> None:
    """Layer 2 comes before layer 10, and what is left out is counted."""
    rows = [
        {"layer": layer, "step": 49, "dead_unit_count": layer, "unit_count": 64, "window_steps": 50}
        for layer in range(12)
    ]
    table = pa.Table.from_pylist([row | {"dead_fraction": row["dead_unit_count"] / 64} for row in rows])
    summary = draw_dead_units({"dead_units_by_layer": table}, Context("x", step_range(0, 49), {})).summary
    told = [int(layer) for layer in re.findall(r"layer (\d+):", summary.lower())]
    assert told == [0, 1, 2, 3, 4, 5]
    assert summary.endswith("; and 6 layers more (window of 50 steps).")
