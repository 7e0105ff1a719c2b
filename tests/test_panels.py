"""The seven panels: their declarations, what they draw from tables, and the sentences above them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from bokeh.models import ColumnDataSource, LogScale

from analyzer.charts.attention import draw_attention_entropy, draw_later_keys
from analyzer.charts.frame import STRIP_RANGE, Context, step_range
from analyzer.charts.labels import draw_loss_map
from analyzer.charts.layers import draw_activations, draw_spectral_norms
from analyzer.charts.loss import draw_loss, reference_lines
from analyzer.charts.optimizer import draw_gradient_norm, draw_learning_rate
from analyzer.panels import PANELS, Source, has_values

NAN, INFINITY = math.nan, math.inf
QUERIES = Path(__file__).parent.parent / "queries"
NO_ROWS = {
    "resumes": pa.table({"step": pa.array([], pa.int64()), "segment": pa.array([], pa.int32())}),
    "reference_losses": pa.table(
        {"reference": ["uniform"], "split": pa.nulls(1, pa.string()), "loss": [3.5]}
    ),
}


def context(first_step: int = 0, last_step: int = 100) -> Context:
    """A chart's surroundings."""
    return Context("chart", step_range(first_step, last_step), {"primary_split": "validation"})


def sources(plot: Any) -> list[ColumnDataSource]:
    """The data of all renderers of a plot."""
    return [renderer.data_source for renderer in plot.renderers]


def test_panels_are_numbered_in_order() -> None:
    """Panel numbers count from 1 to 7 in display order."""
    assert [panel.number for panel in PANELS] == [1, 2, 3, 4, 5, 6, 7]


def test_chart_names_are_unique() -> None:
    """No two charts claim the same element of the page."""
    names = [chart.name for panel in PANELS for chart in panel.charts]
    assert sorted(set(names)) == sorted(names)


def test_every_panel_query_is_in_the_library() -> None:
    """Each query that a panel names is a file of queries/, or the view of reference losses."""
    known = {path.stem for path in QUERIES.rglob("*.sql")} | {"reference_losses"}
    assert {name for panel in PANELS for name in panel.queries()} - known == set()


def test_documentation_names_every_panel_and_query() -> None:
    """docs/panels.md has a heading for each panel and mentions each of its queries and required columns."""
    text = (Path(__file__).parent.parent / "docs" / "panels.md").read_text(encoding="utf-8")
    missing = [
        word
        for panel in PANELS
        for word in (f"## {panel.number}. {panel.title}", *panel.queries(), *panel.required_columns())
        if word not in text
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("values", "expected"), [([None, None], False), ([], False), ([None, NAN], True), ([0.0], True)]
)
def test_only_null_means_not_recorded(values: list[float | None], expected: bool) -> None:
    """NaN and zero were measured; null and no row were not."""
    assert has_values(pa.table({"loss": pa.array(values, pa.float64())}), "loss") is expected


def test_missing_sources_are_named() -> None:
    """The clipped norm was not recorded and the norm was: the chart misses one source."""
    (chart,) = PANELS[2].charts
    table = pa.table(
        {"step": [0], "gradient_norm": [1.0], "clipped_gradient_norm": pa.nulls(1, pa.float64())}
    )
    expected = Source("gradient_norm_by_step", "clipped_gradient_norm", "steps.clipped_gradient_norm")
    assert chart.missing({"gradient_norm_by_step": table}) == (expected,)


def test_heat_map_marks_modules_with_non_finite_elements() -> None:
    """A finite mean over a half-broken array is a red cross, not a colour."""
    table = pa.table(
        {"step": [0, 1], "module": ["relu", "relu"], "mean_abs": [1.0, 1.0], "nonfinite_count": [0, 7]}
    )
    drawing = draw_activations({"activation_by_layer": table}, context())
    cells = next(source.data["largest"] for source in sources(drawing.plot) if "largest" in source.data)
    lost = next(source.data["lost"] for source in sources(drawing.plot) if "lost" in source.data)
    assert (cells.tolist(), lost.tolist()) == ([1.0], [1])
    assert "1 recorded values are not finite" in drawing.summary


def attention_table(mass: list[list[float]], beyond: list[list[float]] | None = None) -> dict[str, pa.Table]:
    """What the attention charts read: one row of values per head of layer 0, one value per step."""
    rows = [(head, step) for head in range(len(mass)) for step in range(len(mass[0]))]
    past = pa.nulls(len(rows), pa.float64())
    columns = {
        "step": [step for _, step in rows],
        "layer": [0] * len(rows),
        "head": [head for head, _ in rows],
        "future_mass": [mass[head][step] for head, step in rows],
        "future_mass_beyond_next": past if beyond is None else [beyond[h][s] for h, s in rows],
        "entropy": [0.25 * head for head, _ in rows],
    }
    return {"attention_by_step": pa.table(columns)}


