"""Initialisation, learning rate and weight decay: what fires, and what is just below the threshold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from rule_run import changed, healthy, outcome
from synthetic import MANIFEST, Columns

MATRICES = (0, 1, 3, 4)  # tensor ids of the synthetic run's matrices; 2 and 5 are gains
PEAK = dataclasses.replace(MANIFEST, planned_schedule={"peak": 3e-3})


def with_norms(
    factor: Any, *kinds: str, tensor_ids: tuple[int, ...] = MATRICES, tensors: Columns | None = None
) -> dict[str, Columns]:
    """Norms of matrices times a factor, a number or an array over steps, for some kinds of tensors."""
    tensors = dict(healthy()["tensors"] if tensors is None else tensors)
    step = np.asarray(tensors["step"])
    mine = np.isin(tensors["kind"], kinds) & np.isin(tensors["tensor_id"], tensor_ids)
    factors = np.broadcast_to(factor, step.max() + 1)[step]
    tensors["l2_norm"] = np.where(mine, np.asarray(tensors["l2_norm"]) * factors, tensors["l2_norm"])
    return {"tensors": tensors}


# ln V is 3.5 nats/token in the synthetic manifest.
@pytest.mark.parametrize(("loss", "expected"), [(5.3, "fired"), (5.2, "clear"), (float("nan"), "clear")])
def test_a_first_loss_far_above_uniform_guessing(loss: float, expected: str) -> None:
    """1.5 ln V = 5.25 is the threshold."""
    changes = {"steps": changed("steps", "train_loss", {0: loss})}
    assert outcome("initialisation_too_large", changes).outcome == expected


def test_a_later_loss_says_nothing_of_the_initialisation() -> None:
    """Only step 0 does."""
    changes = {"steps": changed("steps", "train_loss", {1: 50.0})}
    assert outcome("initialisation_too_large", changes).outcome == "clear"


# Gains are 0.8 for the square matrices and 0.4 for the others with 5% noise: their median is 0.6.
@pytest.mark.parametrize(("factor", "expected"), [(4.0, "fired"), (3.0, "clear")])
def test_a_large_median_gain(factor: float, expected: str) -> None:
    """2.4 is above the threshold of 2, 1.8 below it."""
    assert outcome("initialisation_too_large", with_norms(factor, "weight")).outcome == expected


def test_two_large_matrices_of_four_are_no_large_initialisation() -> None:
    """Half of the matrices tell of a part of the model: the median stays."""
    changes = with_norms(10.0, "weight", tensor_ids=(0,))
    assert outcome("initialisation_too_large", changes).outcome == "clear"


def attention_at_start(entropy: float, logit: float) -> dict[str, Columns]:
    """Entropy and largest logit of all heads at step 0."""
    attention = dict(healthy()["attention"])
    is_start = np.asarray(attention["step"]) == 0
    attention["entropy"] = np.where(is_start, entropy, attention["entropy"]).astype(np.float32)
    attention["max_abs_logit"] = np.where(is_start, logit, attention["max_abs_logit"]).astype(np.float32)
    return {"attention": attention}


SMALL = [(0.991, 0.09, "fired"), (0.989, 0.09, "clear"), (0.991, 0.11, "clear"), (1.0, 0.0, "clear")]


@pytest.mark.parametrize(("entropy", "logit", "expected"), SMALL)
def test_initialisation_too_small(entropy: float, logit: float, expected: str) -> None:
    """Uniform attention from tiny logits; exactly zero logits are zero initialisation's."""
    assert outcome("initialisation_too_small", attention_at_start(entropy, logit)).outcome == expected


def zero_matrix(gradient_steps: int) -> dict[str, Columns]:
    """Matrix 1 is zero at step 0 and has no gradient for so many steps."""
    tensors = dict(healthy()["tensors"])
    step, tensor, kind = (np.asarray(tensors[n]) for n in ("step", "tensor_id", "kind"))
    dead = (tensor == 1) & (
        ((kind == "gradient") & (step < gradient_steps)) | ((kind == "weight") & (step == 0))
    )
    tensors["l2_norm"] = np.where(dead, 0.0, tensors["l2_norm"])
    return {"tensors": tensors}


