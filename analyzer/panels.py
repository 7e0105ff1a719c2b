"""The seven panels: what each asks, which queries answer it, which columns those need, and who draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from analyzer.charts.attention import draw_attention_entropy, draw_later_keys
from analyzer.charts.frame import Context, Drawing
from analyzer.charts.labels import draw_label_losses, draw_loss_map
from analyzer.charts.layers import (
    draw_activations,
    draw_dead_units,
    draw_gradient_ratios,
    draw_spectral_norms,
)
from analyzer.charts.loss import draw_loss
from analyzer.charts.optimizer import draw_gradient_norm, draw_learning_rate
from analyzer.charts.series import nonfinite_as_nan


@dataclass(frozen=True)
class Source:
    """A column of a query that a chart draws, and what must have been recorded for it to hold a value."""

    query: str
    column: str
    recorded_as: str  # "table.column", as the page says it


@dataclass(frozen=True)
class Chart:
    """One plot. It is drawn when any source holds a value; the others are named as not recorded.

    ``events`` are queries for marks; those of ``findings`` judge, and are left out of a blind page.
    """

    name: str
    title: str
    sources: tuple[Source, ...]
    draw: Callable[[Mapping[str, pa.Table], Context], Drawing]
    over_steps: bool = True
    events: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        """Its address within the page."""
        return f"chart-{self.name}"

    def queries(self, blind: bool = False) -> tuple[str, ...]:
        """Names of all queries that the chart draws, each once."""
        names = [source.query for source in self.sources] + list(self.events)
        return tuple(dict.fromkeys(names + ([] if blind else list(self.findings))))

    def missing(self, tables: Mapping[str, pa.Table]) -> tuple[Source, ...]:
        """Sources that hold no value: their column has no rows, or nulls only."""
        return tuple(source for source in self.sources if not has_values(tables[source.query], source.column))


def has_values(table: pa.Table, column: str) -> bool:
    """Any value but null, or any row that counts non-finite ones: what is NaN was measured."""
    measured = nonfinite_as_nan(table, column)[column]
    return bool(measured.null_count < len(measured))


@dataclass(frozen=True)
class DrawnChart:
    """A chart with what came of it; without a drawing nothing of it was recorded."""

    chart: Chart
    drawing: Drawing | None
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """A question about the run and the charts that answer it."""

    number: int
    title: str
    question: str
    charts: tuple[Chart, ...]
    is_wide: bool = True  # across the page, else half of it

    @property
    def anchor(self) -> str:
        """Its address within the page."""
        return f"panel-{self.number}"

    def anchor_of(self, needs: Sequence[str]) -> str:
        """The address of the first chart that draws one of the needed columns; the panel's when none does."""
        for chart in self.charts[1:]:  # the first one is where the panel begins
            if any(source.recorded_as in needs for source in chart.sources):
                return chart.anchor
        return self.anchor

    def queries(self) -> tuple[str, ...]:
        """Names of all queries of its charts, each once."""
        return tuple(dict.fromkeys(name for chart in self.charts for name in chart.queries()))

    def required_columns(self) -> tuple[str, ...]:
        """What must have been recorded for everything in the panel to be drawn."""
        return tuple(source.recorded_as for chart in self.charts for source in chart.sources)


PANELS = (
    Panel(
        1,
        "Loss",
        "Is it learning, and does it generalise?",
        (
            Chart(
                "loss",
                "Train and evaluation loss",
                (
                    Source("training_loss_by_step", "train_loss", "steps.train_loss"),
                    Source("evaluation_loss_by_step", "loss", "evaluations.loss_sum"),
                ),
                draw_loss,
                events=("resumes", "reference_losses"),
                findings=("loss_spikes", "overfit_onset"),
            ),
        ),
    ),
    Panel(
        2,
        "Learning rate",
        "Was the planned schedule applied?",
        (
            Chart(
                "learning-rate",
                "Learning rate, applied and planned",
                (
                    Source("learning_rate_by_step", "learning_rate", "steps.learning_rate"),
                    Source("learning_rate_by_step", "planned_learning_rate", "steps.planned_learning_rate"),
                ),
                draw_learning_rate,
                events=("resumes",),
            ),
        ),
        is_wide=False,
    ),
    Panel(
        3,
        "Gradient norm",
        "Are the gradients bounded, and how often does clipping act?",
        (
            Chart(
                "gradient-norm",
                "Global gradient norm, before and after clipping",
                (
                    Source("gradient_norm_by_step", "gradient_norm", "steps.gradient_norm"),
                    Source("gradient_norm_by_step", "clipped_gradient_norm", "steps.clipped_gradient_norm"),
                ),
                draw_gradient_norm,
                events=("resumes",),
                findings=("gradient_norm_spikes",),
            ),
        ),
        is_wide=False,
    ),
    Panel(
        4,
        "Activations and attention",
        "Does the signal keep its size through the layers, and what does each head look at?",
        (
            Chart(
                "activations",
                "Mean absolute activation by module",
                (Source("activation_by_layer", "mean_abs", "tensors.mean_abs (activation)"),),
                draw_activations,
            ),
            Chart(
                "later-keys",
                "Attention on later keys",
                (
                    Source("attention_by_step", "future_mass", "attention.future_mass"),
                    Source(
                        "attention_by_step", "future_mass_beyond_next", "attention.future_mass_beyond_next"
                    ),
                ),
                draw_later_keys,
            ),
            Chart(
                "attention-entropy",
                "Attention entropy",
                (Source("attention_by_step", "entropy", "attention.entropy"),),
                draw_attention_entropy,
            ),
        ),
    ),
    Panel(
        5,
        "Spectral norms",
        "Does any weight matrix grow without bound?",
        (
            Chart(
                "spectral-norms",
                "Largest singular value of each weight matrix",
                (Source("spectral_norm_by_step", "spectral_norm", "tensors.spectral_norm (weight)"),),
                draw_spectral_norms,
            ),
        ),
    ),
    Panel(
        6,
        "Dead units and gradient flow",
        "Do all units and layers take part in learning?",
        (
            Chart(
                "dead-units",
                "Share of dead units by layer",
                (Source("dead_units_by_layer", "dead_fraction", "units.dead_unit_count"),),
                draw_dead_units,
            ),
            Chart(
                "gradient-ratios",
                "Gradient / activation ratio by module",
                (
                    Source(
                        "gradient_activation_ratio_by_layer",
                        "ratio",
                        "tensors.l2_norm (activation and activation_gradient)",
                    ),
                ),
                draw_gradient_ratios,
            ),
        ),
    ),
    Panel(
        7,
        "Loss by label",
        "Which kinds of example are learned, and which are not?",
        (
            Chart(
                "label-losses",
                "Validation loss by group",
                (
                    Source(
                        "label_loss_by_step",
                        "loss",
                        "example_losses.loss_sum with manifest.label_roles.group",
                    ),
                ),
                draw_label_losses,
            ),
            Chart(
                "loss-map",
                "Loss map at the last evaluation",
                (
                    Source(
                        "loss_map",
                        "loss",
                        "example_losses.loss_sum with manifest.label_roles.map_rows and map_columns",
                    ),
                ),
                draw_loss_map,
                over_steps=False,
            ),
        ),
    ),
)
