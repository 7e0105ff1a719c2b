"""Scores of the calibration on rows made by hand, and bounds against published tables."""

import math

import pytest
from outcomes import outcome

from calibration.bounds import (
    event_rate_upper_bound,
    gamma_quantile,
    nearest_rank,
    proportion_interval,
)
from calibration.outcome import Detection, FiredRule, Harm
from calibration.peer_scores import peer_answer
from calibration.scores import (
    ABSTAIN,
    HEALTHY,
    Share,
    both_named,
    confusion,
    delays,
    events,
    f1_by_class,
    first_word,
    is_found_at_once,
    macro_f1,
    measured_severity,
    named_within,
)
from calibration.tables import false_alarm_bound

TABLE_ACCURACY = 5e-4  # the tables have three decimals


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 5.991), (10, 18.307), (30, 43.773), (5, 11.070)])
def test_the_gamma_quantile_is_half_a_chi_squared_one(degrees: int, quantile: float) -> None:
    """0.95 quantiles of NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.4."""
    assert 2 * gamma_quantile(0.95, degrees / 2) == pytest.approx(quantile, abs=TABLE_ACCURACY)


@pytest.mark.parametrize(("count", "bound"), [(0, 2.996), (1, 4.744), (4, 9.154)])
def test_lone_events_have_the_exact_poisson_bound(count: int, bound: float) -> None:
    """Garwood's one-sided 95% bounds: four events in 100k steps are below one in 10k."""
    runs = [1] * count + [0] * 50
    assert event_rate_upper_bound(runs, 10) == pytest.approx(bound / 10, abs=TABLE_ACCURACY / 10)


def test_events_of_one_run_weigh_more_than_those_of_many() -> None:
    """Four findings in one run are one accident of size four: the next one may be as large."""
    assert event_rate_upper_bound([4, 0, 0, 0], 1) > event_rate_upper_bound([1, 1, 1, 1], 1)


def test_a_cluster_is_a_poisson_count_times_its_size() -> None:
    """Two runs with three events each: three times the bound of two lone events, 6.296."""
    assert event_rate_upper_bound([3, 3, 0], 1) == pytest.approx(3 * 6.296, abs=3 * TABLE_ACCURACY)


def test_the_interval_of_a_proportion_is_wilsons() -> None:
    """19 of 20: 0.764 to 0.991, as in Newcombe 1998, method 3."""
    assert proportion_interval(19, 20) == pytest.approx((0.764, 0.991), abs=TABLE_ACCURACY)
    assert proportion_interval(0, 0) == (0.0, 1.0)


def test_a_quantile_counts_what_was_never_found() -> None:
    """Nearest ranks with infinity as a value: half found says nothing of the rest."""
    assert nearest_rank([3, math.inf, 1, math.inf], 0.5) == 3
    assert nearest_rank([3, math.inf, 1, math.inf], 0.9) == math.inf
    assert math.isnan(nearest_rank([], 0.5))


def test_the_first_word_is_a_cause_or_healthy_or_an_abstention() -> None:
    """An anomaly that nothing explains names no cause."""
    assert first_word(outcome()) == HEALTHY
    assert first_word(outcome("bad_batch", "loss_spike")) == ABSTAIN
    assert first_word(outcome("bad_batch", "loss_spike", "bad_batch")) == "bad_batch"


def test_causes_are_ranked_from_the_stored_rules() -> None:
    """Proof before signature, and a symptom is no cause."""
    fired = ("underfitting", "dead_units", "padding_in_loss")
    assert outcome("dead_units", *fired).causes() == ("padding_in_loss", "dead_units")


def test_first_and_among_the_first_differ() -> None:
    """A proof of something else comes first."""
    cells = [outcome("dead_units", "dead_units", "padding_in_loss"), outcome("dead_units")]
    assert named_within(cells, 1) == Share(0, 2)
    assert named_within(cells, 3) == Share(1, 2)


def test_macro_f1_weighs_classes_alike() -> None:
    """Healthy: 3 said, 2 right of 2; bad_batch: 1 right of 2. F1 0.8 and 2/3."""
    cells = [outcome(), outcome(), outcome("bad_batch"), outcome("bad_batch", "bad_batch")]
    counts = confusion(cells)
    assert f1_by_class(counts) == {"bad_batch": pytest.approx(2 / 3), HEALTHY: pytest.approx(0.8)}
    assert macro_f1(counts) == pytest.approx((2 / 3 + 0.8) / 2)


def test_a_delay_counts_from_the_first_testable_row() -> None:
    """Infinite when the rule did not fire."""
    cells = [
        outcome("dead_units", detections=(Detection("dead_units", 149, 199),)),
        outcome("dead_units", detections=(Detection("dead_units", 149, None),)),
    ]
    assert delays(cells) == {"dead_units": [50, math.inf]}


@pytest.mark.parametrize(
    ("detected", "at_once"), [(10, True), (11, False), (5, True), (4, False), (None, False)]
)
def test_a_proof_is_found_by_its_row_and_not_before_the_fault(detected: int | None, at_once: bool) -> None:
    """A rule that fires before the fault fires for another reason; the fault starts at step 5."""
    cell = outcome("padding_in_loss", start=5, detections=(Detection("padding_in_loss", 10, detected),))
    assert is_found_at_once(cell) is at_once


def test_events_are_findings_on_healthy_cells() -> None:
    """Each row of a fired rule's query counts; faulty cells do not."""
    cells = [outcome(fired=(FiredRule("dead_units", 0, 2),)), outcome("bad_batch", "bad_batch")]
    assert events(cells) == {"dead_units": 2}
    # one run of two events in 300 steps: twice the bound of one lone event, per 10k steps
    assert false_alarm_bound(cells) == pytest.approx(2 * 4.744 / 0.03, rel=1e-3)


def test_a_pair_is_named_when_both_are_causes() -> None:
    """One of two is not enough."""
    pair = "padding_in_loss+frozen_layer"
    assert both_named(outcome(pair, "padding_in_loss", "frozen_layer"))
    assert not both_named(outcome(pair, "padding_in_loss"))


HARMLESS, HARMFUL = Harm(0.1, -0.1, 0.3, 0), Harm(0.1, 0.05, 0.15, 0)


@pytest.mark.parametrize(
    ("harms", "declared", "severity"),
    [
        ([HARMFUL, HARMFUL, HARMLESS], "S1", "S2"),
        ([HARMFUL, HARMLESS], "S2", "S1"),
        ([Harm(None, None, None, 9)], "S1", "S4"),
        ([HARMLESS], "S3", "S3"),
        ([], "S2", "S2"),
    ],
)
def test_harm_in_most_runs_gives_the_severity(harms: list[Harm], declared: str, severity: str) -> None:
    """Half is not most; an invalid result is no matter of loss."""
    assert measured_severity([outcome("dead_units", harm=harm) for harm in harms], declared) == severity


def test_a_peers_rule_counts_for_every_fault_that_it_leads_to() -> None:
    """Whatever else fired; without the fault it says what its first rule leads to."""
    thresholds = peer_answer("lone thresholds")
    fired = ("loss_above_median", "gradient_norm_above_limit")
    assert thresholds(outcome("gradients_not_zeroed", peer_rules=fired)) == ("gradients_not_zeroed",)
    assert thresholds(outcome("dead_units", peer_rules=fired))[0] == "bad_batch"
    assert thresholds(outcome()) == ()
    assert peer_answer("SageMaker Debugger")(outcome("bad_batch", peer_rules=fired)) == ()
