"""Ticks of log axes, chosen for the whole range; the page's script chooses others when an axis is zoomed.

Bokeh's own log ticks are linear below two decades, where most of these charts lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from analyzer.charts.bokeh_models import models

LEAST_GAP = 0.07
"""Of the axis length: 13 of about 190 pixels, so that 11-pixel labels never touch."""
MANTISSAS = ((1.0,), (2.0, 5.0), (3.0, 7.0), (1.5, 4.0, 6.0, 8.0, 9.0), (1.1, 1.2, 1.3, 1.7, 2.5, 3.5, 4.5))
"""By priority: powers of ten are never given up for anything between them."""
PERPLEXITIES = (
    *(1 + mantissa * 10.0**exponent for exponent in range(-6, 0) for mantissa in (1, 2, 5)),
    *(mantissa * 10.0**exponent for exponent in range(3) for mantissa in (2, 3, 5, 7, 10)),
    *(10.0**exponent for exponent in (4, 6, 10, 20, 50, 100, 200, 300)),
)

LOG_AXIS_TAG = "log"
PERPLEXITY_AXIS_TAG = "perplexity"


def log_axis(label: str, low: float, high: float) -> Any:
    """A log axis with ticks at round values."""
    return _axis(label, LOG_AXIS_TAG, {value: f"{value:.6g}" for value in value_ticks(low, high)})


def perplexity_axis(low: float, high: float) -> Any:
    """Perplexity = exp(loss) over a range of losses: the scale of the loss, ticks at round perplexities."""
    return _axis("perplexity", PERPLEXITY_AXIS_TAG, perplexity_ticks(low, high))


def _axis(label: str, tag: str, ticks: dict[float, str]) -> Any:
    axis = models.LogAxis(axis_label=label, ticker=models.FixedTicker(ticks=list(ticks)), tags=[tag])
    axis.major_label_overrides = ticks
    return axis


def value_ticks(low: float, high: float) -> list[float]:
    """Round values from low to high."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    stride = max(1, len(decades) // 8)
    octaves = math.log2(high / low)
    tiers = MANTISSAS[:1] if stride > 1 else MANTISSAS[: 5 if octaves < 2 else 4 if octaves < 4 else 3]
    values = (float(f"{m}e{d}") for tier in tiers for d in decades[::stride] for m in tier)
    return spaced(values, low, high)


def perplexity_ticks(low: float, high: float) -> dict[float, str]:
    """Loss to the text of its perplexity, for round perplexities between two losses."""
    words = {math.log(perplexity): f"{perplexity:.7g}" for perplexity in PERPLEXITIES}
    return {loss: words[loss] for loss in spaced(words, low, high)}


def spaced(values: Iterable[float], low: float, high: float) -> list[float]:
    """The values within a log range, in order, leaving out those too close to one that came before."""
    length = math.log(high / low)
    chosen: dict[float, float] = {}
    for value in values:
        position = math.log(value / low) / length if low <= value <= high else -1.0
        if position >= 0 and all(abs(position - other) >= LEAST_GAP for other in chosen.values()):
            chosen[value] = position
    return sorted(chosen)