@pytest.mark.parametrize(("steps", "expected"), [(3, "fired"), (2, "clear"), (0, "clear")])
def test_zero_initialisation_needs_gradients_that_stay_zero(steps: int, expected: str) -> None:
    """A zero-initialised residual output has a gradient, at once or after the first update."""
    assert outcome("zero_initialisation", zero_matrix(steps)).outcome == expected


def test_the_zero_initialisation_finding_names_the_matrix() -> None:
    """From step 0 to the last step without a gradient."""
    (finding,) = outcome("zero_initialisation", zero_matrix(7)).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (0, 6, "blocks.0.mlp.up.weight")


def with_rates(applied: Mapping[int, float] | Any, planned: Any = None) -> dict[str, Columns]:
    """Applied learning rates, by row or as a whole, and perhaps another plan."""
    steps = dict(changed("steps", "learning_rate", applied))
    return {"steps": steps if planned is None else steps | {"planned_learning_rate": planned}}


# The plan's peak is 3e-3; its first rate 3e-5.
@pytest.mark.parametrize(("rate", "expected"), [(6.1e-4, "fired"), (5.9e-4, "clear")])
def test_warmup_missing(rate: float, expected: str) -> None:
    """More than a fifth of the peak at step 0, where the plan asks for a hundredth."""
    assert outcome("warmup_missing", with_rates({0: rate}), PEAK).outcome == expected


def test_a_plan_without_a_ramp_is_no_missing_warmup() -> None:
    """What is declared is followed."""
    constant = np.full(len(healthy()["steps"]["step"]), 3e-3)
    assert outcome("warmup_missing", with_rates(constant, constant), PEAK).outcome == "clear"


def test_a_constant_rate_is_a_schedule_that_is_not_wired() -> None:
    """Once the plan has begun to decay, a rate that never moves is no missing ramp."""
    constant = np.full(len(healthy()["steps"]["step"]), 3e-3)
    assert outcome("warmup_missing", with_rates(constant), PEAK).outcome == "clear"
    (finding,) = outcome("schedule_not_followed", with_rates(constant), PEAK).findings
    assert finding.first_step == 0
    assert finding.detail.endswith("the applied rate is constant")


# Round-off of a plan kept in float32 is 6e-8 of the peak; the threshold is 1e-6 of it, 3e-9.
@pytest.mark.parametrize(("error", "expected"), [(3.1e-9, "fired"), (2.9e-9, "clear")])
def test_schedule_not_followed(error: float, expected: str) -> None:
    """The first row that differs is enough."""
    rate = list(healthy()["steps"]["learning_rate"])[50]
    assessment = outcome("schedule_not_followed", with_rates({50: rate + error}), PEAK)
    assert assessment.outcome == expected
    assert [f.first_step for f in assessment.findings] == [50] * (expected == "fired")


def test_a_rate_that_is_a_multiple_of_the_plan_is_told_as_one() -> None:
    """A factor names its cause better than a difference."""
    rates = 2.5 * np.asarray(healthy()["steps"]["learning_rate"])
    (finding,) = outcome("schedule_not_followed", with_rates(rates), PEAK).findings
    assert finding.detail.endswith("the applied rate is 2.5 times the planned one")


def large_updates(ratio: float) -> dict[str, Columns]:
    """Update ratios of about ``ratio`` from step 100 on; the healthy run has 1e-3 with 5% noise."""
    return with_norms(np.where(np.arange(200) >= 100, ratio / 1e-3, 1.0), "update")


def collapsing(entropy: float) -> dict[str, Columns]:
    """Mean attention entropy from step 150 on."""
    attention = dict(healthy()["attention"])
    late = np.asarray(attention["step"]) >= 150
    attention["entropy"] = np.where(late, entropy, attention["entropy"]).astype(np.float32)
    return {"attention": attention}