def edge_runs(plot: Any, name: str) -> list[tuple[int, int, str]]:
    """(first step, last step, series) of the marks of that name along an edge."""
    edge = next((r for r in plot.renderers if r.name == name and r.y_range_name == STRIP_RANGE), None)
    data = {} if edge is None else edge.data_source.data
    return list(zip(data.get("first", []), data.get("last", []), data.get("names", []), strict=True))


def test_exact_zeros_of_attention_are_no_alarm() -> None:
    """A healthy mask: one bar along the bottom edge for all heads, no cross, no line, and a tick of 0."""
    drawing = draw_later_keys(attention_table([[0.0, 0.0], [0.0, 0.0]]), context())
    assert edge_runs(drawing.plot, "exactly 0") == [(0, 1, "layer 0 head 0, layer 0 head 1")]
    assert edge_runs(drawing.plot, "strip") == []
    assert [item.label for item in drawing.legend] == ["exactly 0"]
    assert "0" in drawing.plot.left[0].major_label_overrides.values()
    assert drawing.summary == "Exactly 0 in all 2 heads at every recorded step."


def test_a_head_that_begins_to_see_later_keys_leaves_the_edge() -> None:
    """Zero until step 1, then a line from step 2 on; the other head stays at zero throughout."""
    tables = attention_table([[0.0, 0.0, 0.25, 0.5], [0.0] * 4], [[0.0, 0.0, 0.0, 0.0], [0.0] * 4])
    drawing = draw_later_keys(tables, context())
    assert isinstance(drawing.plot.y_scale, LogScale)
    assert edge_runs(drawing.plot, "exactly 0") == [(0, 1, "layer 0 head 0"), (0, 3, "layer 0 head 1")]
    (line,) = [s for s in sources(drawing.plot) if list(s.data.get("step", [])) == [0, 1, 2, 3]][:1]
    np.testing.assert_array_equal(line.data["value"], [NAN, NAN, 0.25, 0.5])
    assert drawing.summary == (
        "1 of 2 heads see later keys, since step 2; in the end most in layer 0 head 0, 0.5; "
        "past the next key exactly 0."
    )


@pytest.mark.parametrize(
    ("mass", "beyond", "words"),
    [
        ([[0.5, 0.4]], [[0.2, 0.1]], "0.4; past the next key at most 0.1."),
        ([[0.5, 0.4]], None, "layer 0 head 0, 0.4."),
        ([[0.5, NAN]], [[0.2, NAN]], "0.5; past the next key at most 0.2. 1 recorded values are not finite."),
        (
            [[0.0, NAN]],
            None,
            "Exactly 0 in all 1 heads wherever it is finite. 1 recorded values are not finite.",
        ),
        ([[NAN, NAN]], None, "1 heads without a finite value. 2 recorded values are not finite."),
    ],
)
def test_later_keys_are_told_in_words(
    mass: list[list[float]], beyond: list[list[float]] | None, words: str
) -> None:
    """What was not recorded is not told, and NaN is neither seen nor unseen."""
    assert draw_later_keys(attention_table(mass, beyond), context()).summary.endswith(words)


def test_attention_that_is_nan_is_a_cross() -> None:
    """The bar of zeros says nothing about it."""
    drawing = draw_later_keys(attention_table([[0.0, NAN]]), context())
    assert edge_runs(drawing.plot, "exactly 0") == [(0, 0, "layer 0 head 0")]
    assert edge_runs(drawing.plot, "strip") == [(1, 1, "layer 0 head 0")]


def test_attention_entropy_names_its_extremes() -> None:
    """Each head is a line; the axis goes from 0 to 1 at least."""
    drawing = draw_attention_entropy(attention_table([[0.0], [0.0], [0.0]]), context())
    assert drawing.summary == "At step 0: from 0 (layer 0 head 0) to 0.5 (layer 0 head 2), over 3 heads."
    assert drawing.plot.y_range.start <= 0
    assert drawing.plot.y_range.end >= 1


def test_a_finding_goes_to_the_chart_that_draws_what_it_needs() -> None:
    """The first chart is where the panel begins; a need that no chart draws goes there too."""
    panel = PANELS[3]
    assert panel.anchor_of(("manifest.mask_type", "attention.future_mass")) == "chart-later-keys"
    assert panel.anchor_of(("attention.entropy",)) == "chart-attention-entropy"
    assert panel.anchor_of(("tensors.mean_abs (activation)",)) == "panel-4"
    assert panel.anchor_of(("steps.train_loss",)) == "panel-4"


def test_loss_map_shows_cells_that_are_not_finite() -> None:
    """NaN has its own words and its own colour, and stands on top."""
    table = pa.table(
        {
            "step": [9, 9],
            "row_value": ["be", "go"],
            "column_value": ["past", "past"],
            "loss": pa.array([0.5, None], pa.float64()),
            "token_count": [10, 10],
            "nonfinite_count": [0, 2],
        }
    )
    drawing = draw_loss_map({"loss_map": table}, context())
    (cells,) = [s for s in sources(drawing.plot) if "exact" in s.data][:1]
    assert (cells.data["text"], cells.data["y"]) == (["0.50", "NaN"], [1.5, 0.5])
    assert drawing.summary.startswith("At step 9, 2 cells, 1 of them not finite: highest 0.5 (be, past)")


