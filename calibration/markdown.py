"""Numbers and tables as markdown text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from calibration.bounds import proportion_interval
from calibration.scores import Share


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; without rows, the word "none"."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    if not lines:
        return "None.\n"
    head = "| " + " | ".join(header) + " |"
    return "\n".join([head, "|" + "---|" * len(header), *lines]) + "\n"


def percent(share: Share) -> str:
    """ "95% (19 of 20; 76% to 99%)": the share, its counts, and the 95% score interval."""
    if not share.total:
        return "no cell"
    low, high = proportion_interval(share.count, share.total)
    return f"{share.value():.1%} ({share.count} of {share.total}; {low:.0%} to {high:.0%})"


def steps(value: float) -> str:
    """A number of steps; infinite is "never"."""
    if math.isnan(value):
        return "no cell"
    return "never" if math.isinf(value) else f"{value:.0f}"


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash for none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def code(names: Iterable[str]) -> str:
    """Names in code type, or a dash."""
    return ", ".join(f"`{name}`" for name in names) or "-"


def verdict(value: float, holds: bool) -> str:
    """Whether a target is met by a value; NaN: there was nothing to measure."""
    if math.isnan(value):
        return "not measured"
    return "met" if holds else "**not met**"