TOO_HIGH: list[tuple[float, dict[str, Columns], str]] = [
    (0.02, collapsing(0.29), "fired"),
    (0.02, collapsing(0.31), "clear"),  # 0.75 at the start: above the absolute threshold
    (0.02, {}, "clear"),  # large updates alone harm nothing
    (0.008, collapsing(0.1), "clear"),  # collapsed, but not by large updates
]


@pytest.mark.parametrize(("ratio", "changes", "expected"), TOO_HIGH)
def test_learning_rate_too_high(ratio: float, changes: dict[str, Columns], expected: str) -> None:
    """Large updates and a harm: both are needed."""
    assert outcome("learning_rate_too_high", large_updates(ratio) | changes).outcome == expected


# From step 100 on the loss is the median of the forty before times a factor, and falls by 1% until the end.
@pytest.mark.parametrize(("factor", "expected"), [(1.1, "fired"), (0.9, "clear")])
def test_a_loss_that_does_not_come_back_under_large_updates(factor: float, expected: str) -> None:
    """It falls all the time, but forty steps after the updates grew it is above where it was."""
    loss = np.asarray(healthy()["steps"]["train_loss"])
    level = factor * float(np.median(loss[60:100]))
    steps = changed("steps", "train_loss", {i: level * (1.01 - i / 10_000) for i in range(100, 200)})
    assessment = outcome("learning_rate_too_high", large_updates(0.02) | {"steps": steps})
    assert assessment.outcome == expected
    assert ["nats/token before" in finding.detail for finding in assessment.findings] == [True] * (
        expected == "fired"
    )


# Gains are 0.8 for the square matrices and 0.4 for the others, with 5% noise.
@pytest.mark.parametrize(("size", "expected"), [(1.0, "fired"), (0.1, "clear")])
def test_updates_of_tiny_matrices_are_held_against_the_usual_size(size: float, expected: str) -> None:
    """Any update is large against matrices that are a tenth as large."""
    tensors = with_norms(size, "weight")["tensors"]
    updates = np.where(np.arange(200) >= 100, 20.0 * size, size)
    changes = with_norms(updates, "update", tensors=tensors) | collapsing(0.1)
    assert outcome("learning_rate_too_high", changes).outcome == expected


def test_a_loss_that_does_not_fall_under_large_updates() -> None:
    """Forty steps against the forty before, within the stretch of large updates."""
    loss = list(healthy()["steps"]["train_loss"])
    flat = changed("steps", "train_loss", {i: loss[100] * (1 + i / 1000) for i in range(100, 200)})
    (finding,) = outcome("learning_rate_too_high", large_updates(0.02) | {"steps": flat}).findings
    assert (finding.first_step, finding.subject) == (100, "update ratio")
    assert "the loss rises from" in finding.detail


def crawling(cosine: float, ratio: float) -> dict[str, Columns]:
    """Agreement of consecutive gradients and update ratio of a run at a constant rate."""
    count = len(healthy()["steps"]["step"])
    steps = changed("steps", "gradient_cosine_previous", np.full(count, cosine))
    rates = {"learning_rate": np.full(count, 1e-5)}
    return with_norms(ratio / 1e-3, "update") | {"steps": dict(steps) | rates}


# The healthy ratio of 1e-3 has 5% noise per tensor and step: the median of four stays within 10%.
TOO_LOW = [(0.41, 1e-4, "fired"), (0.39, 1e-4, "clear"), (0.8, 2.3e-3, "clear"), (0.8, 1.7e-3, "fired")]


@pytest.mark.parametrize(("cosine", "ratio", "expected"), TOO_LOW)
def test_learning_rate_too_low(cosine: float, ratio: float, expected: str) -> None:
    """Small updates and gradients that agree: both are needed."""
    assert outcome("learning_rate_too_low", crawling(cosine, ratio)).outcome == expected


