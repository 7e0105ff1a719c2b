"""Reduction, accumulation, gradients and anomalies: what fires, and what is just below the threshold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from rule_run import changed, healthy, outcome
from synthetic import MANIFEST, Columns

DECLARED_MEAN = dataclasses.replace(MANIFEST, loss_reduction="sum of NLL over all tokens / their number")
STEP_COUNT = 200
TOKENS = 600  # in every synthetic batch, of 32 examples


def with_steps(**columns: Any) -> dict[str, Columns]:
    """The healthy steps with some columns replaced."""
    return {"steps": dict(healthy()["steps"]) | columns}


@pytest.mark.parametrize(("counted", "expected"), [(601, "fired"), (600, "clear"), (300, "clear")])
def test_padding_in_loss(counted: int, expected: str) -> None:
    """One token more than there are is proof; fewer is a choice."""
    changes = {"steps": changed("steps", "loss_token_count", {7: counted})}
    assert outcome("padding_in_loss", changes).outcome == expected


def test_the_padding_finding_counts_tokens() -> None:
    """At the first such step, and the share over all of them."""
    changes = {"steps": changed("steps", "loss_token_count", {7: 800, 9: 700})}
    (finding,) = outcome("padding_in_loss", changes).findings
    assert (finding.first_step, finding.last_step, finding.observed) == (7, 9, 200.0)
    assert "800 tokens counted at step 7, 600 of them no padding; 2 of 200 steps" in finding.detail


def objective(factor: float, **columns: Any) -> dict[str, Columns]:
    """The backpropagated scalar as a multiple of the mean loss."""
    return with_steps(
        objective=factor * np.asarray(healthy()["steps"]["train_loss"]),
        accumulation_count=np.ones(STEP_COUNT, int),
        **columns,
    )


# Summation in float32 errs by up to 1e-3; 600 tokens, 32 examples, 18.75 tokens per example.
FACTORS = [
    (TOKENS, "fired"),
    (32, "fired"),
    (TOKENS / 32, "fired"),
    (TOKENS * 1.0009, "fired"),
    (TOKENS * 1.0011, "clear"),
    (1.0, "clear"),
    (7.0, "clear"),  # no number of anything
]


@pytest.mark.parametrize(("factor", "expected"), FACTORS)
def test_loss_summed_not_averaged(factor: float, expected: str) -> None:
    """The factor is the number of tokens, of examples, or of tokens per example."""
    assert outcome("loss_summed_not_averaged", objective(factor), DECLARED_MEAN).outcome == expected


def test_a_declared_sum_may_be_a_sum() -> None:
    """What the manifest says is no fault."""
    manifest = dataclasses.replace(MANIFEST, loss_reduction="sum of NLL over all tokens")
    assert outcome("loss_summed_not_averaged", objective(TOKENS), manifest).outcome == "clear"


def test_a_loss_scale_is_no_sum() -> None:
    """Mixed precision multiplies the objective, and says by how much."""
    scale = np.full(STEP_COUNT, float(TOKENS))
    changes = objective(TOKENS, loss_scale=scale)
    assert outcome("loss_summed_not_averaged", changes, DECLARED_MEAN).outcome == "clear"


# Two micro-batches of 200 and 400 tokens with 0.4 and 0.6 of the loss: means 1.2 and 0.9 of the whole mean.
ACCUMULATIONS = [
    (1.0, "clear"),
    (2.1, "fired"),  # means summed
    (1.05, "fired"),  # means averaged
    (1.0511, "clear"),  # neither
    (2.0, "clear"),
]


@pytest.mark.parametrize(("factor", "expected"), ACCUMULATIONS)
def test_accumulation_not_normalised(factor: float, expected: str) -> None:
    """The objective of the step against the means of its micro-batches."""
    changes = with_steps(objective=factor * np.asarray(healthy()["steps"]["train_loss"]))
    assert outcome("accumulation_not_normalised", changes, DECLARED_MEAN).outcome == expected


def test_a_declared_mean_over_sequences_may_average_means() -> None:
    """Equal weight of micro-batches is what it asks for."""
    manifest = dataclasses.replace(MANIFEST, loss_reduction="mean over sequences of their mean NLL")
    changes = with_steps(objective=1.05 * np.asarray(healthy()["steps"]["train_loss"]))
    assert outcome("accumulation_not_normalised", changes, manifest).outcome == "clear"


def remembering(cosine: float, norm: Any = 1.0) -> dict[str, Columns]:
    """Gradients of that cosine with the one before, of norm 1 or as given."""
    return with_steps(
        gradient_cosine_previous=np.full(STEP_COUNT, cosine),
        gradient_norm=np.broadcast_to(norm, STEP_COUNT).copy(),
    )


REMEMBERED: list[tuple[float, Any, str]] = [
    (0.98, 1.0, "fired"),
    (0.96, 1.0, "clear"),  # a tiny learning rate: gradients agree, but do not contain each other
    (0.71, 1.4 ** (np.arange(STEP_COUNT) % 8), "fired"),  # contained, and zeroed every eighth step
    (0.69, 1.5 ** (np.arange(STEP_COUNT) % 8), "clear"),
    (0.8, np.where(np.arange(STEP_COUNT) < 100, 1.0, 5.1), "fired"),  # grown beyond anything before
    (0.8, np.where(np.arange(STEP_COUNT) < 100, 1.0, 4.9), "clear"),
]


@pytest.mark.parametrize(("cosine", "norm", "expected"), REMEMBERED)
def test_gradients_not_zeroed(cosine: float, norm: Any, expected: str) -> None:
    """A gradient that contains the one before, or agrees with it and has grown."""
    assert outcome("gradients_not_zeroed", remembering(cosine, norm)).outcome == expected


def test_early_gradients_agree_without_being_kept() -> None:
    """Healthy ones do up to step 50."""
    cosine = np.where(np.arange(STEP_COUNT) < 60, 0.99, 0.1)
    changes = with_steps(gradient_cosine_previous=cosine, gradient_norm=np.ones(STEP_COUNT))
    assert outcome("gradients_not_zeroed", changes).outcome == "clear"


def block_gradients(factor: Any, layer: int = 0, steps: range = range(STEP_COUNT)) -> dict[str, Columns]:
    """Gradients of one block's weights (three tensors each) times a factor in some steps."""
    tensors = dict(healthy()["tensors"])
    mine = (
        (np.asarray(tensors["kind"]) == "gradient")
        & (np.asarray(tensors["tensor_id"]) // 3 == layer)
        & np.isin(tensors["step"], list(steps))
    )
    tensors["l2_norm"] = np.where(mine, np.asarray(tensors["l2_norm"]) * factor, tensors["l2_norm"])
    return {"tensors": tensors}


# Both blocks have the same size with 5% noise, so that the median share is within 3% of the factor.
@pytest.mark.parametrize(("factor", "expected"), [(0.028, "fired"), (0.032, "clear")])
def test_vanishing_gradients(factor: float, expected: str) -> None:
    """The first block's gradients are three hundredths of the last one's."""
    assert outcome("vanishing_gradients", block_gradients(factor)).outcome == expected


def test_small_gradients_of_the_last_block_do_not_vanish() -> None:
    """Vanishing is on the way back: the early block must be the small one."""
    assert outcome("vanishing_gradients", block_gradients(0.001, layer=1)).outcome == "clear"


def test_gradients_that_are_small_everywhere_do_not_vanish() -> None:
    """A converged model has small gradients."""
    both = block_gradients(1e-6)["tensors"]
    other = block_gradients(1e-6, layer=1)["tensors"]
    norms = np.minimum(both["l2_norm"], other["l2_norm"])
    assert outcome("vanishing_gradients", {"tensors": dict(both) | {"l2_norm": norms}}).outcome == "clear"


def test_nineteen_steps_of_vanishing_are_not_a_window() -> None:
    """Twenty recorded steps in a row, by their median: ten and a half of them must be small."""
    assert outcome("vanishing_gradients", block_gradients(0.001, steps=range(60, 69))).outcome == "clear"


def norm_level(level: float, first: int = 100, last: int = STEP_COUNT) -> dict[str, Columns]:
    """Norms of 1 before and after clipping, and another level in some steps."""
    step = np.arange(STEP_COUNT)
    norm = np.where((step >= first) & (step < last), level, 1.0)
    return with_steps(gradient_norm=norm, clipped_gradient_norm=norm)


EXPLOSIONS = [
    (2.1, 100, 200, "fired"),
    (1.9, 100, 200, "clear"),
    (50.0, 100, 104, "clear"),  # four steps are a spike
    (50.0, 10, 200, "clear"),  # the first steps have no past
]


@pytest.mark.parametrize(("level", "first", "last", "expected"), EXPLOSIONS)
def test_exploding_gradients(level: float, first: int, last: int, expected: str) -> None:
    """A level of ten steps that is twice the past's, and above everything before."""
    assert outcome("exploding_gradients", norm_level(level, first, last)).outcome == expected


def test_a_clipped_explosion_is_bounded() -> None:
    """The norm after clipping is what moves the weights."""
    norm = np.where(np.arange(STEP_COUNT) >= 100, 50.0, 1.0)
    changes = with_steps(gradient_norm=norm, clipped_gradient_norm=np.ones(STEP_COUNT))
    assert outcome("exploding_gradients", changes).outcome == "clear"


def test_the_explosion_begins_with_its_first_step() -> None:
    """Not with the window that shows it."""
    (finding,) = outcome("exploding_gradients", norm_level(10.0)).findings
    assert finding.first_step == 100


def frozen(last_step: int, **columns: Any) -> dict[str, Columns]:
    """Tensor 1 keeps its hash from step 50 to ``last_step``; hashes come every ten steps."""
    tensors = dict(healthy()["tensors"])
    hashes = list(tensors["content_hash"])
    for row, (step, tensor, kind) in enumerate(
        zip(tensors["step"], tensors["tensor_id"], tensors["kind"], strict=True)
    ):
        if kind == "weight" and tensor == 1 and 50 <= step <= last_step:
            hashes[row] = 12345
    return {"tensors": tensors | {"content_hash": hashes, **columns}}


@pytest.mark.parametrize(("last_step", "expected"), [(60, "fired"), (50, "clear")])
def test_frozen_layer(last_step: int, expected: str) -> None:
    """The same hash at two recorded steps is proof; one alone is none."""
    assert outcome("frozen_layer", frozen(last_step)).outcome == expected


def test_the_frozen_finding_names_the_tensor_and_its_steps() -> None:
    """From the first to the last step with the same bits."""
    (finding,) = outcome("frozen_layer", frozen(80)).findings
    assert (finding.first_step, finding.last_step, finding.observed) == (50, 80, 30.0)
    assert finding.subject == "blocks.0.mlp.up.weight"


def test_a_declared_freeze_is_no_fault() -> None:
    """A weight that is not trainable stays."""
    names = changed("tensor_names", "trainable", {1: False})
    assert outcome("frozen_layer", frozen(80) | {"tensor_names": names}).outcome == "clear"


def test_a_weight_without_learning_rate_or_gradient_may_stay() -> None:
    """Nothing asked it to move."""
    still = with_steps(learning_rate=np.zeros(STEP_COUNT))
    assert outcome("frozen_layer", frozen(80) | still).outcome == "clear"
    norms = np.where(np.asarray(healthy()["tensors"]["tensor_id"]) == 1, 0.0, 1.0)
    assert outcome("frozen_layer", frozen(80, l2_norm=norms)).outcome == "clear"


def without_gradient(steps: range, missing: bool) -> dict[str, Columns]:
    """Tensor 4 gets no gradient in some steps: none arrives, or all of it is zero."""
    tensors = dict(healthy()["tensors"])
    mine = (
        (np.asarray(tensors["kind"]) == "gradient")
        & (np.asarray(tensors["tensor_id"]) == 4)
        & np.isin(tensors["step"], list(steps))
    )
    if missing:
        has = [False if m else value for m, value in zip(mine, tensors["has_gradient"], strict=True)]
        norms: Any = [None if m else float(n) for m, n in zip(mine, tensors["l2_norm"], strict=True)]
        return {"tensors": tensors | {"has_gradient": has, "l2_norm": norms}}
    return {"tensors": tensors | {"l2_norm": np.where(mine, 0.0, tensors["l2_norm"])}}


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize(("steps", "expected"), [(range(60, 63), "fired"), (range(60, 62), "clear")])
def test_detached_branch(missing: bool, steps: range, expected: str) -> None:
    """Three recorded steps in a row without a gradient, or with an exactly zero one."""
    assert outcome("detached_branch", without_gradient(steps, missing)).outcome == expected


def test_a_step_without_any_gradient_is_no_detached_branch() -> None:
    """Where nothing has a gradient there is no other part that the tensor could be cut off from."""
    tensors = dict(healthy()["tensors"])
    is_gradient = np.asarray(tensors["kind"]) == "gradient"
    norms = np.where(is_gradient, 0.0, tensors["l2_norm"])
    assert outcome("detached_branch", {"tensors": tensors | {"l2_norm": norms}}).outcome == "clear"


def test_a_nan_gradient_is_not_a_zero_one() -> None:
    """Its norm over finite elements is 0; the elements are counted apart."""
    changes = without_gradient(range(60, 70), missing=False)
    nan_count = np.where(np.asarray(changes["tensors"]["l2_norm"]) == 0, 9, 0)
    tensors = dict(changes["tensors"]) | {"nan_count": nan_count}
    assert outcome("detached_branch", {"tensors": tensors}).outcome == "clear"


def test_one_nan_element_is_a_non_finite_value() -> None:
    """One element of one tensor is enough; the finding names it."""
    tensors = changed("tensors", "nan_count", {STEP_COUNT * 6 + 3: 1})  # weights follow the gradients of 6
    (finding,) = outcome("nonfinite_value", {"tensors": tensors}).findings
    assert (finding.first_step, finding.subject) == (0, "weight of blocks.1.attention.query.weight")
    assert (finding.observed, finding.threshold) == (1.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_found_without_tensors(value: float) -> None:
    """Where no tensor was recorded the loss itself is the evidence."""
    changes = {"steps": changed("steps", "train_loss", {7: value, 9: value}), "tensors": None}
    (finding,) = outcome("nonfinite_value", changes).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (7, 9, "train_loss")


def test_a_loss_spike_is_one_finding_per_event() -> None:
    """Two bad batches, two findings."""
    assessment = outcome("loss_spike", {"steps": changed("steps", "train_loss", {80: 9.0, 140: 9.0})})
    assert [f.first_step for f in assessment.findings] == [80, 140]
    assert assessment.findings[0].threshold == 6.0
    assert assessment.findings[0].detail.endswith("back at step 81")


# The loss at step 120 is 1.74, its 16-row median before 1.82, the scale below 0.02: prominence 0.12 is z = 6.
@pytest.mark.parametrize(("factor", "expected"), [(1.10, "clear"), (1.30, "fired")])
def test_a_loss_spike_below_its_threshold_is_clear(factor: float, expected: str) -> None:
    """A tenth above the curve is noise, three tenths are not."""
    loss = list(healthy()["steps"]["train_loss"])[120]
    steps = changed("steps", "train_loss", {120: factor * loss})
    assert outcome("loss_spike", {"steps": steps}).outcome == expected


# Norms around 1 with 5% noise: the median of sixteen before lies within 3% of 1.
@pytest.mark.parametrize(("norm", "expected"), [(4.3, "fired"), (3.7, "clear"), (math.nan, "clear")])
def test_a_gradient_norm_spike_is_a_fourfold_rise(norm: float, expected: str) -> None:
    """Norms double by chance."""
    noise = np.exp(np.random.default_rng(0).normal(0, 0.05, STEP_COUNT))
    noise[120] = norm
    assert outcome("gradient_norm_spike", with_steps(gradient_norm=noise)).outcome == expected
