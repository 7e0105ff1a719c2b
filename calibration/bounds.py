"""Confidence bounds: a rate of events that come in clusters, and a proportion."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95
STANDARD_NORMAL_975 = 1.959964
SERIES_TERMS = 10_000  # far more than any shape below 1000 needs
RELATIVE_ACCURACY = 1e-12


def event_rate_upper_bound(events_by_run: Sequence[int], exposure: float) -> float:
    """One-sided 95% upper bound of events per unit of exposure, when those of one run are not independent.

    Runs with the same number of events are Poisson counts that are weighted by that number; the bound of
    their weighted sum is a gamma quantile with matched mean and variance, the next event being as large a
    cluster as the largest seen. With no more than one event in a run it is the exact Poisson bound.
    Source: Fay & Feuer 1997, "Confidence intervals for directly standardized rates: a method based on the
    gamma distribution", Statistics in Medicine 16:791-801; Garwood 1936 for the Poisson bound.
    """
    largest = max(1, max(events_by_run, default=1))
    mean = sum(events_by_run) + largest
    variance = sum(count**2 for count in events_by_run) + largest**2
    scale = variance / mean
    return scale * gamma_quantile(CONFIDENCE, mean / scale) / exposure


def gamma_quantile(probability: float, shape: float) -> float:
    """Quantile of the gamma distribution with scale 1, by bisection of its distribution function."""
    low, high = 0.0, shape + 1.0
    while gamma_distribution(shape, high) < probability:
        high *= 2
    while high - low > RELATIVE_ACCURACY * high:
        middle = (low + high) / 2
        if gamma_distribution(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return high


def gamma_distribution(shape: float, value: float) -> float:
    """P(X <= value) of a gamma variable with scale 1: the series of the lower incomplete gamma function.

    Source: Abramowitz & Stegun 1964, 6.5.29. All terms are positive, so nothing cancels.
    """
    if value <= 0:
        return 0.0
    term = total = 1.0 / shape
    for place in range(1, SERIES_TERMS):
        term *= value / (shape + place)
        total += term
        if term < RELATIVE_ACCURACY * total:
            break
    return min(1.0, total * math.exp(shape * math.log(value) - value - math.lgamma(shape)))


def proportion_interval(successes: int, trials: int) -> tuple[float, float]:
    """Two-sided 95% score interval of a proportion. Source: Wilson 1927, JASA 22:209-212."""
    if trials == 0:
        return 0.0, 1.0
    z2 = STANDARD_NORMAL_975**2
    share = successes / trials
    centre = share + z2 / (2 * trials)
    half = STANDARD_NORMAL_975 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return (centre - half) / (1 + z2 / trials), (centre + half) / (1 + z2 / trials)


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; infinity counts as a value."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