PLAN = {"kind": "linear warmup, constant", "peak": 1e-4, "final": 1e-4, "warmup_steps": 10}
PLAN |= {"total_steps": 200}
DECLARED = dataclasses.replace(MANIFEST, planned_schedule=PLAN)


@pytest.mark.parametrize(
    ("rate", "planned", "expected"),
    [(1.9e-5, 1.9e-5, "fired"), (2.1e-5, 2.1e-5, "clear"), (1.9e-5, 1e-4, "clear")],
)
def test_a_rate_far_below_the_declared_one(rate: float, planned: float, expected: str) -> None:
    """From mid-run on, without gradients that agree; a rate that leaves its own plan is another fault."""
    changes = crawling(0.1, 1e-4)
    late = np.arange(len(healthy()["steps"]["step"])) >= 100
    changes["steps"] = dict(changes["steps"]) | {
        "learning_rate": np.where(late, rate, 1e-4),
        "planned_learning_rate": np.where(late, planned, 1e-4),
    }
    assessment = outcome("learning_rate_too_low", changes, DECLARED)
    assert assessment.outcome == expected
    assert [f.first_step for f in assessment.findings] == [100] * (expected == "fired")


def test_a_cosine_tail_is_not_too_low() -> None:
    """Rates are judged near the run's own peak: small updates in the tail are planned."""
    steps = changed("steps", "gradient_cosine_previous", dict.fromkeys(range(160, 200), 0.9))
    assert outcome("learning_rate_too_low", {"steps": steps}).outcome == "clear"


def shrinking(factor: Any, tensor_ids: tuple[int, ...] = MATRICES) -> dict[str, Columns]:
    """Weight matrices of norm 1, some of them times a factor, without noise."""
    tensors = dict(healthy()["tensors"])
    tensors["l2_norm"] = np.where(np.asarray(tensors["kind"]) == "weight", 1.0, tensors["l2_norm"])
    return with_norms(factor, "weight", tensor_ids=tensor_ids, tensors=tensors)


LATE = np.arange(200) >= 100
DECAYS = [
    (np.where(LATE, 0.69, 1.0), "fired"),
    (np.exp(-0.0011 * np.arange(200)), "fired"),  # to 0.8; 0.11% a step, from 0.95 on
    (np.exp(-0.0009 * np.arange(200)), "clear"),  # to 0.84
    (2 * np.exp(-0.003 * np.arange(200)) * np.where(np.arange(200) > 0, 1.0, 0.5), "clear"),  # grown before
]


@pytest.mark.parametrize(("factor", "expected"), DECAYS)
def test_weight_decay_too_strong(factor: Any, expected: str) -> None:
    """All matrices shrink to less than 0.7 of their first size, or by more than 0.1% a step below it."""
    assert outcome("weight_decay_too_strong", shrinking(factor)).outcome == expected


def test_the_finding_of_too_much_decay_begins_where_the_matrices_are_small() -> None:
    """A fall at once, seen at the first record after it."""
    (finding,) = outcome("weight_decay_too_strong", shrinking(np.where(LATE, 0.6, 1.0))).findings
    assert (finding.first_step, finding.last_step, finding.observed, finding.threshold) == (
        100,
        190,
        0.6,
        0.7,
    )


def test_one_shrinking_matrix_is_not_too_much_decay() -> None:
    """Decay takes from all of them."""
    changes = shrinking(np.where(LATE, 0.1, 1.0), tensor_ids=(0,))
    assert outcome("weight_decay_too_strong", changes).outcome == "clear"


def test_a_manifest_without_a_peak_takes_the_largest_planned_rate() -> None:
    """A bare loop that logs the plan row by row is judged too."""
    manifest = dataclasses.replace(MANIFEST, planned_schedule={})
    assert outcome("warmup_missing", with_rates({0: 2e-3}), manifest).outcome == "fired"
