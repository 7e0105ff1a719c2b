"""Learning rates that are wrong by plan, and learning rates that do not follow a right plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from experiments.code_path import HEALTHY, CodePath
from experiments.faults.fault import Fault
from experiments.optimizer import LearningRatePlan, Schedule

SCHEDULE_ERRORS = ("horizon doubled", "constant at the peak", "advanced once an epoch")
STEPS_PER_EPOCH = 13  # of the reference run: 432 examples in batches of 32


def rate_scaled(factor: float) -> CodePath:
    """Planned and applied rate times ``factor``: a wrong choice that the loop follows faithfully.

    Both columns of the log show it, so the schedule is followed; only the manifest keeps the intended peak.
    """
    return dataclasses.replace(
        HEALTHY,
        planned_rate=lambda plan, step: factor * plan.learning_rate(step),
        applied_rate=lambda schedule: factor * schedule.next(),
    )


def warmup_dropped(peak_factor: float) -> CodePath:
    """The plan declares a warmup, with its peak at ``peak_factor`` times the intended; none is applied."""
    return dataclasses.replace(
        HEALTHY,
        planned_rate=lambda plan, step: peak_factor * plan.learning_rate(step),
        applied_rate=rate_of(lambda plan, step: peak_factor * without_warmup(plan).learning_rate(step)),
    )


def schedule_miswired(error: str) -> CodePath:
    """The applied rate parts from the plan by one of SCHEDULE_ERRORS."""
    rates = dict(
        zip(SCHEDULE_ERRORS, (horizon_doubled, constant_at_peak, advanced_once_an_epoch), strict=True)
    )
    return dataclasses.replace(HEALTHY, applied_rate=rate_of(rates[error]))


def without_warmup(plan: LearningRatePlan) -> LearningRatePlan:
    """The plan that starts at its peak."""
    return dataclasses.replace(plan, warmup_steps=0)


def horizon_doubled(plan: LearningRatePlan, step: int) -> float:
    """The plan of a run that is twice as long."""
    return dataclasses.replace(plan, total_steps=2 * plan.total_steps).learning_rate(step)


def constant_at_peak(plan: LearningRatePlan, step: int) -> float:
    """The rate that the optimizer was made with: no schedule is wired to it."""
    return plan.peak


def advanced_once_an_epoch(plan: LearningRatePlan, step: int) -> float:
    """The schedule moves on by one an epoch instead of one a step."""
    return plan.learning_rate(step // STEPS_PER_EPOCH)


def rate_of(rate: Callable[[LearningRatePlan, int], float]) -> Callable[[Schedule], float]:
    """A schedule that moves on as usual and applies ``rate`` of its plan and place."""

    def apply(schedule: Schedule) -> float:
        step = schedule.step
        schedule.next()
        return rate(schedule.plan, step)

    return apply


SCHEDULE_FAULTS = (
    Fault(
        name="warmup_missing",
        title="Missing warmup",
        number=5,
        parameter="factor on the planned rate, beside the warmup that is not applied",
        mild=1.0,
        medium=10 / 3,
        severe=10.0,
        evidence="applied rate at step 0 at the peak while the plan declares a ramp",
        code_path=warmup_dropped,
        starts_with_the_run=True,
    ),
    Fault(
        name="learning_rate_too_high",
        title="Learning rate too high",
        number=6,
        parameter="factor on planned and applied rate",
        mild=20.0,
        medium=50.0,
        severe=100.0,
        evidence="large update ratios with a loss that rises or stalls; the plan column shows the same rate",
        code_path=rate_scaled,
    ),
    Fault(
        name="learning_rate_too_low",
        title="Learning rate too low",
        number=7,
        parameter="factor on planned and applied rate",
        mild=0.1,
        medium=0.01,
        severe=0.001,
        evidence="tiny update ratios at the peak rate and a slowly falling loss",
        code_path=rate_scaled,
    ),
    Fault(
        name="schedule_not_followed",
        title="Learning-rate schedule not followed",
        number=8,
        parameter="how the applied rate parts from the plan",
        mild=SCHEDULE_ERRORS[0],
        medium=SCHEDULE_ERRORS[1],
        severe=SCHEDULE_ERRORS[2],
        evidence="applied rate different from the planned one",
        code_path=schedule_miswired,
    ),
)
