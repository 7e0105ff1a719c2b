"""Panel 4: what each attention head looks at: keys after its query, and how many keys at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analyzer.charts.frame import Context, Drawing, Tables, number
from analyzer.charts.lines import Axis, line_chart
from analyzer.charts.series import Series, series_by

LEAST_MASS_RANGE = (0.1, 1.0)
"""The axis covers at least this: all of the attention is 1, and a log axis needs a decade to be read."""


def draw_later_keys(tables: Tables, context: Context) -> Drawing:
    """Attention mass on keys after the query by head, on a log axis; exact zeros along the bottom edge."""
    table = with_head_names(tables["attention_by_step"])
    series = series_by(table, "future_mass", "name")
    axis = Axis("mass on later keys", log=True, zeros_on_edge=True)
    chart = line_chart(context.name, context.steps, series, axis, also_in_range=LEAST_MASS_RANGE)
    beyond = series_by(table, "future_mass_beyond_next", "name")
    return Drawing(chart.plot, _later_keys_sentence(series, beyond), chart.legend, chart.notes)


def draw_attention_entropy(tables: Tables, context: Context) -> Drawing:
    """Entropy of the attention rows by head, as a share of what its allowed keys admit."""
    series = series_by(with_head_names(tables["attention_by_step"]), "entropy", "name")
    axis = Axis("entropy / ln(allowed keys)", floor=0.0)
    chart = line_chart(context.name, context.steps, series, axis, also_in_range=(1.0,))
    note = "1: spread evenly over all allowed keys; 0: all on one key."
    return Drawing(chart.plot, _entropy_sentence(series), chart.legend, (note, *chart.notes))


def with_head_names(table: pa.Table) -> pa.Table:
    """The table with a column ``name``: ``layer 0 head 3``."""
    layer, head = (pc.cast(table[column], pa.string()) for column in ("layer", "head"))
    parts = [pa.scalar("layer "), layer, pa.scalar(" head "), head, pa.scalar("")]
    return table.append_column("name", pc.binary_join_element_wise(*parts))


def _later_keys_sentence(series: tuple[Series, ...], beyond: tuple[Series, ...]) -> str:
    """How many heads ever saw a later key, their largest last mass, and that past the next key."""
    leaking = [one for one in series if np.any(one.values > 0)]
    lost = sum(int((~np.isfinite(one.values)).sum()) for one in series)
    tail = f" {lost:,} recorded values are not finite." if lost else ""
    if lost and not any(len(one.finite()) for one in series):
        return f"{len(series)} heads without a finite value.{tail}"
    if not leaking:
        where = "wherever it is finite" if lost else "at every recorded step"
        return f"Exactly 0 in all {len(series)} heads {where}.{tail}"
    since = min(int(one.steps[one.values > 0][0]) for one in leaking)
    most = max(leaking, key=lambda one: one.finite()[-1])
    largest = number(float(most.finite()[-1]))
    return (
        f"{len(leaking)} of {len(series)} heads see later keys, since step {since}; "
        f"in the end most in {most.name}, {largest}{_past_the_next(beyond)}.{tail}"
    )


def _past_the_next(beyond: tuple[Series, ...]) -> str:
    """The largest last mass past the next key in words; nothing where it was not recorded."""
    last = [float(one.finite()[-1]) for one in beyond if len(one.finite())]
    if not last:
        return ""
    return f"; past the next key {'at most ' + number(max(last)) if max(last) else 'exactly 0'}"


def _entropy_sentence(series: tuple[Series, ...]) -> str:
    """The most and the least spread head at the last step."""
    last = {one.name: one.last() for one in series if np.isfinite(one.last())}
    step = max(int(one.steps[-1]) for one in series)
    if not last:
        return f"At step {step}: no finite value in {len(series)} heads."
    low, high = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
    return (
        f"At step {step}: from {number(last[low])} ({low}) to {number(last[high])} ({high}), "
        f"over {len(series)} heads."
    )
