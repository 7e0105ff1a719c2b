"""Time to detection: the shortest prefix of a log at which a rule fires."""

from __future__ import annotations

from collections.abc import Callable

from analyzer.diagnoses import Diagnosis, assess_runs
from analyzer.run_log import RunLog


def first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least of low..high that holds, for a condition that stays true and holds at ``high``.

    Strides double from ``low``, where most proofs fire, and the last stride is bisected.
    """
    if holds(low):
        return low
    stride = 1
    while low + stride < high and not holds(low + stride):
        low += stride
        stride *= 2
    high = min(high, low + stride)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def detection_step(run_log: RunLog, run: str, diagnosis: Diagnosis, first: int, last: int) -> int:
    """Last step of the shortest prefix, of at least ``first``, at which the rule fires on the run.

    It must fire at ``last``. The log's connection shows a prefix afterwards.
    """

    def fires(step: int) -> bool:
        prefix = run_log.until(step)
        return assess_runs(prefix, (diagnosis,))[run][0].outcome == "fired"

    return first_true(fires, first, last)