def loss_tables(train_loss: list[float | None]) -> dict[str, pa.Table]:
    """What the loss panel reads, one evaluation included."""
    return {
        **NO_ROWS,
        "training_loss_by_step": pa.table(
            {"step": list(range(len(train_loss))), "train_loss": pa.array(train_loss, pa.float64())}
        ),
        "evaluation_loss_by_step": pa.table({"step": [0], "split": ["validation"], "loss": [2.5]}),
        "loss_spikes": pa.table({"step": [1], "loss": [9.0], "z": [12.0]}),
    }


def test_loss_axis_is_logarithmic() -> None:
    """Loss is drawn on a log scale."""
    assert isinstance(draw_loss(loss_tables([3.0, 2.0]), context()).plot.y_scale, LogScale)


def test_loss_panel_draws_what_was_measured() -> None:
    """The line holds every step and NaN where the value was NaN."""
    drawing = draw_loss(loss_tables([3.0, NAN, 2.0]), context())
    (line,) = [s for s in sources(drawing.plot) if list(s.data.get("step", [])) == [0, 1, 2]][:1]
    np.testing.assert_array_equal(line.data["value"], [3.0, NAN, 2.0])


def test_loss_summary_says_last_and_lowest() -> None:
    """The sentence carries the numbers that the curve shows."""
    summary = draw_loss(loss_tables([3.0, 1.5, 2.0]), context()).summary
    assert "train, each batch: 2 nats/token at step 2 (lowest 1.5 at step 1)." in summary


def test_spike_is_marked_and_in_the_legend() -> None:
    """A spike of the query is drawn at its step."""
    drawing = draw_loss(loss_tables([3.0, 9.0, 3.0]), context())
    assert "spike" in [item.label for item in drawing.legend]
    marked = [source.data["text"] for source in sources(drawing.plot) if "text" in source.data]
    assert marked[0] == ["spike to 9, z = 12"]


def test_long_run_says_how_many_points_are_shown() -> None:
    """10,000 training steps do not fit; the note gives both numbers."""
    (note,) = draw_loss(loss_tables(list(np.linspace(3, 1, 10_000))), context()).notes
    shown, total = (int(text.replace(",", "")) for text in re.findall(r"[\d,]*\d", note)[:2])
    assert total == 10_001
    assert shown <= 2402  # 2,400 of the training loss, its end, and the evaluation


def test_only_the_primary_split_has_its_floor_drawn() -> None:
    """The floor of the training split is no line, and references keep their order."""
    table = pa.table(
        {
            "reference": ["entropy_floor", "entropy_floor", "uniform"],
            "split": ["train", "validation", None],
            "loss": [0.1, 0.2, 3.5],
        }
    )
    labels = [(line.label, line.value) for line in reference_lines(table, "validation")]
    assert labels == [("ln V (uniform guess)", 3.5), ("entropy floor", 0.2)]


@pytest.mark.parametrize(
    ("planned", "words"),
    [
        ([1e-3, 3e-3], "agree at every step"),
        ([1e-3, 1e-3], "differ most at step 1, by 0.002"),
    ],
)
def test_learning_rate_summary_compares_plan_and_practice(planned: list[float], words: str) -> None:
    """The sentence says that both agree, or where they differ most."""
    table = pa.table({"step": [0, 1], "learning_rate": [1e-3, 3e-3], "planned_learning_rate": planned})
    tables = {"learning_rate_by_step": table, **NO_ROWS}
    assert words in draw_learning_rate(tables, context()).summary


def test_clipped_share_counts_steps_that_were_rescaled() -> None:
    """One of four gradients was above the limit."""
    table = pa.table(
        {
            "step": [0, 1, 2, 3],
            "gradient_norm": [0.5, 4.0, 0.9, NAN],
            "clipped_gradient_norm": [0.5, 1.0, 0.9, NAN],
        }
    )
    tables = {"gradient_norm_by_step": table, **NO_ROWS}
    assert "Clipped on 25.0% of steps." in draw_gradient_norm(tables, context()).summary


def test_many_matrices_are_one_renderer() -> None:
    """Forty weights are drawn by one glyph and its hover copy, not by forty."""
    names = [f"blocks.{i}.weight" for i in range(40)]
    table = pa.table(
        {"step": [0] * 40 + [1] * 40, "name": names * 2, "spectral_norm": [1.0 + i for i in range(80)]}
    )
    drawing = draw_spectral_norms({"spectral_norm_by_step": table}, context())
    assert len(drawing.plot.renderers) == 2
    assert list(sources(drawing.plot)[0].data["name"]) == names
