"""Masks, attention entropy and dead units: what fires, and what is just below the threshold."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from rule_run import changed, healthy, outcome
from synthetic import MANIFEST, Columns

from analyzer.diagnoses import Finding

HEADS = 8  # rows of `attention` per step of the healthy run


def seeing(mass: dict[int, float], beyond: dict[int, float] | None = None) -> dict[str, Columns]:
    """Attention to later keys in some rows; beyond the next key in the same rows when not given."""
    attention = changed("attention", "future_mass", mass)
    further = changed("attention", "future_mass_beyond_next", mass if beyond is None else beyond)
    return {"attention": attention | {"future_mass_beyond_next": further["future_mass_beyond_next"]}}


def test_future_mass_is_a_broken_causal_mask() -> None:
    """The finding names the head with the most mass, and the first and last step with any."""
    (finding,) = outcome("causal_mask_absent", seeing({8: 0.125, 11: 0.25, 17: 0.125})).findings
    assert finding == Finding("run", 1, 2, "layer 0 head 3", 0.25, 0.0, finding.detail, 4)
    assert finding.detail.startswith("3 of 8 heads see later keys; ")


@pytest.mark.parametrize(("mass", "expected"), [(5e-324, "fired"), (0.0, "clear"), (-0.0, "clear")])
def test_the_smallest_mass_fires_and_none_is_clear(mass: float, expected: str) -> None:
    """The invariant is exact: the threshold is zero itself."""
    assert outcome("causal_mask_absent", seeing({8: mass})).outcome == expected


def test_a_nan_mass_proves_nothing() -> None:
    """NaN is greater than everything in this engine; here it is no evidence."""
    changes = seeing({8: math.nan, 9: math.inf})
    assert outcome("causal_mask_absent", changes).outcome == "clear"
    assert outcome("causal_mask_off_by_one", changes).outcome == "clear"


@pytest.mark.parametrize("rule", ["causal_mask_absent", "causal_mask_off_by_one"])
def test_a_declared_bidirectional_mask_may_see_the_future(rule: str) -> None:
    """What the run intends is no fault."""
    manifest = dataclasses.replace(MANIFEST, mask_type="bidirectional")
    for changes in (seeing({8: 0.5}), seeing({8: 0.5}, {})):
        assert outcome(rule, changes, manifest).outcome == "clear"


def test_mass_on_the_next_key_only_is_off_by_one() -> None:
    """The same rows are one fault or the other, never both."""
    changes = seeing({8: 0.125, 11: 0.25}, {})
    (finding,) = outcome("causal_mask_off_by_one", changes).findings
    assert finding == Finding("run", 1, 1, "layer 0 head 3", 0.25, 0.0, finding.detail, 4)
    assert finding.detail.startswith("2 of 8 heads see the next key and none beyond it")
    assert outcome("causal_mask_absent", changes).outcome == "clear"


def test_mass_beyond_the_next_key_is_not_off_by_one() -> None:
    """One head that sees further is enough to tell."""
    assert outcome("causal_mask_off_by_one", seeing({8: 0.5, 9: 0.5}, {9: 0.1})).outcome == "clear"
    assert outcome("causal_mask_off_by_one", seeing({})).outcome == "clear"


def test_off_by_one_shows_in_the_first_row() -> None:
    """Query 0 has two keys then, and an entropy."""
    changes = seeing({8: 0.1}, {})
    entropy = changed("attention", "first_row_entropy", {8: 0.5})["first_row_entropy"]
    changes["attention"] = dict(changes["attention"]) | {"first_row_entropy": entropy}
    (finding,) = outcome("causal_mask_off_by_one", changes).findings
    assert finding.detail.endswith("query 0 spreads over two keys, entropy 0.5 nats")


def evaluated(loss: float) -> list[dict[str, Any]]:
    """One evaluation of the primary split."""
    row = {"step": 200, "split": "validation", "repeat": 0, "evaluation_mode": True}
    return [row | {"loss_sum": 1000 * loss, "token_count": 1000}]


CONSEQUENCES = [
    (0.1, "training and evaluation share the missing mask: validation loss 0.1 nats/token at step 200"),
    (5.0, "evaluation masks correctly: validation loss 5 nats/token versus training"),
    (1.0, "the losses do not tell yet whether evaluation sees the future too: validation 1"),
]


@pytest.mark.parametrize(("loss", "words"), CONSEQUENCES)
def test_the_detail_says_whether_evaluation_sees_the_future(loss: float, words: str) -> None:
    """Training is at 1.3 nats/token, the floor at 0.2: below it both leak, far above only training does."""
    changes = {**seeing({8: 0.5}), "evaluations": evaluated(loss)}
    (finding,) = outcome("causal_mask_absent", changes).findings
    assert words in finding.detail


def test_the_detail_says_when_there_was_no_evaluation() -> None:
    """A run that is killed early is still proven broken."""
    (finding,) = outcome("causal_mask_absent", {**seeing({8: 0.5}), "evaluations": None}).findings
    words = "no evaluation of the primary split tells whether evaluation sees the future too"
    assert finding.detail.endswith(words)


def sharp(head_count: int, entropy: float, logit: float) -> dict[str, Columns]:
    """From step 100 on that many heads are sharp, with such logits."""
    columns = dict(healthy()["attention"])
    step = np.asarray(columns["step"])
    row_in_step = np.tile(np.arange(HEADS), len(step) // HEADS)
    is_sharp = (step >= 100) & (row_in_step < head_count)
    columns["entropy"] = np.where(is_sharp, entropy, columns["entropy"]).astype(np.float32)
    columns["max_abs_logit"] = np.where(is_sharp, logit, columns["max_abs_logit"]).astype(np.float32)
    return {"attention": columns}


COLLAPSES = [
    (4, 0.19, 31.0, "fired"),
    (3, 0.19, 31.0, "clear"),  # fewer than half: copy heads
    (4, 0.21, 31.0, "clear"),
    (4, 0.19, 29.0, "clear"),  # sharp without extreme logits
]


@pytest.mark.parametrize(("heads", "entropy", "logit", "expected"), COLLAPSES)
def test_attention_entropy_collapse(heads: int, entropy: float, logit: float, expected: str) -> None:
    """Half of the heads must be sharp, with extreme logits; each condition alone is silent."""
    assert outcome("attention_entropy_collapse", sharp(heads, entropy, logit)).outcome == expected


def test_the_collapse_finding_names_step_and_head() -> None:
    """Since the first recorded step at which half of the heads are sharp."""
    (finding,) = outcome("attention_entropy_collapse", sharp(8, 0.05, 60.0)).findings
    assert (finding.first_step, finding.last_step) == (100, 199)
    assert finding.observed == pytest.approx(0.05, rel=1e-6)  # float32
    assert "8 of 8 heads below it at step 100, largest logits around 60" in finding.detail


# The healthy run has windows of 14 steps, an epoch each, of 256 units in 2 layers.
@pytest.mark.parametrize(("dead", "expected"), [(26, "fired"), (25, "clear")])
def test_dead_units_above_a_tenth(dead: int, expected: str) -> None:
    """26 of 256 are more than a tenth, 25 are less."""
    assert (
        outcome("dead_units", {"units": changed("units", "dead_unit_count", {4: dead})}).outcome == expected
    )


def test_the_dead_units_finding_bounds_what_they_may_fire_on() -> None:
    """By layer and window, with the rule of three: 3 / (14 * 600 tokens)."""
    (finding,) = outcome("dead_units", {"units": changed("units", "dead_unit_count", {5: 128})}).findings
    assert (finding.first_step, finding.last_step, finding.subject) == (28, 41, "layer 1")
    assert (finding.observed, finding.threshold) == (0.5, 0.1)
    assert finding.detail.endswith("fires on less than 0.00036 of tokens")


def test_a_window_shorter_than_an_epoch_tells_nothing_of_dead_units() -> None:
    """Not every example was asked."""
    units = dict(changed("units", "dead_unit_count", {4: 256}))
    units["window_steps"] = [13] * len(units["step"])
    assert outcome("dead_units", {"units": units}).outcome == "clear"
